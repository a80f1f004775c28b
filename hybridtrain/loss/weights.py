"""The weights of the batches and micro-batches of an optimizer step in its loss.

An example with two replicas, the first with two batches of two micro-batches each, the second with
one, for a loss that returns means:

    count of a micro-batch     3   1     0   2         4   0
    count of a batch             4         2             4
    weight of its mean        4x2/10    2x2/10        4x2/10   replicas are averaged: x 2; total: 10
    grad_scales              .6  .2     0  .4        .8   0    batch's weight x count / batch count

With a fixed number of logical replicas their gradients are summed, not averaged, so that nothing
depends on the number of processes: the weights are without the factor 2 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import PendingNumbers, accelerator_of, put
from hybridtrain._base.microbatch import batch_size, chunk_sizes, shares_of
from hybridtrain._base.shares import Shares
from hybridtrain.errors import BatchError
from hybridtrain.loss.counted import CountedLoss
from hybridtrain.world import World


@dataclass(frozen=True)
class ShareLoss:
    """The loss of a logical replica's share of a batch.

    Attributes:
        replica: the number of the logical replica.
        mean: over what counts in the share, a 0-dim tensor; see `BatchWeight.mean`.
        count: what it is a mean over.
    """

    replica: int
    mean: Tensor
    count: float


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    The mean of a batch is the sum over its micro-batches of weight x value of the loss function,
    divided by `count`.

    Args:
        loss: the loss of the step.
        batch: `(inputs, targets)`.
        chunks: the number of micro-batches to cut a batch into.
        step: the weights of the whole step; None for a batch that is only evaluated.
        in_step: False for a padding batch, which does not count in the step.
        replica: the logical replica that the batch is a share of.

    Attributes:
        microbatches: the number of micro-batches of the batch.
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
        step: StepWeights | None = None,
        in_step: bool = True,
        replica: int = 0,
    ) -> None:
        self.replica = replica
        sizes = chunk_sizes(batch_size(*batch), chunks)
        self.microbatches = len(sizes)
        self.is_single_microbatch = step is not None and step.is_one_batch and len(sizes) == 1
        if not self.is_single_microbatch:
            loss.refuse_ignored(*batch)
        self._is_sum, self._step, self._in_step = loss.is_sum, step, in_step
        self._counts = copied_to_host(loss.counts(*batch, sizes))

    def __getattr__(self, name: str) -> Any:
        # together, and with the first use: counts may be on their way from a GPU until then
        if name not in ("weights", "count", "counted"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        counts = self._counts()
        self.count = sum(counts)
        self.counted = self.count if self._in_step else 0
        self.weights = [1] * self.microbatches if self._is_sum else counts
        return vars(self)[name]

    @cached_property
    def grad_scales(self) -> Sequence[float]:
        """The gradient of the step's loss with respect to each micro-batch's loss value."""
        step, count = self._step, self.count
        assert step is not None
        if not count or not (self._in_step or step.has_fixed_weight):
            return [0.0] * self.microbatches
        return [step.grad_scale(part, count) for part in self.weights]

    @property
    def counted_by_replica(self) -> list[tuple[int, float]]:
        """The count of each logical replica in the step."""
        return [(self.replica, self.counted)]

    def share_losses(self, values: Sequence[Tensor]) -> list[ShareLoss]:
        """Returns the loss of each logical replica; see `mean`."""
        return [ShareLoss(self.replica, self.mean(values), self.counted)]

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the batch from the loss values of its micro-batches, 0-dim.

        It is 0 if nothing counts, and NaN without values (another process has the last stage).
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


class SharesWeight:
    """The weight of a batch that is made of shares; each share is weighted as a batch.

    It has the attributes of `BatchWeight`.
    """

    is_single_microbatch = False

    def __init__(self, shares: Sequence[BatchWeight]) -> None:
        self._shares = shares
        self.microbatches = sum(share.microbatches for share in shares)

    @cached_property
    def weights(self) -> Sequence[float]:
        """The weight of each micro-batch's loss value."""
        return [*chain.from_iterable(share.weights for share in self._shares)]

    @property
    def count(self) -> float:
        """The count of the batch."""
        return sum(share.count for share in self._shares)

    @property
    def counted(self) -> float:
        """The count of the batch in the step."""
        return sum(share.counted for share in self._shares)

    @cached_property
    def grad_scales(self) -> Sequence[float]:
        """The gradient of the step's loss with respect to each micro-batch's loss value."""
        return [*chain.from_iterable(share.grad_scales for share in self._shares)]

    @property
    def counted_by_replica(self) -> list[tuple[int, float]]:
        """The count of each logical replica in the step."""
        return [(share.replica, share.counted) for share in self._shares]

    def share_losses(self, values: Sequence[Tensor]) -> list[ShareLoss]:
        """Returns the loss of each logical replica."""
        losses: list[ShareLoss] = []
        first = 0
        for share in self._shares:
            losses += share.share_losses(values[first : first + share.microbatches])
            first += share.microbatches
        return losses

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean over what counts in all shares."""
        if not values:
            return torch.tensor(float("nan"))
        losses, total = self.share_losses(values), self.counted
        if not total:
            return torch.zeros_like(values[0])
        parts = [loss.mean * (loss.count / total) for loss in losses]
        return torch.stack(parts).sum()


def microbatch_weights(loss: CountedLoss, batch: tuple[Any, Any], chunks: int) -> Sequence[float]:
    """Returns the weight of each micro-batch's loss value, of a batch that is only evaluated."""
    shares = [BatchWeight(loss, parts, chunks) for parts in shares_of(*batch)]
    return SharesWeight(shares).weights


class StepWeights(list[BatchWeight | SharesWeight]):
    """The weights of the batches of one optimizer step.

    Args:
        loss: the loss of the step.
        batches: this replica's batches, each `(inputs, targets)`.
        chunks: the number of micro-batches to cut a batch into.
        world: the processes and replicas.
        samples: for each batch, the number of samples that count; 0 for a padding batch.
        total: the samples of the step over all batches and replicas, if known; used by a loss that
            counts samples.
        weight: a factor for the mean of each batch instead of its share of the total.

    Attributes:
        is_one_batch: whether the loss of the step is the mean of one batch.
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
        fixed, replicas = world.fixed_replicas is not None, world.logical_replicas
        self._replicas = 1 if fixed else replicas  # gradients are summed, or averaged
        self._weight = None if weight is None else float(weight) / (replicas if fixed else 1)
        self.is_one_batch = len(batches) == 1 and replicas == 1 and weight in (None, 1)
        for index, batch in enumerate(batches):
            in_step = samples is None or samples[index] > 0
            self.append(self._weight_of_batch(loss, batch, chunks, in_step, world))
        self._known = total if loss.counts_samples else None
        self._counts: Tensor | None = None
        # some processes of a pipeline may not have read the batch
        counts_elsewhere = replicas > 1 or world.processes_per_replica > 1
        if self._known is None and weight is None and counts_elsewhere:
            # by replica, and added in their order: float counts are the same on all processes
            self._counts = torch.zeros(replicas, dtype=torch.float64)
            # all processes of a replica have the same batch: count it once
            for batch_weight in self if world.pipeline_rank == 0 else ():
                for replica, count in batch_weight.counted_by_replica:
                    self._counts[replica] += count
            # asynchronous: the all-reduce overlaps with the forward
            self._work = world.begin_sum(self._counts)

    def _weight_of_batch(
        self, loss: CountedLoss, batch: tuple[Any, Any], chunks: int, in_step: bool, world: World
    ) -> BatchWeight | SharesWeight:
        inputs, _ = batch
        if not isinstance(inputs, Shares):
            replica = world.owned_replicas.start
            return BatchWeight(loss, batch, chunks, self, in_step, replica)
        return SharesWeight(
            [
                BatchWeight(loss, parts, chunks, self, share.samples > 0, share.replica)
                for parts, share in zip(shares_of(*batch), inputs.shares, strict=True)
            ]
        )

    @cached_property
    def total(self) -> float:
        """The count of the step over all batches and replicas; the first use waits for the sum.

        If it is 0, there is no gradient and the optimizer should not step.
        """
        if self._known is not None:
            return self._known
        if self._counts is None:
            return sum([batch.counted for batch in self])
        if self._work is not None:
            self._work.wait()
        return math.fsum(self._counts.tolist())

    @property
    def has_fixed_weight(self) -> bool:
        """True if the mean of a batch has a weight that does not depend on its count."""
        return self._weight is not None

    def grad_scale(self, part: float, count: float) -> float:
        """Returns the gradient of the step's loss with respect to the loss of a micro-batch.

        Args:
            part: the weight of the micro-batch in its batch.
            count: the count of that batch.
        """
        if self._weight is not None:
            return self._weight * part / count
        # rounded once, as where one writes loss * part / total
        return part * self._replicas / self.total if self.total else 0.0


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
    raise BatchError(f"the count of a loss must be a finite number from 0 on, not {counts}")
