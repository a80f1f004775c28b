"""Peak memory of a layout's stages, and the times of their actions and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from hybridtrain._base.hardware import Hardware
from hybridtrain.errors import ScheduleError
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    LayerSize,
    StageSums,
    whole_stages,
)
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.schedule import (
    CopyTimes,
    Durations,
    Moment,
    Offloading,
    RegisteredSchedule,
    fullest_moments,
    is_periodic,
    offload_copies,
    offloading_on,
    registered,
)

# Extra memory of a micro-batch between the two parts of its backward, relative to its activations:
# gradients, minus the activations that only the first part needs. Counted for blocks of a GPT.
WAITING = 0.3

# Groups of `nb_part` micro-batches after which each further group adds the same to a peak.
_GROUPS_UNTIL_STEADY = 2


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that a device holds at its peak.

    Attributes:
        weights: parameters and buffers.
        gradients: gradients, in the buckets of the all-reduce, and those that logical replicas wait
            to add.
        state: optimizer state.
        activations: activations of the micro-batches in flight, when their sum with `boundaries` is
            largest.
        boundaries: inputs received from other stages, at that time.
        temporaries: additional bytes at the peak, while a layer runs.
        libraries: workspaces of CUDA's libraries, with the stages of one thread.
    """

    weights: int = 0
    gradients: int = 0
    state: int = 0
    activations: int = 0
    boundaries: int = 0
    temporaries: int = 0
    libraries: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(vars(self).values())

    @property
    def kept(self) -> int:
        """Bytes held between two layers, which is where a CPU's memory is measured."""
        return self.total - self.temporaries


def device_memory(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> list[DeviceMemory]:
    """Returns the memory of each device at its peak.

    Args:
        table: the costs of the layers.
        hardware: the devices.
        work: the work of a step.
        layout: the parallel layout.
        counts: the number of layers of each stage.
    """
    stages = table.stages_at(layout.samples(work), counts)
    memory = []
    moments_of = _moments_of(layout, offloading_on(hardware.device))
    for own_stages, moments in zip(_stages_by_device(layout), moments_of, strict=True):
        weights = sum(stages[stage].weight_bytes for stage in own_stages)
        trained = sum(stages[stage].trained_bytes for stage in own_stages)
        state = sum(
            work.state_bytes(stages[stage].trained_bytes, stages[stage].state_bytes)
            for stage in own_stages
        )
        fixed = _fixed_bytes(weights, trained, state, layout)
        at_peak = _bytes_at_peak(moments, stages, own_stages, layout)
        memory.append(DeviceMemory(*fixed, *at_peak, hardware.library_bytes))
    return memory


def _bytes_at_peak(
    moments: Sequence[Moment],
    stages: Sequence[StageSums],
    own_stages: Sequence[int],
    layout: ParallelLayout,
) -> tuple[int, int, int]:
    """Returns the activations, boundaries and temporaries of a device at its peak.

    Activations and boundaries are those at the peak between two layers. The peak within a layer may
    be at another moment, when a stage with large temporaries runs and the other stages hold less.

    Args:
        moments: the moments at which the device may hold the most.
        stages: the costs of all stages.
        own_stages: the device's stages.
        layout: the parallel layout.
    """
    activations = boundaries = peak = 0
    for moment in moments:
        here = there = 0
        for stage, inputs, alive, waiting, present in zip(own_stages, *moment[2:], strict=True):
            sums = stages[stage]
            here += alive * sums.activation_bytes + (inputs - alive) * sums.kept_bytes
            here += round(WAITING * waiting * sums.activation_bytes)
            there += inputs * sums.input_bytes
            if layout.offload != "none":
                away = inputs - present
                recomputed = min(away, inputs - alive)  # which are the first
                for number, is_recomputed in ((recomputed, True), (away - recomputed, False)):
                    own, received = _moved_bytes(sums, layout.offload, is_recomputed)
                    here -= number * own
                    there -= number * received
        if here + there > activations + boundaries:
            activations, boundaries = here, there
        running = stages[moment.stage]
        while_it_runs = running.again_bytes if moment.recomputes else running.temporary_bytes
        peak = max(peak, here + there + while_it_runs)
    return activations, boundaries, peak - activations - boundaries


def _moved_bytes(sums: StageSums, offload: str, is_recomputed: bool) -> tuple[int, int]:
    """Returns the bytes of a micro-batch that leave a device: of a stage's layers, and its input.

    Args:
        sums: the costs of the stage.
        offload: what leaves the device, as in `PipelineOptions`.
        is_recomputed: whether all its layers are recomputed.
    """
    if offload == "all":
        return sums.kept_bytes if is_recomputed else sums.activation_bytes, sums.input_bytes
    if is_recomputed:
        return sums.kept_inputs_bytes, sums.input_bytes
    return sums.restart_bytes, sums.input_bytes * sums.restarts_from_input


def most_in_flight(layout: ParallelLayout) -> tuple[int, ...]:
    """Returns, for each stage, the peak number of micro-batches in flight."""
    most = [0] * layout.stages
    for own_stages, moments in zip(_stages_by_device(layout), _moments_of(layout), strict=True):
        for i, stage in enumerate(own_stages):
            most[stage] = max(moment.inputs[i] for moment in moments)
    return tuple(most)


def has_table(layout: ParallelLayout) -> bool:
    """Returns whether the schedule has a table of this shape; user-defined schedules may not.

    Raises:
        ScheduleError: no engine can execute the table.
    """
    return _builds(registered(layout.schedule), *layout.shape)


@lru_cache(maxsize=4096)
def _builds(
    schedule: RegisteredSchedule, nb_part: int, chunks: int, stages_per_device: int
) -> bool:
    if schedule.periodic:  # defined for any number of micro-batches
        return True
    try:
        table = schedule.build(nb_part, chunks, stages_per_device)
    except ScheduleError:
        return False
    schedule.check(table, nb_part, chunks, stages_per_device)
    return True


def _stages_by_device(layout: ParallelLayout) -> list[list[int]]:
    return _by_device(layout.devices, layout.nb_part)


@lru_cache(maxsize=256)
def _by_device(devices: Sequence[int], nb_part: int) -> list[list[int]]:
    stages_of: list[list[int]] = [[] for _ in range(nb_part)]
    for stage, device in enumerate(devices):
        stages_of[device].append(stage)
    return stages_of


def offloaded_bytes(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> list[int]:
    """Returns the bytes that leave each device in a batch, and come back."""
    if layout.offload == "none":
        return [0] * layout.nb_part
    stages = table.stages_at(layout.samples(work), counts)
    schedule = registered(layout.schedule).build(*layout.shape)
    whole = whole_stages(layout.recompute, layout.microbatches)
    moved = [0] * layout.nb_part
    for copies in offload_copies(schedule, offloading_on(hardware.device)).values():
        if copies.away is not None:
            stage, microbatch = copies.away
            parts = _moved_bytes(stages[stage], layout.offload, microbatch in whole)
            moved[layout.devices[stage]] += sum(parts)
    return moved


def _moments_of(
    layout: ParallelLayout, copies: Offloading = "overlapped"
) -> tuple[tuple[Moment, ...], ...]:
    """Returns the moments at which each device may hold the most.

    Args:
        layout: the parallel layout.
        copies: how long copies to the host take, if activations are offloaded.
    """
    return _moments(
        registered(layout.schedule),
        *layout.shape,
        layout.recompute,
        layout.splits_backwards,
        None if layout.offload == "none" else copies,
    )


@lru_cache(maxsize=4096)
def _moments(
    schedule: RegisteredSchedule,
    nb_part: int,
    chunks: int,
    stages_per_device: int,
    recompute: str,
    splits_backward: bool,
    copies: Offloading | None,
) -> tuple[tuple[Moment, ...], ...]:
    """Returns the moments of a schedule's table at which each device may hold the most.

    For a large table of a periodic schedule they are extrapolated: each further group of `nb_part`
    micro-batches adds the same number (0 with 1F1B, `nb_part` with GPipe). If small tables do not
    show this growth, or if the schedule is not periodic, the whole table is built.
    """

    def count(chunks: int) -> tuple[tuple[Moment, ...], ...]:
        table = schedule.build(nb_part, chunks, stages_per_device)
        return fullest_moments(table, whole_stages(recompute, chunks), splits_backward, copies)

    # interleaved stages share the rest out over the groups, which then differ in size at first
    rest = chunks % nb_part
    few = (_GROUPS_UNTIL_STEADY + rest) * nb_part + rest
    groups = (chunks - few) // nb_part
    if groups > 2 and is_periodic(schedule, stages_per_device):
        small, larger = count(few), count(few + nb_part)
        if small == larger or _continued(small, larger, 2) == count(few + 2 * nb_part):
            return _continued(small, larger, groups) or count(chunks)
    return count(chunks)


def _continued(
    small: Sequence[Sequence[Moment]], larger: Sequence[Sequence[Moment]], groups: int
) -> tuple[tuple[Moment, ...], ...] | None:
    """Extrapolates moments by `groups` equal increments; None if the tables do not match."""

    def line(first: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
        return tuple(a + (b - a) * groups for a, b in zip(first, other, strict=True))

    continued = []
    for few, more in zip(small, larger, strict=True):
        if [moment[:2] for moment in few] != [moment[:2] for moment in more]:
            return None
        continued.append(
            tuple(
                Moment(first.stage, first.recomputes, *map(line, first[2:], other[2:]))
                for first, other in zip(few, more, strict=True)
            )
        )
    return tuple(continued)


def with_weight_bytes(
    costs: Sequence[LayerCost], sizes: Sequence[LayerSize], work: StepWork, layout: ParallelLayout
) -> list[LayerCost]:
    """Returns the costs with the bytes of each layer's weights, gradients and state, for a cut."""
    return [
        replace(
            cost,
            weight_bytes=sum(
                _fixed_bytes(
                    size.weights, size.trained, work.state_bytes(size.trained, size.state), layout
                )
            ),
            crossing_ms=0.0,
        )
        for cost, size in zip(costs, sizes, strict=True)
    ]


def _fixed_bytes(
    weights: int, trained: int, state: int, layout: ParallelLayout
) -> tuple[int, int, int]:
    """Returns the bytes of layers that are always allocated: weights, gradients, optimizer state.

    Gradients are views of DDP's buckets, which DDP never frees.
    """
    sharded = state if layout.shard == "none" else -(-state // layout.replicas)
    return weights, trained * (1 + layout.gradient_sums), sharded


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
        device: time of a forward and a whole backward on the device, if the host keeps up.
        host: host time of a forward and a whole backward.
        host_in_parts: extra host time of a two-part backward.
        recompute: the part of `backward` that recomputes the forward.
    """

    in_parts: tuple[float, ...]
    device: tuple[float, ...]
    host: tuple[float, ...]
    host_in_parts: tuple[float, ...]
    recompute: tuple[float, ...]

    @property
    def whole(self) -> list[float]:
        """The milliseconds of a forward and a whole backward of each stage."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


def stage_times(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> StageTimes:
    """Returns the times of each stage's actions and of the messages between stages."""
    sums = table.stages_at(layout.samples(work), counts)
    stages = [_stage_ms(hardware, layout, stage, costs) for stage, costs in enumerate(sums)]
    by_field = {field: tuple(stage[field] for stage in stages) for field in stages[0]}
    transfer = tuple(
        _transfer_ms(hardware, layout, border, behind.input_bytes)
        for border, behind in enumerate(sums[1:])
    )
    copies = _copy_times(hardware, layout, sums)
    return StageTimes(**by_field, transfer=transfer, copies=copies)


def _copy_times(
    hardware: Hardware, layout: ParallelLayout, stages: Sequence[StageSums]
) -> CopyTimes | None:
    """Returns the milliseconds of the copies; None: nothing is copied, or the rates are unknown."""
    rates = hardware.host_copies
    if layout.offload == "none" or rates is None:
        return None
    recomputed = layout.recompute in ("always", "except_last")
    moved = [sum(_moved_bytes(sums, layout.offload, recomputed)) for sums in stages]
    away, back = (tuple(nbytes / rate * 1e3 for nbytes in moved) for rate in rates[:2])
    slowed = min(rates[:2]) / rates[2]
    return CopyTimes(away, back, slowed, offloading_on(hardware.device))


def _weight_share(costs: StageSums) -> float:
    """Returns the part of a stage's backward for gradients of weights: half if all are trained.

    The other part, for gradients of inputs, is as long, and does not get shorter if weights are
    frozen.
    """
    trained, frozen = costs.trained_bytes, costs.frozen_bytes
    share = trained / (trained + frozen) if frozen else 1.0
    return share / (1 + share)


def _stage_ms(
    hardware: Hardware, layout: ParallelLayout, stage: int, costs: StageSums
) -> dict[str, float]:
    """Returns the times of a stage in milliseconds, by the field of `StageTimes`."""
    recomputed, speed = layout.recomputed, layout.stage_speeds[stage]
    forward_compute, backward_compute = costs.forward_ms / speed, costs.backward_ms / speed
    forward_calls, backward_calls = costs.forward_calls_ms, costs.backward_calls_ms
    action = action_ms(hardware, layout, stage)
    begin = microbatch_ms(hardware, layout, stage)
    # a GPU computes while the host launches; a CPU does not
    synchronous, synchronous_begin = (action, begin) if hardware.device == "cpu" else (0.0, 0.0)
    forward = max(forward_compute + synchronous + synchronous_begin, forward_calls + action + begin)
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
    # the first stage's whole backward computes gradients of weights
    share = _weight_share(costs) if stage else 1.0
    weight = share * split_backward if layout.splits_backwards else 0.0
    # layers that recompute one by one do so in every backward
    others_ms = costs.forward_ms - costs.recomputed_ms
    host = (1 + recomputed) * forward_calls + backward_calls + 2 * action + begin
    return {
        "forward": forward,
        "backward": backward,
        "in_parts": split_backward,
        "device": (1 + recomputed) * forward_compute
        + backward_compute
        + 2 * synchronous
        + synchronous_begin,
        "weight": weight,
        "host": host,
        "host_in_parts": split_extra,
        "recompute": (recomputed * others_ms + costs.recomputed_ms) / speed,
    }


def planned_costs(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> list[LayerCost]:
    """Returns the layer costs for the plan of this layout, with the times of its messages."""
    first = layout.stage_speeds[0]  # a plan has the costs on the first device
    costs = [
        replace(cost, forward_ms=cost.forward_ms / first, backward_ms=cost.backward_ms / first)
        for cost in table.costs_at(layout.samples(work))
    ]
    for border, cut in enumerate(list(accumulate(counts))[:-1]):
        ms = _transfer_ms(hardware, layout, border, costs[cut - 1].crossing_bytes)
        costs[cut - 1] = replace(costs[cut - 1], crossing_ms=ms)
    return costs


def action_ms(hardware: Hardware, layout: ParallelLayout, stage: int) -> float:
    """Returns the host milliseconds of a forward or backward of `stage`, without its operators.

    With a process per device, they include receiving from one neighbor and sending to the other.
    """
    messages = (stage > 0) + (stage < layout.stages - 1)
    if layout.engine != "distributed" or layout.nb_part == 1:
        messages = 0
    return (hardware.action_s + messages * hardware.message_s) * 1e3


def microbatch_ms(hardware: Hardware, layout: ParallelLayout, stage: int) -> float:
    """Returns the host milliseconds of a micro-batch besides its actions.

    They count once per process, in its first stage.
    """
    is_first = stage == 0
    if layout.engine == "distributed":
        is_first = layout.devices[stage] not in layout.devices[:stage]
    return hardware.microbatch_s * 1e3 * is_first


def _transfer_ms(hardware: Hardware, layout: ParallelLayout, border: int, nbytes: float) -> float:
    """Returns the milliseconds of a message from stage `border` to the next stage."""
    device, to = layout.devices[border : border + 2]
    in_node = hardware.devices_per_node
    if device == to or (layout.engine != "distributed" and hardware.device == "cpu"):
        return 0.0
    return hardware.transfer_s(nbytes, device // in_node != to // in_node) * 1e3
