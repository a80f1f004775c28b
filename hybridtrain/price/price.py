"""The price of a layout: the time of an optimizer step and the peak memory of each device.

forwards and backwards by the schedule      simulated, with the transfers between stages
+ communication between replicas            the all-reduce overlaps with the last backwards
+ the optimizer                             reads and writes weights, gradients and state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

from hybridtrain._base.hardware import Hardware
from hybridtrain.partitioning import CostTable, StageSums
from hybridtrain.price.bounds import host_bound_ms, least_batch_ms
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.price.stage_needs import (
    DeviceMemory,
    StageTimes,
    device_memory,
    most_in_flight,
    stage_times,
)
from hybridtrain.schedule import (
    Durations,
    divided_backwards,
    is_periodic,
    make_schedule,
    registered,
)

# DDP's default bucket size. The all-reduce of the last bucket begins when the backward has ended.
BUCKET_BYTES = 25 * 2**20

# A periodic schedule with more actions is simulated for fewer micro-batches and extrapolated: in
# its middle every group of micro-batches takes equally long.
MOST_ACTIONS = 8_000
_MOST_GROUPS = 50
# With more devices the period of the whole schedule (in micro-batches) is too long to simulate.
_FEW_DEVICES = 6


@dataclass(frozen=True)
class Price:
    """The price of one optimizer step.

    Attributes:
        layout: the layout that is priced.
        counts: the number of layers of each stage.
        step_ms: the optimizer step.
        pipeline_ms: all forwards and backwards of the step, from the first to the last.
        compute_ms: the forwards and backwards of the busiest device, without waiting.
        host_ms: the time that a step takes longer because devices wait for the host, which calls
            their operators.
        recompute_ms: the part of `compute_ms` that recomputes forwards.
        transfer_ms: the time that the step would save without transfers between devices.
        copies_ms: the time that the step would save if offloaded activations were copied in no
            time.
        reduce_ms: communication between replicas after the end of the backwards.
        optimizer_ms: the optimizer's update.
        data_ms: loading the next batches, which overlaps with everything else.
        bubble: the share of the devices' time in the pipeline in which they are idle, 0 to 1.
        memory: the peak memory of each device.
        in_flight: for each stage, the peak number of micro-batches in flight.
        recomputed: the indices of the layers that are recomputed individually.
        binds: the bottleneck: `compute`, `idle`, `transfers`, `copies`, `all-reduce`, `optimizer`,
            `host` or `data`, plus `memory` where memory is nearly full.
    """

    layout: ParallelLayout
    counts: tuple[int, ...]
    step_ms: float
    pipeline_ms: float
    compute_ms: float
    host_ms: float
    recompute_ms: float
    transfer_ms: float
    copies_ms: float
    reduce_ms: float
    optimizer_ms: float
    data_ms: float
    bubble: float
    memory: tuple[DeviceMemory, ...]
    in_flight: tuple[int, ...]
    recomputed: tuple[int, ...]
    binds: str

    @property
    def peak_bytes(self) -> int:
        """The peak memory of the device with the most."""
        return max(memory.total for memory in self.memory)


def price(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> Price:
    """Returns the price of `layout` for stages of `counts` layers.

    Args:
        table: the costs of the layers, and which layers are recomputed.
        hardware: the devices and links.
        work: the work of a step.
        layout: the parallel layout.
        counts: the number of layers of each stage.
    """
    times = stage_times(table, hardware, work, layout, counts)
    simulated = simulated_step(layout, times)
    host = host_bound_ms(layout, times, simulated.divided)
    by_device = layout.by_device(_batch_ms(layout, times, simulated))
    busy_share = sum(by_device) / (layout.nb_part * simulated.length or 1.0)
    contention = table.contention_at(layout.samples(work))
    shared = _time_shared(layout.nb_part, busy_share)
    contended_ms = simulated.length * (1 + (contention - 1) * shared)
    batch_ms = max(contended_ms, host)
    # extrapolation of a long schedule on many devices may underestimate
    batch_ms = max(batch_ms, least_batch_ms(layout, times))
    pipeline = batch_ms * work.accumulate

    without_transfers = replace(times, transfer=(0.0,) * len(times.transfer))
    transfer = 0.0
    if any(times.transfer):
        transfer = simulated.length - simulated_step(layout, without_transfers).length
    copies = 0.0
    if times.copies is not None:
        without_copies = replace(times, copies=None)
        # an action that starts later may let another one start earlier
        copies = max(0.0, simulated.length - simulated_step(layout, without_copies).length)
    stages = table.stages_at(layout.samples(work), counts)
    reduce = _exchange_ms(stages, hardware, layout, simulated)
    optimizer = optimizer_ms(stages, hardware, work, layout)
    busy = max(by_device)
    compute = busy
    if hardware.device != "cpu":  # a CPU computes what its host time calls
        compute = min(busy, max(layout.by_device(times.device)) * layout.microbatches)
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    step = max(pipeline + reduce + optimizer, data)
    memory = device_memory(table, hardware, work, layout, counts)
    parts = {
        "compute": compute * work.accumulate,
        "idle": (simulated.length - transfer - copies - busy) * work.accumulate,
        "transfers": transfer * work.accumulate,
        "copies": copies * work.accumulate,
        "all-reduce": reduce,
        "optimizer": optimizer,
        "host": (batch_ms - contended_ms + busy - compute) * work.accumulate,
        "data": step - (pipeline + reduce + optimizer),
    }
    # compute is always present, so another part is the bottleneck from a fifth of the step on
    exposed_parts = {name: ms for name, ms in parts.items() if name != "compute"}
    worst = max(exposed_parts, key=exposed_parts.__getitem__)
    binds = worst if exposed_parts[worst] > 0.2 * step else "compute"
    usable = layout.usable_bytes(hardware)
    if any(m.total > 0.9 * limit for m, limit in zip(memory, usable, strict=True)):
        binds += ", memory"
    slowed = 1 + (contention - 1) * shared / (busy_share or 1.0)
    busy_share *= slowed * simulated.length / (batch_ms or 1.0)
    return Price(
        layout=layout,
        counts=tuple(counts),
        step_ms=step,
        pipeline_ms=pipeline,
        compute_ms=parts["compute"],
        host_ms=parts["host"],
        recompute_ms=max(layout.by_device(times.recompute)) * layout.microbatches * work.accumulate,
        transfer_ms=parts["transfers"],
        copies_ms=parts["copies"],
        reduce_ms=reduce,
        optimizer_ms=optimizer,
        data_ms=data,
        bubble=max(0.0, 1.0 - busy_share),  # rounded
        memory=tuple(memory),
        in_flight=most_in_flight(layout),
        recomputed=tuple(sorted(table.recomputed)),
        binds=binds,
    )


@dataclass(frozen=True)
class SimulatedStep:
    """The simulated times of one batch, in milliseconds.

    Attributes:
        length: the time from the first action's start to the last action's end.
        last_backward: start and end of each stage's last backward.
        divided: the number of backwards of each stage that run in two parts.
    """

    length: float
    last_backward: tuple[tuple[float, float], ...]
    divided: tuple[float, ...]


def simulated_step(layout: ParallelLayout, durations: Durations) -> SimulatedStep:
    """Simulates a batch with the schedule of `layout`."""
    return _simulated(layout.schedule, *layout.shape, durations)


@lru_cache(maxsize=1024)
def _simulated(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int, durations: Durations
) -> SimulatedStep:
    """Simulates as `simulated_step`; cached, since layouts that differ only in shards share it."""
    stages = nb_part * stages_per_device

    def run(chunks: int) -> SimulatedStep:
        table = make_schedule(schedule, nb_part, chunks, stages_per_device)
        last = [(0.0, 0.0)] * stages
        for lane in durations.spans(table):
            for action, start, end in lane:
                if action.ends_microbatch and action.microbatch == chunks - 1:
                    last[action.stage] = start, end
        return SimulatedStep(max(end for _, end in last), tuple(last), divided_backwards(table))

    # a device with n micro-batches in flight repeats every n of them
    group = lcm(*range(1, nb_part + 1)) if nb_part <= _FEW_DEVICES else nb_part
    groups = min(max(2, MOST_ACTIONS // (2 * stages * group)), _MOST_GROUPS)
    simulated_chunks = groups * group + chunks % group
    few = chunks <= simulated_chunks + group
    if few or not is_periodic(registered(schedule), stages_per_device):
        return run(chunks)
    short, long = run(simulated_chunks), run(simulated_chunks + group)
    rounds = (chunks - simulated_chunks) / group
    added_ms = (long.length - short.length) * rounds
    return SimulatedStep(
        short.length + added_ms,
        tuple((a + added_ms, b + added_ms) for a, b in short.last_backward),
        tuple(a + (b - a) * rounds for a, b in zip(short.divided, long.divided, strict=True)),
    )


def optimizer_ms(
    stages: Sequence[StageSums], hardware: Hardware, work: StepWork, layout: ParallelLayout
) -> float:
    """Returns the optimizer's milliseconds on the device with the most parameters.

    The optimizer reads weights, gradients and its state, and writes weights and state.
    """
    moved = [
        3 * stage.trained_bytes + 2 * work.state_bytes(stage.trained_bytes, stage.state_bytes)
        for stage in stages
    ]
    by_device = layout.by_device(moved)
    most = max(nbytes / speed for nbytes, speed in zip(by_device, layout.speeds, strict=True))
    shares = 1 if layout.shard == "none" else layout.replicas
    return most / shares / hardware.sustained_bandwidth * 1e3


def _exchange_ms(
    stages: Sequence[StageSums],
    hardware: Hardware,
    layout: ParallelLayout,
    simulated: SimulatedStep,
) -> float:
    """Returns the milliseconds that communication between replicas adds to a step.

    The all-reduce of a stage overlaps with its last backward, except for the last bucket. A device
    reduces its stages one after the other. With sharding it also gathers weights.
    """
    if layout.replicas == 1:
        return 0.0
    end = simulated.length
    reduce_end = [0.0] * layout.nb_part
    gather = [0.0] * layout.nb_part
    order = sorted(range(layout.stages), key=lambda stage: simulated.last_backward[stage])
    for stage in order:
        begin, finish = simulated.last_backward[stage]
        device = layout.devices[stage]
        trained = stages[stage].trained_bytes
        one_way = hardware.gather_s(trained, layout.replicas, layout.nb_part) * 1e3
        # a reduce-scatter and an all-gather, also with shards: the norm needs whole gradients
        reduce = 2 * one_way
        last_bucket = reduce * min(1.0, BUCKET_BYTES / max(1, trained))
        begin = max(begin, reduce_end[device])
        reduce_end[device] = max(begin + reduce, finish + last_bucket)
        gather[device] += one_way if layout.shard != "none" else 0.0
    return max(0.0, max(reduce_end) - end) + max(gather)


def _batch_ms(layout: ParallelLayout, times: StageTimes, simulated: SimulatedStep) -> list[float]:
    """Returns the milliseconds that each stage computes for a batch."""
    return [
        whole_ms * layout.microbatches + (split_ms - backward_ms) * split_count
        for whole_ms, split_ms, backward_ms, split_count in zip(
            times.whole, times.in_parts, times.backward, simulated.divided, strict=True
        )
    ]


def _time_shared(nb_part: int, busy_share: float) -> float:
    """Returns the share of a pipeline's time in which devices slow each other down.

    At any time at least one device is busy, so only further busy devices count. For two devices the
    result is the share of the time in which both are busy.
    """
    return max(0.0, (nb_part * busy_share - 1) / (nb_part - 1)) if nb_part > 1 else 0.0
