"""The weights of the batches and micro-batches of an optimizer step in its loss.

With two replicas, of which the first has two batches of two micro-batches, for a loss whose values
are means:

    count of a micro-batch     3   1     0   2         4   0
    count of a batch             4         2             4
    weight of its mean        4x2/10    2x2/10        4x2/10   replicas are averaged: x 2; total: 10
    grad_scales              .6  .2     0  .4        .8   0    weight x factor / count of the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.accelerator import PendingNumbers, accelerator_of, put
from hybridtrain._base.microbatch import batch_size, chunk_sizes
from hybridtrain.errors import BatchError
from hybridtrain.loss.counted import CountedLoss
from hybridtrain.world import World


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    The mean of a batch is the sum over its micro-batches of factor x value of the loss function,
    divided by `count`.

    Args:
        loss: of the step.
        batch: `(inputs, targets)`.
        chunks: how many micro-batches to cut a batch into.
        step: of the batch; None for one that is not trained on.
        in_step: False for a batch that only fills a place.

    Attributes:
        microbatches: how many micro-batches the batch has.
        is_whole_step: whether the step is this one micro-batch.

    Raises:
        BatchError: a count is negative or not a finite number, or a loss without a count is given
            labels to ignore.
    """

    def __init__(
        self,
        loss: CountedLoss,
        batch: tuple[Any, Any],
        chunks: int,
        step: StepWeights | None = None,
        in_step: bool = True,
    ) -> None:
        sizes = chunk_sizes(batch_size(*batch), chunks)
        self.microbatches = len(sizes)
        self.is_whole_step = step is not None and step.is_one_batch and len(sizes) == 1
        if not self.is_whole_step:
            loss.refuse_ignored(*batch)
        self._is_sum, self._step, self._in_step = loss.is_sum, step, in_step
        self._counts = copied_to_host(loss.counts(*batch, sizes))

    @cached_property
    def factors(self) -> Sequence[float]:
        """The factors of the loss function's values, by micro-batch; 0 where nothing counts."""
        return [1] * self.microbatches if self._is_sum else self._counts()

    @cached_property
    def count(self) -> float:
        """The count of the batch."""
        return sum(self._counts())

    @cached_property
    def count_in_step(self) -> float:
        """The count of the batch in the step: 0 for a batch that only fills a place."""
        return self.count if self._in_step else 0

    @cached_property
    def grad_scales(self) -> Sequence[float]:
        """The gradients of the loss function's values, by micro-batch."""
        assert self._step is not None
        weight, count = self._step.weight_of(self.count_in_step), self.count
        return [weight * factor / count if count else 0.0 for factor in self.factors]

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the mean of the batch from the values of its micro-batches, 0-dim.

        0 if nothing is counted, NaN without values (the last stage is in another process).
        """
        if not values:
            return torch.tensor(float("nan"))
        factors, count = self.factors, self.count
        if not count:
            return torch.zeros_like(values[0])
        if len(values) == 1:
            return values[0] if factors[0] == count else values[0] * factors[0] / count
        stacked = torch.stack(list(values))
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        # not new_tensor, which waits until the device is done with all that is queued
        on_device = put(torch.tensor(factors, dtype=stacked.dtype), stacked.device)
        return (stacked * on_device).sum() / count


class StepWeights(list[BatchWeight]):
    """The weights of the batches of one optimizer step; see `HybridModel.step_weights`.

    Args:
        loss: of the step.
        batches: this replica's `(inputs, targets)`.
        chunks: how many micro-batches to cut a batch into.
        world: the replicas.
        samples: for each batch the samples that count; 0 for one that only fills a place.
        total: the samples of the step over all batches and replicas, if they are known and count.
        weight: what multiplies the mean of each batch, in place of its share of `total`.

    Attributes:
        is_one_batch: whether the mean of one batch is the loss of the step.
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
        self._replicas = world.replicas
        self._weight = None if weight is None else float(weight)
        self.is_one_batch = len(batches) == 1 and world.replicas == 1 and weight in (None, 1)
        for index, batch in enumerate(batches):
            in_step = samples is None or samples[index] > 0
            self.append(BatchWeight(loss, batch, chunks, self, in_step))
        self._known = total if loss.counts_samples else None
        self._sum: Tensor | None = None
        if self._known is None and weight is None and world.replicas > 1:
            # every process of a replica has its batch
            own = sum(batch.count_in_step for batch in self) if world.pipeline_rank == 0 else 0
            self._sum = torch.tensor(own, dtype=torch.float64)
            # the forward goes on meanwhile
            self._work = world.begin_sum(self._sum)

    @cached_property
    def total(self) -> float:
        """The count of the step over all batches and replicas; the first use waits for them.

        0: there is nothing to learn from, and the optimizer should not step.
        """
        if self._known is not None:
            return self._known
        if self._sum is None:
            return sum(batch.count_in_step for batch in self)
        if self._work is not None:
            self._work.wait()
        return float(self._sum)

    def weight_of(self, count: float) -> float:
        """Returns what multiplies the gradient of the mean of a batch that counts `count`."""
        if self._weight is not None:
            return self._weight
        # gradients are averaged over the replicas
        return count * self._replicas / self.total if self.total else 0.0


def copied_to_host(counts: Sequence[int | float | Tensor]) -> Callable[[], Sequence[float]]:
    """Returns a function that returns the counts as numbers, and waits for those from a GPU.

    The copy is queued before the forwards and waited for at the first loss, so that a step's
    forwards are launched while the GPU is still busy with the step before.

    Raises:
        BatchError: one is negative or not a finite number; of a GPU's, the function raises it.
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
