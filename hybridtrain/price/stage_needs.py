"""Peak memory of a layout's stages, and the times of their actions and messages."""

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
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.schedule import (
    Durations,
    RegisteredSchedule,
    is_periodic,
    peak_in_flight,
    peak_waiting,
    registered,
)

# Extra memory of a micro-batch between the two parts of its backward, relative to its activations:
# gradients, minus the activations that only the first part needs. Counted for blocks of a GPT.
WAITING = 0.3

# Groups of `nb_part` micro-batches after which each further one changes a peak by as much.
_GROUPS_UNTIL_STEADY = 2


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a device holds at its peak.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients, in the buckets of the all-reduce.
        state: optimizer state.
        activations: activations of all micro-batches in flight.
        boundaries: inputs received from other stages, for all micro-batches in flight.
        temporaries: the largest extra memory of a layer while it runs.
    """

    weights: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    boundaries: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(vars(self).values())

    @property
    def kept(self) -> int:
        """Bytes held between two layers, which is where a CPU's memory is measured."""
        return self.total - self.temporaries


def device_memory(
    table: CostTable, work: StepWork, layout: ParallelLayout, counts: Sequence[int]
) -> list[DeviceMemory]:
    """Returns the memory of each device at its peak.

    Args:
        table: the costs of the layers.
        work: the work of a step.
        layout: the parallel layout.
        counts: the number of layers of each stage.
    """
    costs = table.costs_at(layout.samples(work))
    in_flight = most_in_flight(layout)
    sizes_by_device: list[list[LayerSize]] = [[] for _ in range(layout.nb_part)]
    waiting = _most_waiting(layout)
    activations = [0] * layout.nb_part
    boundaries = [0] * layout.nb_part
    temporaries = [0] * layout.nb_part
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        device = layout.devices[stage]
        sizes_by_device[device] += table.sizes[start:end]
        alive = 1 if layout.recomputed else in_flight[stage]
        activation_bytes = sum(cost.activation_bytes for cost in costs[start:end])
        activations[device] += alive * activation_bytes + round(
            WAITING * waiting[stage] * activation_bytes
        )
        temporaries[device] = max(temporaries[device], most_temporary(costs[start:end]))
        if start:
            boundaries[device] += in_flight[stage] * costs[start - 1].crossing_bytes
    return [
        replace(
            _fixed_memory(sizes, work, layout),
            activations=activation_bytes,
            boundaries=boundary_bytes,
            temporaries=temporary_bytes,
        )
        for sizes, activation_bytes, boundary_bytes, temporary_bytes in zip(
            sizes_by_device, activations, boundaries, temporaries, strict=True
        )
    ]


def most_temporary(costs: Sequence[LayerCost]) -> int:
    """Returns by how much a stage exceeds its activations, while one of its layers runs.

    While a layer runs, the later layers of the stage hold no activations: in the forward they have
    not run yet, and in the backward theirs are freed.
    """
    most = behind = 0
    for cost in reversed(costs):
        most = max(most, cost.temporary_bytes - behind)
        behind += cost.activation_bytes
    return most


def most_in_flight(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns, for each stage, the peak number of micro-batches in flight."""
    return _peaks(registered(layout.schedule), *_shape(layout)).in_flight


def _most_waiting(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns, for each stage, the peak number of micro-batches between their backward's parts."""
    if not layout.splits_backwards:
        return (0,) * layout.stages
    return _peaks(registered(layout.schedule), *_shape(layout)).waiting


def _shape(layout: ParallelLayout) -> tuple[int, int, int]:
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
    """Returns the peaks of a schedule's table.

    Those of a large table of a periodic schedule are extrapolated from two small tables: each
    further group of `nb_part` micro-batches adds the same to a peak, nothing with 1F1B and
    `nb_part` with GPipe. Other schedules may change at any micro-batch: their table is built.
    """

    def count(chunks: int) -> _Peaks:
        table = schedule.build(nb_part, chunks, stages_per_device)
        return _Peaks(peak_in_flight(table), peak_waiting(table))

    # interleaved stages share the rest out over the groups, which then differ in size at first
    rest = chunks % nb_part
    few = (_GROUPS_UNTIL_STEADY + rest) * nb_part + rest
    groups = (chunks - few) // nb_part
    if groups <= 1 or not is_periodic(schedule, stages_per_device):
        return count(chunks)
    small, larger = count(few), count(few + nb_part)
    return _Peaks(
        *(
            tuple(a + (b - a) * groups for a, b in zip(*peaks, strict=True))
            for peaks in zip(small, larger, strict=True)
        )
    )


def with_weight_bytes(
    costs: Sequence[LayerCost], sizes: Sequence[LayerSize], work: StepWork, layout: ParallelLayout
) -> list[LayerCost]:
    """Returns the costs with the bytes of each layer's weights, gradients and state, for a cut."""

    def weight_bytes(size: LayerSize) -> int:
        memory = _fixed_memory([size], work, layout)
        return memory.weights + memory.gradients + memory.state

    return [
        replace(cost, weight_bytes=weight_bytes(size), crossing_ms=0.0)
        for cost, size in zip(costs, sizes, strict=True)
    ]


def _fixed_memory(
    sizes: Sequence[LayerSize], work: StepWork, layout: ParallelLayout
) -> DeviceMemory:
    """Returns the memory of layers that does not depend on the micro-batches in flight.

    Gradients are views of DDP's buckets, which DDP never frees.
    """
    trained = sum(size.trained for size in sizes)
    state = trained * work.optimizer_tensors_per_param
    return DeviceMemory(
        weights=sum(size.weights for size in sizes),
        gradients=trained,
        state=state if layout.shard == "none" else -(-state // layout.replicas),
    )


# CPU time of the operators in a two-part backward, relative to a whole one: tensors that both parts
# read have left the caches in between. Measured: 1.0 (an encoder layer of width 1024) to 1.3 (width
# 256, with the calls).
SPLIT_OPERATORS = 1.1

# Host time of a two-part backward, relative to a whole one: autograd walks the graph once and then
# calls each node with weights separately.
SPLIT_HOST = 2.5


@dataclass(frozen=True, kw_only=True)
class StageTimes(Durations):
    """Milliseconds of each stage for one micro-batch, on its device and on the host.

    Attributes:
        host: host time of a forward and a whole backward.
        host_in_parts: extra host time of a two-part backward.
        recompute: the part of `backward` that recomputes the forward.
    """

    in_parts: tuple[float, ...]
    host: tuple[float, ...]
    host_in_parts: tuple[float, ...]
    recompute: tuple[float, ...]


def stage_times(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> StageTimes:
    """Returns the times of each stage's actions and of the messages between stages."""
    costs = table.costs_at(layout.samples(work))
    bounds = list(pairwise(accumulate(counts, initial=0)))
    stages = [
        _stage_ms(
            hardware,
            layout,
            stage,
            costs[start:end],
            table.host_ms[start:end],
            _weight_share(table.sizes[start:end]),
        )
        for stage, (start, end) in enumerate(bounds)
    ]
    recomputed_ms = [
        layout.recomputed * cost.forward_ms if index not in table.recomputed else cost.forward_ms
        for index, cost in enumerate(costs)
    ]
    transfer = [
        _transfer_ms(hardware, layout, border, costs[cut - 1].crossing_bytes)
        for border, cut in enumerate(list(accumulate(counts))[:-1])
    ]
    by_name = zip(_OneStage._fields, zip(*stages, strict=True), strict=True)
    recompute = tuple(sum(recomputed_ms[start:end]) for start, end in bounds)
    return StageTimes(**dict(by_name), transfer=tuple(transfer), recompute=recompute)


def _weight_share(sizes: Sequence[LayerSize]) -> float:
    """Returns the part of a stage's backward for gradients of weights: half where all are trained.

    The other part, for gradients of inputs, is as long, and does not get shorter if weights are
    frozen.
    """
    trained, frozen = (sum(getattr(s, name) for s in sizes) for name in ("trained", "frozen"))
    share = trained / (trained + frozen) if frozen else 1.0
    return share / (1 + share)


class _OneStage(NamedTuple):
    """The times of one stage, in milliseconds: the fields of `StageTimes` for that stage."""

    forward: float
    backward: float
    in_parts: float
    weight: float
    host: float
    host_in_parts: float


def _stage_ms(
    hardware: Hardware,
    layout: ParallelLayout,
    stage: int,
    costs: Sequence[LayerCost],
    calls: Sequence[tuple[float, float]],
    weight_share: float,
) -> _OneStage:
    """Returns the times of a stage.

    Args:
        hardware: the devices and links.
        layout: the parallel layout.
        stage: the index of the stage.
        costs: the costs of its layers.
        calls: for each layer, host milliseconds to launch its forward and its backward.
        weight_share: the part of a backward that computes gradients of weights.
    """
    recomputed = layout.recomputed
    forward_compute = sum([cost.forward_ms for cost in costs])
    backward_compute = sum([cost.backward_ms for cost in costs])
    forward_calls = sum([forward_ms for forward_ms, _ in calls])
    backward_calls = sum([backward_ms for _, backward_ms in calls])
    action = _action_ms(hardware, layout, stage)
    # a GPU computes while the host launches; a CPU does not
    synchronous = action if hardware.device == "cpu" else 0.0
    forward = max(forward_compute + synchronous, forward_calls + action)
    backward = max(
        backward_compute + recomputed * forward_compute + synchronous,
        backward_calls + action + recomputed * forward_calls,
    )
    split_backward, split_extra = backward, 0.0
    # the first stage's input needs no gradient: its backward computes gradients of weights only
    if layout.splits_backwards and stage > 0:
        split_extra = (SPLIT_HOST - 1) * backward_calls + action
        on_cpu = SPLIT_OPERATORS * backward_compute + synchronous + split_extra
        split_backward = (
            on_cpu
            if hardware.device == "cpu"
            else max(backward_compute, backward_calls + action + split_extra)
        )
    # the first stage's backward is all for the weights
    weight = (weight_share if stage else 1.0) * split_backward if layout.splits_backwards else 0.0
    host = (1 + recomputed) * forward_calls + backward_calls + 2 * action
    return _OneStage(forward, backward, split_backward, weight, host, split_extra)


def planned_costs(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> list[LayerCost]:
    """Returns the layer costs for the plan of this layout, with the times of its messages."""
    costs = list(table.costs_at(layout.samples(work)))
    for border, cut in enumerate(list(accumulate(counts))[:-1]):
        ms = _transfer_ms(hardware, layout, border, costs[cut - 1].crossing_bytes)
        costs[cut - 1] = replace(costs[cut - 1], crossing_ms=ms)
    return costs


def _action_ms(hardware: Hardware, layout: ParallelLayout, stage: int) -> float:
    """Returns the host milliseconds of a forward or backward of `stage`, without its operators.

    With a process per device, they include receiving from one neighbor and sending to the other.
    """
    messages = (stage > 0) + (stage < layout.stages - 1)
    if layout.engine == "local" or layout.nb_part == 1:
        messages = 0
    return (hardware.action_s + messages * hardware.message_s) * 1e3


def _transfer_ms(hardware: Hardware, layout: ParallelLayout, border: int, nbytes: float) -> float:
    """Returns the milliseconds of a message from stage `border` to the next stage."""
    device, to = layout.devices[border : border + 2]
    in_node = hardware.devices_per_node
    if device == to or (layout.engine == "local" and hardware.device == "cpu"):
        return 0.0
    return hardware.transfer_s(nbytes, device // in_node != to // in_node) * 1e3
