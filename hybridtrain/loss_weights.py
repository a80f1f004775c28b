"""The weights of the batches and micro-batches of an optimizer step in its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor

from hybridtrain.errors import BatchError
from hybridtrain.loss_counts import Loss, TargetCount, refuse_ignored
from hybridtrain.losses import MeanLoss, SumLoss
from hybridtrain.microbatch import split
from hybridtrain.world import World


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    Args:
        units: for each micro-batch, what multiplies the value of the loss function: its samples or
            its count for a mean, 1 for a sum.
        divisor: what the sum of these products is divided by to give the mean of the batch.
        count: what the batch counts: `divisor`, or 0 for one that only fills a place.
        weight: multiplies the gradient of the batch's mean.
    """

    def __init__(
        self, units: Sequence[float], divisor: float, count: float, weight: float | StepWeights
    ) -> None:
        self.units = units
        self.divisor = divisor
        self.count = count
        self._weight = weight

    def share(self, microbatch: int) -> float:
        """Returns the gradient of the loss function's value for `microbatch`."""
        weight = self._weight
        if not isinstance(weight, float):
            weight = weight.of(self.count)
        return weight * self.units[microbatch] / self.divisor if self.divisor else 0.0

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the batch from the values of its micro-batches, 0-dim.

        0 if nothing is counted, NaN without values (the last stage is in another process).
        """
        if not values:
            return torch.tensor(float("nan"))
        if not self.divisor:
            return torch.zeros_like(values[0])
        if len(values) == 1:
            same = self.units[0] == self.divisor
            return values[0] if same else values[0] * self.units[0] / self.divisor
        stacked = torch.stack(list(values))
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        units = stacked.new_tensor([float(unit) for unit in self.units])
        return (stacked * units).sum() / self.divisor


class StepWeights(Sequence[BatchWeight]):
    """The weights of the batches of one optimizer step; see `HybridModel.step_weights`.

    Attributes:
        total: what the step counts over all batches and replicas; 0: there is nothing to learn
            from, and the optimizer should not step. Reading it waits for the other replicas.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Sequence[float], float, float]],
        world: World,
        total: float | None = None,
    ) -> None:
        self._weights = [BatchWeight(*part, self) for part in parts]
        self._replicas = world.replicas
        self._total = total
        if total is None:
            # every process of a replica has its batch
            own = sum(w.count for w in self._weights) if world.pipeline_rank == 0 else 0
            if world.replicas == 1:
                self._total = own
            else:
                self._sum = torch.tensor(own, dtype=torch.float64)
                # the forward goes on meanwhile
                self._work = world.begin_sum(self._sum)

    @property
    def total(self) -> float:
        """The count of the step; see the class."""
        if self._total is None:
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


def batch_units(
    loss: Loss, inputs: Any, targets: Any, sizes: Sequence[int], more: bool = True
) -> tuple[Sequence[float], float]:
    """Returns the `units` and the `divisor` of a `BatchWeight`, for micro-batches of these sizes.

    Args:
        loss: the result of `with_count`.
        inputs: of a batch.
        targets: of a batch.
        sizes: of its micro-batches.
        more: whether other batches or replicas take part in the mean.

    Raises:
        BatchError: a count is negative or not a number, or a loss without a count is given labels
            to ignore.
    """
    if isinstance(loss, SumLoss):
        return [1] * len(sizes), _checked(_numbers([loss.count(inputs, targets)]))[0]
    if not isinstance(loss, MeanLoss):
        if more or len(sizes) > 1:
            refuse_ignored(loss, inputs, targets)
        return sizes, sum(sizes)
    if isinstance(loss.count, TargetCount):
        counts = loss.count.of_parts(targets, sizes)
    else:
        parts = zip(split(inputs, sizes), split(targets, sizes), strict=True)
        counts = [loss.count(*part) for part in parts]
    units = _checked(_numbers(counts))
    return units, sum(units)


def batch_weight(
    loss: Loss, inputs: Any, targets: Any, sizes: Sequence[int], weight: float, more: bool
) -> BatchWeight:
    """Returns a `BatchWeight` with a given `weight`; the other arguments are of `batch_units`."""
    units, divisor = batch_units(loss, inputs, targets, sizes, more)
    return BatchWeight(units, divisor, divisor, float(weight))


def _numbers(counts: Sequence[int | float | Tensor]) -> Sequence[float]:
    tensors = [count for count in counts if isinstance(count, Tensor)]
    if not tensors:
        return cast(Sequence[float], counts)
    if len(tensors) < len(counts) or not all(count.dim() == 0 for count in tensors):
        return [float(count) for count in counts]
    # Waits for the device if the targets are on one: the weights are needed before the first
    # backward. The loaders' targets are on the CPU.
    numbers: list[float] = torch.stack(tensors).tolist()
    return numbers


def _checked(counts: Sequence[float]) -> Sequence[float]:
    for count in counts:
        if not 0 <= count < float("inf"):
            raise BatchError(f"the count of a loss must not be negative or infinite, not {count}")
    return counts
