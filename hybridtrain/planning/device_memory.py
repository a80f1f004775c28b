"""The memory of each device at its peak, for a layout that is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from hybridtrain.planning.cost_table import CostTable, LayerSize
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.layout import Job, Layout
from hybridtrain.schedule import make_schedule, peak_in_flight, peak_waiting

# What a micro-batch holds in addition between the two parts of its backward, over its activations:
# gradients, less the activations that only the first part needs. Counted for blocks of a GPT.
WAITING = 0.3


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a device holds at its peak.

    Attributes:
        weights: parameters and buffers.
        gradients: in the buckets of the all-reduce.
        state: of the optimizer.
        activations: of all micro-batches in flight.
        boundaries: what has come from other stages, for all micro-batches in flight.
    """

    weights: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    boundaries: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


def device_memory(
    table: CostTable, job: Job, layout: Layout, counts: Sequence[int]
) -> list[DeviceMemory]:
    """Returns the memory of each device at its peak.

    Args:
        table: the costs of the layers.
        job: the work of a step.
        layout: how the model is spread.
        counts: the number of layers of each stage.
    """
    costs = table.costs_at(layout.samples(job))
    in_flight = most_in_flight(layout)
    own: list[list[LayerSize]] = [[] for _ in range(layout.nb_part)]
    waiting = _most_waiting(layout)
    activations = [0] * layout.nb_part
    boundaries = [0] * layout.nb_part
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        device = layout.devices[stage]
        own[device] += table.sizes[start:end]
        alive = 1 if layout.recomputed else in_flight[stage]
        kept = sum(cost.activation_bytes for cost in costs[start:end])
        activations[device] += alive * kept + round(WAITING * waiting[stage] * kept)
        if start:
            boundaries[device] += in_flight[stage] * costs[start - 1].crossing_bytes
    return [
        replace(_fixed_memory(sizes, job, layout), activations=kept, boundaries=received)
        for sizes, kept, received in zip(own, activations, boundaries, strict=True)
    ]


def most_in_flight(layout: Layout) -> tuple[int, ...]:
    """Returns the most micro-batches that each stage keeps alive at one time."""
    return _most_in_flight(layout.schedule, *_shape(layout))


def _most_waiting(layout: Layout) -> tuple[int, ...]:
    """Returns how many micro-batches of each stage are between the parts of their backward."""
    if not layout.splits_backwards:
        return (0,) * layout.stages
    return _waiting_of(layout.schedule, *_shape(layout))


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.nb_part, layout.chunks, layout.stages_per_device


@lru_cache(maxsize=4096)
def _most_in_flight(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int
) -> tuple[int, ...]:
    """Returns `peak_in_flight`, of few micro-batches where more would hold as many."""
    if schedule == "gpipe":
        return (chunks,) * (nb_part * stages_per_device)
    if schedule == "1f1b" and stages_per_device == 1:
        return tuple(min(chunks, nb_part - stage) for stage in range(nb_part))
    if schedule == "zb-h1":
        return (min(chunks, nb_part),) * nb_part
    if schedule == "zb-v":
        chunks = min(chunks, 2 * nb_part)
    elif chunks % nb_part == 0:  # groups of `nb_part`, of which a device holds at most three
        chunks = min(chunks, 4 * nb_part)
    return peak_in_flight(make_schedule(schedule, nb_part, chunks, stages_per_device))


@lru_cache(maxsize=4096)
def _waiting_of(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int
) -> tuple[int, ...]:
    few = min(chunks, 2 * nb_part)
    return peak_waiting(make_schedule(schedule, nb_part, few, stages_per_device))


def with_weight_bytes(
    costs: Sequence[LayerCost], sizes: Sequence[LayerSize], job: Job, layout: Layout
) -> list[LayerCost]:
    """Returns the costs with the bytes of a layer's weights, gradients and state, for a cut."""

    def weight_bytes(size: LayerSize) -> int:
        memory = _fixed_memory([size], job, layout)
        return memory.weights + memory.gradients + memory.state

    return [
        replace(cost, weight_bytes=weight_bytes(size), crossing_ms=0.0)
        for cost, size in zip(costs, sizes, strict=True)
    ]


def _fixed_memory(sizes: Sequence[LayerSize], job: Job, layout: Layout) -> DeviceMemory:
    """Returns the memory of layers that does not depend on the number in flight.

    Gradients are views of DDP's buckets, which it keeps for good.
    """
    trained = sum(size.trained for size in sizes)
    state = trained * job.optimizer_tensors_per_param
    return DeviceMemory(
        weights=sum(size.weights for size in sizes),
        gradients=trained,
        state=state if layout.shard == "none" else -(-state // layout.replicas),
    )
