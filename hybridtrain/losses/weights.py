"""The weights of the batches and micro-batches of an optimizer step in its loss.

With two replicas, of which the first has two batches of two micro-batches, for a loss whose values
are means:

    count of a micro-batch     3   1     0   2         4   0
    count of a batch             4         2             4
    weight of its mean        4x2/10    2x2/10        4x2/10   replicas are averaged: x 2; total: 10
    grad_scales              .6  .2     0  .4        .8   0    weight x factor / count of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from hybridtrain.accelerator import put
from hybridtrain.errors import BatchError
from hybridtrain.losses.counted import CountedLoss
from hybridtrain.microbatch import batch_size, chunk_sizes
from hybridtrain.world import World


class BatchWeight:
    """The weight of a batch and its micro-batches in the loss of an optimizer step.

    The mean of a batch is the sum over its micro-batches of factor x value of the loss function,
    divided by `count`.

    Args:
        loss: of the step.
        inputs: of the batch.
        targets: of the batch.
        sizes: of its micro-batches.
        weight: given the count of the batch in the step, returns what multiplies the gradient of
            its mean.
        alone: whether no other batch takes part in the step.
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
        inputs: Any,
        targets: Any,
        sizes: Sequence[int],
        weight: Callable[[float], float] = lambda count: 1.0,
        *,
        alone: bool = False,
        in_step: bool = True,
    ) -> None:
        self.microbatches = len(sizes)
        self.is_whole_step = alone and len(sizes) == 1
        if not self.is_whole_step:
            loss.refuse_ignored(inputs, targets)
        self._is_sum = loss.is_sum
        self._counts = copied_to_host(loss.counts(inputs, targets, sizes))
        self._weight, self._in_step = weight, in_step

    @cached_property
    def factors(self) -> Sequence[float]:
        """What multiplies the loss function's values, by micro-batch; 0 where nothing counts."""
        return [1] * self.microbatches if self._is_sum else self._counts()

    @cached_property
    def count(self) -> float:
        """What the loss counts in the batch."""
        return sum(self._counts())

    @cached_property
    def count_in_step(self) -> float:
        """What it counts in the step: 0 for a batch that only fills a place."""
        return self.count if self._in_step else 0

    @cached_property
    def grad_scales(self) -> Sequence[float]:
        """The gradients of the loss function's values, by micro-batch."""
        weight, count = self._weight(self.count_in_step), self.count
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
        on_host = torch.tensor([float(factor) for factor in factors], dtype=stacked.dtype)
        return (stacked * put(on_host, stacked.device)).sum() / count


class StepWeights(list[BatchWeight]):
    """The weights of the batches of one optimizer step; see `HybridModel.step_weights`.

    Args:
        loss: of the step.
        batches: this replica's `(inputs, targets)`.
        chunks: how many micro-batches a batch is cut into.
        world: the replicas.
        samples: for each batch the samples that count; 0 for one that only fills a place.
        total: the samples of the step over all batches and replicas, if they are known and count.
        weight: what multiplies the mean of each batch, in place of its share of `total`.
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
        alone = len(batches) == 1 and world.replicas == 1 and weight in (None, 1)
        for index, batch in enumerate(batches):
            sizes = chunk_sizes(batch_size(*batch), chunks)
            in_step = samples is None or samples[index] > 0
            self.append(
                BatchWeight(loss, *batch, sizes, self._weight_of, alone=alone, in_step=in_step)
            )
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
        """What the step counts over all batches and replicas; the first use waits for them.

        0: there is nothing to learn from, and the optimizer should not step.
        """
        if self._known is not None:
            return self._known
        if self._sum is None:
            return sum(batch.count_in_step for batch in self)
        if self._work is not None:
            self._work.wait()
        return float(self._sum)

    def _weight_of(self, count: float) -> float:
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
    tensors = [count.detach() for count in counts if isinstance(count, Tensor)]
    if len(tensors) < len(counts) or not any(count.is_cuda for count in tensors):
        numbers = _checked([c.item() if isinstance(c, Tensor) else c for c in counts])
        return lambda: numbers
    stacked = torch.stack([count.double() for count in tensors])
    copy = torch.empty(len(stacked), dtype=torch.float64, pin_memory=True)
    copy.copy_(stacked, non_blocking=True)
    ready = torch.cuda.Event(blocking=True)
    ready.record(torch.cuda.current_stream(stacked.device))

    @cache
    def wait() -> Sequence[float]:
        ready.synchronize()
        return _checked(copy.tolist())

    return wait


def _checked(counts: Sequence[float]) -> Sequence[float]:
    for count in counts:
        if not 0 <= count < float("inf"):
            raise BatchError(f"the count of a loss must be a finite number from 0 on, not {count}")
    return counts


def gradient_of(value: Tensor, scale: float) -> Tensor:
    """Returns `scale`, where the backward starts from, as a tensor like a loss function's `value`.

    It is NaN if the value is not finite, also where the derivative would be finite: then all
    replicas see it in the averaged gradients, and skip the step together.
    """
    return torch.rsub(value, scale, alpha=0)  # scale - 0 x value, in one kernel
