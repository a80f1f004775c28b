"""The needs of a layout's stages: memory at the peak, and times of actions and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from hybridtrain._base.hardware import Hardware
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    LayerSize,
)
from hybridtrain.price.layout import Layout, StepWork
from hybridtrain.schedule import (
    Durations,
    RegisteredSchedule,
    peak_in_flight,
    peak_waiting,
    registered,
)

# What a micro-batch holds in addition between the two parts of its backward, over its activations:
# gradients, less the activations that only the first part needs. Counted for blocks of a GPT.
WAITING = 0.3

# Groups of `nb_part` micro-batches after which each further one changes a peak by as much.
_GROUPS_UNTIL_STEADY = 2


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a device holds at its peak.

    Attributes:
        weights: parameters and buffers.
        gradients: in the buckets of the all-reduce.
        state: of the optimizer.
        activations: of all micro-batches in flight.
        boundaries: what has come from other stages, for all micro-batches in flight.
        temporaries: what a layer holds in addition while it runs, where that is most.
    """

    weights: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    boundaries: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())

    @property
    def kept(self) -> int:
        """Bytes between two layers, where the memory of a CPU is read."""
        return self.total - self.temporaries


def device_memory(
    table: CostTable, work: StepWork, layout: Layout, counts: Sequence[int]
) -> list[DeviceMemory]:
    """Returns the memory of each device at its peak.

    Args:
        table: the costs of the layers.
        work: the work of a step.
        layout: how the model is spread.
        counts: the number of layers of each stage.
    """
    costs = table.costs_at(layout.samples(work))
    in_flight = most_in_flight(layout)
    own: list[list[LayerSize]] = [[] for _ in range(layout.nb_part)]
    waiting = _most_waiting(layout)
    activations = [0] * layout.nb_part
    boundaries = [0] * layout.nb_part
    temporaries = [0] * layout.nb_part
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        device = layout.devices[stage]
        own[device] += table.sizes[start:end]
        alive = 1 if layout.recomputed else in_flight[stage]
        kept = sum(cost.activation_bytes for cost in costs[start:end])
        activations[device] += alive * kept + round(WAITING * waiting[stage] * kept)
        temporaries[device] = max(temporaries[device], most_temporary(costs[start:end]))
        if start:
            boundaries[device] += in_flight[stage] * costs[start - 1].crossing_bytes
    return [
        replace(
            _fixed_memory(sizes, work, layout), activations=kept, boundaries=received, temporaries=t
        )
        for sizes, kept, received, t in zip(own, activations, boundaries, temporaries, strict=True)
    ]


def most_temporary(costs: Sequence[LayerCost]) -> int:
    """Returns by how much a stage exceeds its activations, while one of its layers runs.

    While a layer runs, those behind it in the stage keep nothing: it is not yet, or not any more.
    """
    most = behind = 0
    for cost in reversed(costs):
        most = max(most, cost.temporary_bytes - behind)
        behind += cost.activation_bytes
    return most


def most_in_flight(layout: Layout) -> tuple[int, ...]:
    """Returns the most micro-batches that each stage keeps alive at one time."""
    return _peaks(registered(layout.schedule), *_shape(layout)).in_flight


def _most_waiting(layout: Layout) -> tuple[int, ...]:
    """Returns how many micro-batches of each stage are between the parts of their backward."""
    if not layout.splits_backwards:
        return (0,) * layout.stages
    return _peaks(registered(layout.schedule), *_shape(layout)).waiting


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.nb_part, layout.chunks, layout.stages_per_device


class _Peaks(NamedTuple):
    """The most micro-batches of each stage at one time.

    Attributes:
        in_flight: begun and not finished.
        waiting: between the two parts of their backward.
    """

    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]


@lru_cache(maxsize=4096)
def _peaks(
    schedule: RegisteredSchedule, nb_part: int, chunks: int, stages_per_device: int
) -> _Peaks:
    """Returns the peaks of a schedule's table, by those of smaller tables if it is large.

    After some groups of `nb_part` micro-batches a schedule repeats itself, and each further group
    adds as much to a peak as the one before: nothing with 1F1B, all its micro-batches with GPipe.
    """

    def count(chunks: int) -> _Peaks:
        table = schedule.build(nb_part, chunks, stages_per_device)
        return _Peaks(peak_in_flight(table), peak_waiting(table))

    # interleaved stages share the rest out over the groups, which then differ in size at first
    rest = chunks % nb_part
    few = (_GROUPS_UNTIL_STEADY + rest) * nb_part + rest
    groups = (chunks - few) // nb_part
    if groups <= 1:
        return count(chunks)
    before, after = count(few), count(few + nb_part)
    return _Peaks(
        *(
            tuple(first + (then - first) * groups for first, then in zip(*peak, strict=True))
            for peak in zip(before, after, strict=True)
        )
    )


def with_weight_bytes(
    costs: Sequence[LayerCost], sizes: Sequence[LayerSize], work: StepWork, layout: Layout
) -> list[LayerCost]:
    """Returns the costs with the bytes of a layer's weights, gradients and state, for a cut."""

    def weight_bytes(size: LayerSize) -> int:
        memory = _fixed_memory([size], work, layout)
        return memory.weights + memory.gradients + memory.state

    return [
        replace(cost, weight_bytes=weight_bytes(size), crossing_ms=0.0)
        for cost, size in zip(costs, sizes, strict=True)
    ]


def _fixed_memory(sizes: Sequence[LayerSize], work: StepWork, layout: Layout) -> DeviceMemory:
    """Returns the memory of layers that does not depend on the number in flight.

    Gradients are views of DDP's buckets, which it keeps for good.
    """
    trained = sum(size.trained for size in sizes)
    state = trained * work.optimizer_tensors_per_param
    return DeviceMemory(
        weights=sum(size.weights for size in sizes),
        gradients=trained,
        state=state if layout.shard == "none" else -(-state // layout.replicas),
    )


# What the operators of both parts of a backward take on a CPU, over those of a whole one: what both
# read has left the caches. From 1.0 (an encoder layer of width 1024) to 1.3 (width 256, with the
# calls) were measured.
SPLIT_OPERATORS = 1.1

# The host's time for a backward in two parts, over that for a whole one: the graph is walked once,
# and each node with weights is called by itself.
SPLIT_HOST = 2.5


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage for one micro-batch, and of each border between two stages.

    Attributes:
        forward: of each stage.
        backward: a whole one.
        in_parts: a backward in two parts, both together.
        weight: the second part, which a schedule may put off.
        transfer: of each border.
        host: the host's time for a forward and a whole backward.
        host_in_parts: what it takes in addition for a backward in two parts.
        recompute: the part of `backward` that computes a forward again.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    in_parts: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    host: tuple[float, ...]
    host_in_parts: tuple[float, ...]
    recompute: tuple[float, ...]

    @property
    def durations(self) -> Durations:
        """The times that a schedule is simulated with."""
        return Durations(
            self.forward, self.backward, self.weight, self.transfer, in_parts=self.in_parts
        )


def stage_times(
    table: CostTable, hardware: Hardware, work: StepWork, layout: Layout, counts: Sequence[int]
) -> StageTimes:
    """Returns how long the actions of each stage take, and the messages between stages."""
    costs = table.costs_at(layout.samples(work))
    bounds = list(pairwise(accumulate(counts, initial=0)))
    stages = [
        _stage_ms(hardware, layout, stage, costs[start:end], table.host_ms[start:end])
        for stage, (start, end) in enumerate(bounds)
    ]
    again = [
        layout.recomputed * cost.forward_ms if index not in table.recomputed else cost.forward_ms
        for index, cost in enumerate(costs)
    ]
    transfer = [
        _transfer_ms(hardware, layout, border, costs[cut - 1].crossing_bytes)
        for border, cut in enumerate(list(accumulate(counts))[:-1])
    ]
    by_name = zip(_OneStage._fields, zip(*stages, strict=True), strict=True)
    recompute = tuple(sum(again[start:end]) for start, end in bounds)
    return StageTimes(**dict(by_name), transfer=tuple(transfer), recompute=recompute)


class _OneStage(NamedTuple):
    """The times of one stage; see `StageTimes`."""

    forward: float
    backward: float
    in_parts: float
    weight: float
    host: float
    host_in_parts: float


def _stage_ms(
    hardware: Hardware,
    layout: Layout,
    stage: int,
    costs: Sequence[LayerCost],
    calls: Sequence[tuple[float, float]],
) -> _OneStage:
    """Returns the times of a stage, for its layers and the host's times to call them."""
    again = layout.recomputed
    f, b = sum([c.forward_ms for c in costs]), sum([c.backward_ms for c in costs])
    call_f, call_b = sum([f for f, _ in calls]), sum([b for _, b in calls])
    action = _action_ms(hardware, layout, stage)
    # a GPU computes meanwhile; a CPU does not
    before = action if hardware.device == "cpu" else 0.0
    forward = max(f + before, call_f + action)
    backward = max(b + again * f + before, call_b + action + again * call_f)
    in_parts, more = backward, 0.0
    # the first stage's input needs no gradient: its backward is to the weights alone
    if layout.splits_backwards and stage > 0:
        more = (SPLIT_HOST - 1) * call_b + action
        on_cpu = SPLIT_OPERATORS * b + before + more
        in_parts = on_cpu if hardware.device == "cpu" else max(b, call_b + action + more)
    # what is recomputed is not divided
    weight = (0.5 if stage else 1.0) * in_parts if layout.splits_backwards else 0.0
    host = (1 + again) * call_f + call_b + 2 * action
    return _OneStage(forward, backward, in_parts, weight, host, more)


def planned_costs(
    table: CostTable, hardware: Hardware, work: StepWork, layout: Layout, counts: Sequence[int]
) -> list[LayerCost]:
    """Returns the costs that the plan of this layout has, with the times of its messages."""
    costs = list(table.costs_at(layout.samples(work)))
    for border, cut in enumerate(list(accumulate(counts))[:-1]):
        ms = _transfer_ms(hardware, layout, border, costs[cut - 1].crossing_bytes)
        costs[cut - 1] = replace(costs[cut - 1], crossing_ms=ms)
    return costs


def _action_ms(hardware: Hardware, layout: Layout, stage: int) -> float:
    """Returns the host's time for a forward or backward of `stage`, beside its operators.

    With a process for each device, what comes from another stage is received and what goes to
    another is sent.
    """
    messages = (stage > 0) + (stage < layout.stages - 1)
    if layout.engine == "local" or layout.nb_part == 1:
        messages = 0
    return (hardware.action_s + messages * hardware.message_s) * 1e3


def _transfer_ms(hardware: Hardware, layout: Layout, border: int, nbytes: float) -> float:
    """Returns the time of a message from stage `border` to the next one."""
    device, to = layout.devices[border : border + 2]
    in_node = hardware.devices_per_node
    if device == to or (layout.engine == "local" and hardware.device == "cpu"):
        return 0.0
    return hardware.transfer_s(nbytes, device // in_node != to // in_node) * 1e3
