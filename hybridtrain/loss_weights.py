"""The weights of the batches and micro-batches of an optimizer step in its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from hybridtrain.accelerator import put
from hybridtrain.errors import BatchError
from hybridtrain.loss_counts import Loss, TargetCount, refuse_ignored
from hybridtrain.losses import MeanLoss, SumLoss
from hybridtrain.microbatch import batch_size, chunk_sizes, split
from hybridtrain.world import World


class Counts:
    """The counts of the parts of a batch: numbers, which may be on their way from a GPU.

    The copy is queued before the forwards and waited for at the first loss, so that a step's
    forwards are launched while the GPU is still busy with the step before.
    """

    def __init__(self, counts: Sequence[int | float | Tensor]) -> None:
        self._length = len(counts)
        self._ready: torch.cuda.Event | None = None
        self._numbers: Sequence[float] | None = None
        tensors = [count for count in counts if isinstance(count, Tensor)]
        if len(tensors) < len(counts) or not any(count.is_cuda for count in tensors):
            self._numbers = [_checked(count) for count in counts]
            return
        found = torch.stack([count.detach().double() for count in tensors])
        self._copy = torch.empty(len(found), dtype=torch.float64, pin_memory=True)
        self._copy.copy_(found, non_blocking=True)
        self._ready = torch.cuda.Event(blocking=True)
        self._ready.record(torch.cuda.current_stream(found.device))

    def __len__(self) -> int:
        return self._length

    def numbers(self) -> Sequence[float]:
        """Returns the counts.

        Raises:
            BatchError: one is negative or not a finite number.
        """
        if self._numbers is None:
            assert self._ready is not None
            self._ready.synchronize()
            self._numbers = [_checked(count) for count in self._copy.tolist()]
        return self._numbers


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    The mean of a batch is the sum over its micro-batches of units x value of the loss function,
    divided by `divisor`.

    Args:
        counts: the counts of the micro-batches, or of the batch.
        units: for each micro-batch, what multiplies the value of the loss function: its samples,
            or 1 for a sum; None: its count.
        counts_in_step: False for a batch that only fills a place.
        weight: multiplies the gradient of the batch's mean.
    """

    def __init__(
        self,
        counts: Counts,
        units: Sequence[float] | None,
        counts_in_step: bool,
        weight: float | StepWeights,
    ) -> None:
        self._counts = counts
        self._units = units
        self._counts_in_step = counts_in_step
        self._weight = weight
        self._divisor: float | None = None

    @property
    def units(self) -> Sequence[float]:
        """The factors of the loss function's values, by micro-batch."""
        return self._counts.numbers() if self._units is None else self._units

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of the batch."""
        return len(self._counts if self._units is None else self._units)

    @property
    def divisor(self) -> float:
        """The count of the batch."""
        if self._divisor is None:
            self._divisor = sum(self._counts.numbers())
        return self._divisor

    @property
    def count(self) -> float:
        """The count of the batch in the step: 0 for one that only fills a place."""
        return self.divisor if self._counts_in_step else 0

    @property
    def is_step(self) -> bool:
        """True if the batch is the only one of its replica in the step."""
        return not isinstance(self._weight, StepWeights) or len(self._weight) == 1

    def share(self, microbatch: int) -> float:
        """Returns the gradient of the loss function's value for `microbatch`."""
        weight, units, divisor = self._weight, self.units, self.divisor
        if not isinstance(weight, float):
            weight = weight.of(self.count)
        return weight * units[microbatch] / divisor if divisor else 0.0

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the batch from the values of its micro-batches, 0-dim.

        0 if nothing is counted, NaN without values (the last stage is in another process).
        """
        if not values:
            return torch.tensor(float("nan"))
        units, divisor = self.units, self.divisor
        if not divisor:
            return torch.zeros_like(values[0])
        if len(values) == 1:
            return values[0] if units[0] == divisor else values[0] * units[0] / divisor
        stacked = torch.stack(list(values))
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        # not new_tensor, which waits until the device is done with all that is queued
        factors = torch.tensor([float(unit) for unit in units], dtype=stacked.dtype)
        factors = put(factors, stacked.device)
        return (stacked * factors).sum() / divisor


class StepWeights(Sequence[BatchWeight]):
    """The weights of the batches of one optimizer step; see `HybridModel.step_weights`.

    Attributes:
        total: what the step counts over all batches and replicas; 0: there is nothing to learn
            from, and the optimizer should not step. Reading it waits for the other replicas.
    """

    def __init__(
        self,
        loss: Loss,
        batches: Sequence[tuple[Any, Any]],
        chunks: int,
        world: World,
        samples: Sequence[int] | None,
        total: float | None,
    ) -> None:
        more = len(batches) > 1 or world.replicas > 1
        self._weights = []
        for index, (inputs, targets) in enumerate(batches):
            sizes = chunk_sizes(batch_size(inputs, targets), chunks)
            counts = batch_counts(loss, inputs, targets, sizes, more)
            counts_in_step = samples is None or samples[index] > 0
            self._weights.append(BatchWeight(*counts, counts_in_step, self))
        self._replicas = world.replicas
        self._total = total
        self._sum: Tensor | None = None
        if total is None and world.replicas > 1:
            # every process of a replica has its batch
            own = sum(w.count for w in self._weights) if world.pipeline_rank == 0 else 0
            self._sum = torch.tensor(own, dtype=torch.float64)
            # the forward goes on meanwhile
            self._work = world.begin_sum(self._sum)

    @property
    def total(self) -> float:
        """The count of the step; see the class."""
        if self._total is None:
            if self._sum is None:
                self._total = sum(weight.count for weight in self._weights)
            else:
                if self._work is not None:
                    self._work.wait()
                self._total = float(self._sum)
        return self._total

    def of(self, count: float) -> float:
        """Returns what multiplies the gradient of the mean of a batch that counts `count`."""
        # gradients are averaged over the replicas
        return count * self._replicas / self.total if self.total else 0.0

    @overload
    def __getitem__(self, index: int) -> BatchWeight: ...
    @overload
    def __getitem__(self, index: slice) -> list[BatchWeight]: ...
    def __getitem__(self, index: int | slice) -> BatchWeight | list[BatchWeight]:
        return self._weights[index]

    def __len__(self) -> int:
        return len(self._weights)


def batch_counts(
    loss: Loss, inputs: Any, targets: Any, sizes: Sequence[int], more: bool = True
) -> tuple[Counts, Sequence[float] | None]:
    """Returns the `counts` and the `units` of a `BatchWeight`, for micro-batches of these sizes.

    Args:
        loss: the result of `with_count`.
        inputs: of a batch.
        targets: of a batch.
        sizes: of its micro-batches.
        more: whether other batches or replicas take part in the mean.

    Raises:
        BatchError: a count is negative or not a finite number, or a loss without a count is given
            labels to ignore.
    """
    if isinstance(loss, SumLoss):
        return Counts([loss.count(inputs, targets)]), [1] * len(sizes)
    if not isinstance(loss, MeanLoss):
        if more or len(sizes) > 1:
            refuse_ignored(loss, inputs, targets)
        return Counts(sizes), None
    if isinstance(loss.count, TargetCount):
        return Counts(loss.count.of_parts(targets, sizes)), None
    parts = zip(split(inputs, sizes), split(targets, sizes), strict=True)
    return Counts([loss.count(*part) for part in parts]), None


def _checked(count: int | float | Tensor) -> float:
    number = count.item() if isinstance(count, Tensor) else count
    if not 0 <= number < float("inf"):
        raise BatchError(f"the count of a loss must be a finite number from 0 on, not {number}")
    return number
