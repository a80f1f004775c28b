"""The weights of the batches and micro-batches of an optimizer step in its loss.

An example with two replicas, the first with two batches of two micro-batches each, the second with
one, for a loss that returns means:

    count of a micro-batch     3   1     0   2         4   0
    count of a batch             4         2             4
    weight of its mean        4x2/10    2x2/10        4x2/10   replicas are averaged: x 2; total: 10
    grad_scales              .6  .2     0  .4        .8   0    batch's weight x count / batch count

With a fixed number of logical replicas, their gradients are summed instead of averaged, so that
nothing depends on the number of processes: the weights then omit the factor 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import PendingNumbers, accelerator_of, put
from hybridtrain._base.microbatch import batch_size, chunk_sizes, shares_of
from hybridtrain._base.shares import Shares
from hybridtrain.errors import BatchError
from hybridtrain.loss.counted import CountedLoss
from hybridtrain.world import World

_NUMBERS = frozenset((int, float))


@dataclass(frozen=True)
class ShareLoss:
    """The loss of a logical replica's share of a batch.

    Attributes:
        replica: the index of the logical replica.
        mean: the mean over the counted elements of the share, 0-dim; see `MicrobatchCounts.mean`.
        count: the number of these elements.
    """

    replica: int
    mean: Tensor
    count: float


class MicrobatchCounts:
    """The counts of the micro-batches of a batch, or of a logical replica's share of one.

    The mean of the batch is the sum over its micro-batches of weight x value of the loss function,
    divided by `count`.

    Args:
        loss: the loss.
        batch: `(inputs, targets)`.
        chunks: the number of micro-batches to split it into.
        replica: the logical replica of the batch.
        in_step: False for a padding batch, which does not count in the step.
        is_step: whether the step consists of this batch only.

    Attributes:
        replica: as passed.
        in_step: as passed.
        microbatches: the number of micro-batches.
        is_single_microbatch: whether the whole step is this one micro-batch.
        weights: the weight of each micro-batch's loss value: 1 for sums, its count for means.
        count: the count of the batch.
        counted: the count of the batch in the step: 0 for a padding batch.

    Raises:
        BatchError: a count is negative or not finite, or a loss without a count gets labels to
            ignore.
    """

    weights: Sequence[float]
    count: float
    counted: float

    def __init__(
        self,
        loss: CountedLoss,
        batch: tuple[Any, Any],
        chunks: int,
        replica: int = 0,
        in_step: bool = True,
        is_step: bool = False,
    ) -> None:
        self.replica, self.in_step = replica, in_step
        sizes = chunk_sizes(batch_size(*batch), chunks)
        self.microbatches = len(sizes)
        self.is_single_microbatch = is_step and len(sizes) == 1
        if not self.is_single_microbatch:
            loss.refuse_ignored(*batch)
        self._is_sum = loss.is_sum
        counts: Any = loss.counts(*batch, sizes)
        if _NUMBERS.issuperset(map(type, counts)):
            self._set(_checked(counts))
        else:
            self._pending = copied_to_host(counts)

    def _set(self, counts: Sequence[float]) -> None:
        self.count = sum(counts)
        self.counted = self.count if self.in_step else 0
        self.weights = [1] * self.microbatches if self._is_sum else counts

    def __getattr__(self, name: str) -> Any:
        # all at once, and on first use: the copy of the counts from a GPU may take until then
        if name not in ("weights", "count", "counted"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._set(self._pending())
        return vars(self)[name]

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean from the loss values of the micro-batches, 0-dim.

        It is 0 if nothing counts, and NaN without values (in a process without the last stage).
        """
        if not values:
            return torch.tensor(float("nan"))
        weights, count = self.weights, self.count
        if not count:
            return torch.zeros_like(values[0])
        if len(values) == 1:
            return values[0] if weights[0] == count else values[0] * weights[0] / count
        stacked = torch.stack(list(values))
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        # not new_tensor, which waits for all kernels queued on the device
        on_device = put(torch.tensor(weights, dtype=stacked.dtype), stacked.device)
        return (stacked * on_device).sum() / count


def microbatch_weights(loss: CountedLoss, batch: tuple[Any, Any], chunks: int) -> list[float]:
    """Returns the weight of each micro-batch's loss value, for a batch of an evaluation."""
    shares = [MicrobatchCounts(loss, parts, chunks) for parts in shares_of(*batch)]
    return [weight for share in shares for weight in share.weights]


class StepScale:
    """The scale of each micro-batch's loss in an optimizer step.

    Args:
        shares: this process's part of the step.
        world: the processes and replicas.
        known_total: the count of the whole step, if known.
        weight: a factor for the mean of each batch instead of its share of the total.
    """

    def __init__(
        self,
        shares: Sequence[MicrobatchCounts],
        world: World,
        known_total: float | None,
        weight: float | None,
    ) -> None:
        fixed, replicas = world.fixed_replicas is not None, world.logical_replicas
        self._shares = shares
        self._replicas = 1 if fixed else replicas  # gradients are summed, or averaged
        self._weight = None if weight is None else float(weight) / (replicas if fixed else 1)
        self._total = known_total
        self._counts: Tensor | None = None
        # some processes of a pipeline may not have read the batch
        counts_elsewhere = replicas > 1 or world.processes_per_replica > 1
        if known_total is None and weight is None and counts_elsewhere:
            # added in replica order, so that float counts are the same on all processes
            self._counts = torch.zeros(replicas, dtype=torch.float64)
            # all processes of a replica have the same batch: count it once
            for share in shares if world.pipeline_rank == 0 else ():
                self._counts[share.replica] += share.counted
            # asynchronous: the all-reduce overlaps with the forward
            self._work = world.begin_sum(self._counts)

    @property
    def total(self) -> float:
        """The count of the step over all batches and replicas; the first use waits for the sum."""
        if self._total is None:
            if len(self._shares) == 1 and self._counts is None:
                self._total = self._shares[0].counted
            elif self._counts is None:
                self._total = sum([share.counted for share in self._shares])
            else:
                if self._work is not None:
                    self._work.wait()
                self._total = math.fsum(self._counts.tolist())
        return self._total

    def of(self, share: MicrobatchCounts) -> list[float]:
        """Returns the gradient of the step's loss with respect to each micro-batch's loss value."""
        numerator: float = self._replicas * share.in_step
        denominator = self.total if self._weight is None else share.count
        if self._weight is not None:
            numerator = self._weight
        if not (share.count and denominator):
            return [0.0] * share.microbatches
        if len(share.weights) == 1:
            return [share.weights[0] * numerator / denominator]
        # rounded once, as in loss * part / total
        return [part * numerator / denominator for part in share.weights]


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    Args:
        shares: the counts of each logical replica's share, or of the whole batch.
        scale: the scale of the step.

    Attributes:
        microbatches: the number of micro-batches of the batch.
        is_single_microbatch: whether the whole step is this one micro-batch.
    """

    def __init__(self, shares: Sequence[MicrobatchCounts], scale: StepScale) -> None:
        self._shares, self._scale = shares, scale
        self._grad_scales: Sequence[float] | None = None
        if len(shares) == 1:
            self.microbatches = shares[0].microbatches
        else:
            self.microbatches = sum([share.microbatches for share in shares])
        self.is_single_microbatch = shares[0].is_single_microbatch

    @property
    def weights(self) -> Sequence[float]:
        """The weight of each micro-batch's loss value in the sum of its share."""
        if len(self._shares) == 1:
            return self._shares[0].weights
        return [weight for share in self._shares for weight in share.weights]

    def is_of(self, loss: CountedLoss, batch: tuple[Any, Any], chunks: int) -> bool:
        """Returns whether a loss counts in its batch what the loss of the step has counted."""
        parts = shares_of(*batch)
        counts = [MicrobatchCounts(loss, part, chunks) for part in parts]
        return len(counts) == len(self._shares) and all(
            list(own.weights) == list(share.weights) and own.count == share.count
            for own, share in zip(counts, self._shares, strict=True)
        )

    @property
    def grad_scales(self) -> Sequence[float]:
        """The gradient of the step's loss with respect to each micro-batch's loss value."""
        if self._grad_scales is None:
            self._grad_scales = [*chain.from_iterable(map(self._scale.of, self._shares))]
        return self._grad_scales

    @property
    def count(self) -> float:
        """The count of the batch."""
        return sum([share.count for share in self._shares])

    @property
    def counted(self) -> float:
        """The count of the batch in the step: 0 for a padding batch."""
        if len(self._shares) == 1:
            return self._shares[0].counted
        return sum([share.counted for share in self._shares])

    def share_losses(self, values: Sequence[Tensor]) -> list[ShareLoss]:
        """Returns the loss of each logical replica; see `mean`."""
        losses: list[ShareLoss] = []
        first = 0
        for share in self._shares:
            of_share = values[first : first + share.microbatches]
            losses.append(ShareLoss(share.replica, share.mean(of_share), share.counted))
            first += share.microbatches
        return losses

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean over all shares; see `MicrobatchCounts.mean`."""
        if len(self._shares) == 1 or not values:
            return self._shares[0].mean(values)
        losses, total = self.share_losses(values), self.counted
        if not total:
            return torch.zeros_like(values[0])
        return torch.stack([loss.mean * (loss.count / total) for loss in losses]).sum()


class StepWeights(list[BatchWeight]):
    """The weights of the batches of one optimizer step.

    Args:
        loss: the loss of the step.
        batches: this replica's batches, each `(inputs, targets)`.
        chunks: the number of micro-batches to split a batch into.
        world: the processes and replicas.
        samples: for each batch, the number of samples that count; 0 for a padding batch.
        total: the number of samples of the step over all batches and replicas, if known; used by a
            loss that counts samples.
        weight: a factor for the mean of each batch instead of its share of the total.
    """

    def __init__(
        self,
        loss: CountedLoss,
        batches: Sequence[tuple[Any, Any]],
        chunks: int,
        world: World,
        *,
        samples: Sequence[int] | None = None,
        total: float | None = None,
        weight: float | None = None,
    ) -> None:
        # the mean of one batch, without a factor
        is_one = len(batches) == 1 and world.logical_replicas == 1 and weight in (None, 1)
        counts: list[list[MicrobatchCounts]] = []
        for index, batch in enumerate(batches):
            if isinstance(batch[0], Shares):
                pairs = zip(shares_of(*batch), batch[0].shares, strict=True)
                of_batch = [
                    MicrobatchCounts(loss, parts, chunks, share.replica, share.samples > 0)
                    for parts, share in pairs
                ]
            else:
                in_step = samples is None or samples[index] > 0
                replica = world.owned_replicas.start
                of_batch = [MicrobatchCounts(loss, batch, chunks, replica, in_step, is_one)]
            counts.append(of_batch)
        known_total = total if loss.counts_samples else None
        self._scale = StepScale([*chain.from_iterable(counts)], world, known_total, weight)
        super().__init__(map(BatchWeight, counts, repeat(self._scale)))

    @property
    def total(self) -> float:
        """The count of the step over all batches and replicas; the first use waits for the sum.

        If it is 0, there is no gradient and the optimizer should not step.
        """
        return self._scale.total


def copied_to_host(counts: Sequence[int | float | Tensor]) -> Callable[[], Sequence[float]]:
    """Returns a function that returns the counts as numbers, and waits for counts on a GPU.

    The copy to the host is queued before the forwards and awaited at the first loss, so that the
    host can launch a step's forwards while the GPU is still busy with the previous step.

    Raises:
        BatchError: a count is negative or not finite; for counts on a GPU the returned function
            raises it.
    """
    tensors = [count for count in counts if isinstance(count, Tensor)]
    if len(tensors) < len(counts) or accelerator_of(tensors[0].device) is None:
        numbers = _checked([c.item() if isinstance(c, Tensor) else c for c in counts])
        return lambda: numbers
    copy = PendingNumbers(tensors)
    return cache(lambda: _checked(copy.numbers()))


def _checked(counts: Sequence[float]) -> Sequence[float]:
    if min(counts) >= 0 and math.isfinite(sum(counts)):
        return counts
    raise BatchError(f"the count of a loss must be a finite number of at least 0, not {counts}")
