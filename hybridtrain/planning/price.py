"""The price of a layout: the time of an optimizer step, and the memory of each device at its peak.

    forwards and backwards by the schedule      simulated, with the transfers between stages
    + what the replicas exchange                the all-reduce overlaps with the last backwards
    + the optimizer                             reads and writes weights, gradients and state

`least_step_ms` is a bound from below in closed form, for a search that cannot simulate everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from hybridtrain.graph import Layer
from hybridtrain.machine import Machine
from hybridtrain.options import CHECKPOINT_MODES, PRECISIONS, PipelineOptions
from hybridtrain.planning.cost_table import (
    CostTable,
    LayerSize,
    counted_costs_of_one_size,
    given_costs,
    layer_sizes,
)
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.device_memory import DeviceMemory, device_memory, most_in_flight
from hybridtrain.planning.layout import Job, Layout
from hybridtrain.planning.stage_times import StageTimes, stage_times
from hybridtrain.schedule import Durations, divided_backwards, make_schedule

# DDP's default size of a bucket. The all-reduce of the last one begins when the backward has ended.
BUCKET_BYTES = 25 * 2**20

# A schedule with more actions is simulated for fewer micro-batches: in its middle each takes as
# long as the one before.
MOST_ACTIONS = 8_000
_MOST_GROUPS = 50
# With more devices the micro-batches after which all of them repeat themselves are too many.
_FEW_DEVICES = 6


@dataclass(frozen=True)
class Price:
    """The price of one optimizer step.

    Attributes:
        layout: what is priced.
        counts: layers of each stage.
        step_ms: the whole step.
        pipeline_ms: the forwards and backwards of all micro-batches, from first to last.
        compute_ms: the forwards and backwards of the busiest device, without waiting.
        recompute_ms: of these, what is computed twice.
        transfer_ms: what is gained if nothing crosses between devices.
        reduce_ms: what the replicas exchange beyond the end of the backwards.
        optimizer_ms: the optimizer.
        data_ms: loading the next batches, which overlaps with everything else.
        bubble: share of the devices' time in the pipeline in which they wait.
        memory: of each device.
        in_flight: the most micro-batches that each stage keeps alive at one time.
        binds: what to change first: `compute`, `bubble`, `transfers`, `all-reduce`, `optimizer`,
            `host` or `data`, and `memory` where it is nearly full.
    """

    layout: Layout
    counts: tuple[int, ...]
    step_ms: float
    pipeline_ms: float
    compute_ms: float
    recompute_ms: float
    transfer_ms: float
    reduce_ms: float
    optimizer_ms: float
    data_ms: float
    bubble: float
    memory: tuple[DeviceMemory, ...]
    in_flight: tuple[int, ...]
    binds: str

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device."""
        return max(memory.total for memory in self.memory)


def price(
    table: CostTable, machine: Machine, job: Job, layout: Layout, counts: Sequence[int]
) -> Price:
    """Returns what `layout` takes if its stages have `counts` layers each.

    Args:
        table: the costs of the layers.
        machine: the hardware.
        job: the work of a step.
        layout: how the model is spread.
        counts: the number of layers of each stage.
    """
    times = stage_times(table, machine, job, layout, counts)
    spread = spread_of(layout, times.durations)
    host = _host_bound_ms(layout, times, spread)
    by_device = _by_device(layout, _batch_ms(layout, times, spread))
    busy_share = sum(by_device) / (layout.nb_part * spread.length or 1.0)
    contention = table.contention_at(layout.samples(job))
    shared = _time_shared(layout.nb_part, busy_share)
    crowded = spread.length * (1 + (contention - 1) * shared)
    one_batch = max(crowded, host)
    # a long schedule of many devices is continued, by less than they may take
    one_batch = max(one_batch, least_batch_ms(layout, times))
    pipeline = one_batch * job.accumulate
    # what the schedule would take without transfers
    apart = replace(times, transfer=(0.0,) * len(times.transfer))
    transfer = 0.0
    if any(times.transfer):
        transfer = spread.length - spread_of(layout, apart.durations).length
    reduce = _exchange_ms(table.sizes, machine, layout, counts, spread)
    optimizer = optimizer_ms(table.sizes, machine, job, layout, counts)
    busy = max(by_device)
    data = job.data_ms_per_sample * job.samples * job.accumulate / layout.replicas
    step = max(pipeline + reduce + optimizer, data)
    memory = device_memory(table, job, layout, counts)
    parts = {
        "compute": busy * job.accumulate,
        "bubble": (spread.length - transfer - busy) * job.accumulate,
        "transfers": transfer * job.accumulate,
        "all-reduce": reduce,
        "optimizer": optimizer,
        "host": (one_batch - crowded) * job.accumulate,
        "data": step - (pipeline + reduce + optimizer),
    }
    # compute is always there: the rest binds where it is a fifth of the step
    rest = {name: ms for name, ms in parts.items() if name != "compute"}
    worst = max(rest, key=rest.__getitem__)
    binds = worst if rest[worst] > 0.2 * step else "compute"
    if max(m.total for m in memory) > 0.9 * machine.usable_bytes:
        binds += ", memory"
    slowed = 1 + (contention - 1) * shared / (busy_share or 1.0)
    busy_share *= slowed * spread.length / (one_batch or 1.0)
    return Price(
        layout=layout,
        counts=tuple(counts),
        step_ms=step,
        pipeline_ms=pipeline,
        compute_ms=parts["compute"],
        recompute_ms=max(_by_device(layout, times.recompute)) * layout.chunks * job.accumulate,
        transfer_ms=parts["transfers"],
        reduce_ms=reduce,
        optimizer_ms=optimizer,
        data_ms=data,
        bubble=max(0.0, 1.0 - busy_share),  # rounded
        memory=tuple(memory),
        in_flight=most_in_flight(layout),
        binds=binds,
    )


@dataclass(frozen=True)
class Spread:
    """The simulated times of one batch, in milliseconds.

    Attributes:
        length: when its last action ends.
        last_backward: when the last backward of each stage begins and ends.
        divided: how many backwards of each stage are in two parts.
    """

    length: float
    last_backward: tuple[tuple[float, float], ...]
    divided: tuple[float, ...]


def spread_of(layout: Layout, durations: Durations) -> Spread:
    """Returns when the last actions of a batch run in the schedule of `layout`."""
    shape = layout.nb_part, layout.chunks, layout.stages_per_device
    return _simulated(layout.schedule, *shape, durations)


@lru_cache(maxsize=1024)
def _simulated(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int, durations: Durations
) -> Spread:
    """Returns `spread_of`; layouts that differ in their shards have the same."""
    stages = nb_part * stages_per_device

    def run(chunks: int) -> Spread:
        made = make_schedule(schedule, nb_part, chunks, stages_per_device)
        last = [(0.0, 0.0)] * stages
        for lane in durations.spans(made):
            for action, start, end in lane:
                if action.ends_microbatch and action.microbatch == chunks - 1:
                    last[action.stage] = start, end
        return Spread(max(end for _, end in last), tuple(last), divided_backwards(made))

    # after some groups the schedule repeats itself: a device that holds n micro-batches every n
    group = lcm(*range(1, nb_part + 1)) if nb_part <= _FEW_DEVICES else nb_part
    groups = min(max(2, MOST_ACTIONS // (2 * stages * group)), _MOST_GROUPS)
    less = groups * group + chunks % group
    if chunks <= less + group:
        return run(chunks)
    short, longer = run(less), run(less + group)
    rounds = (chunks - less) / group
    more = (longer.length - short.length) * rounds
    return Spread(
        short.length + more,
        tuple((a + more, b + more) for a, b in short.last_backward),
        tuple(a + (b - a) * rounds for a, b in zip(short.divided, longer.divided, strict=True)),
    )


def least_step_ms(job: Job, layout: Layout, times: StageTimes, optimizer: float) -> float:
    """Returns what no step is faster than, whatever its schedule."""
    data = job.data_ms_per_sample * job.samples * job.accumulate / layout.replicas
    return max(least_batch_ms(layout, times) * job.accumulate + optimizer, data)


def least_batch_ms(layout: Layout, times: StageTimes) -> float:
    """Returns what no schedule of these stages is faster than.

    Device d cannot begin before the first micro-batch has come through the devices before it, then
    it computes, and after its last backward the gradient goes back through them. If it may hold n
    micro-batches, then every n of them take as long as one needs from there to the end and back.
    """
    through = 0.0
    least = 0.0
    # backwards to the weights may come after the gradients have gone back
    whole = not layout.splits_backwards
    held = most_in_flight(layout) if layout.stages_per_device == 1 and whole else ()
    on = sum(_sums(times)) + 2 * sum(times.transfer)
    busy = _by_device(layout, _sums(times))
    for device in range(layout.nb_part):
        least = max(least, through + busy[device] * layout.chunks)
        if held:
            least = max(least, through + (on - through) * (1 + (layout.chunks - 1) // held[device]))
        through += times.forward[device] + whole * times.backward[device]
        if device < len(times.transfer):
            through += (1 + whole) * times.transfer[device]
    return max(least, _host_bound_ms(layout, times))


def optimizer_ms(
    sizes: Sequence[LayerSize],
    machine: Machine,
    job: Job,
    layout: Layout,
    counts: Sequence[int],
) -> float:
    """Returns the time of the optimizer on the device that has most to do.

    It reads weights, gradients and its tensors, and writes all but the gradients.
    """
    tensors = 3 + 2 * job.optimizer_tensors_per_param
    most = max(_by_device(layout, _by_stage([size.trained for size in sizes], counts)))
    shares = 1 if layout.shard == "none" else layout.replicas
    return tensors * most / shares / machine.sustained_bandwidth * 1e3


def _exchange_ms(
    sizes: Sequence[LayerSize],
    machine: Machine,
    layout: Layout,
    counts: Sequence[int],
    spread: Spread,
) -> float:
    """Returns how much longer the replicas' exchange makes a step.

    A stage's gradients are reduced while its last backward runs, but for the last bucket. A device
    reduces its stages one after the other. With shards, weights are gathered as well.
    """
    if layout.replicas == 1:
        return 0.0
    end = spread.length
    done = [0.0] * layout.nb_part
    gather = [0.0] * layout.nb_part
    trained = _by_stage([size.trained for size in sizes], counts)
    order = sorted(range(layout.stages), key=lambda stage: spread.last_backward[stage])
    for stage in order:
        begin, finish = spread.last_backward[stage]
        device = layout.devices[stage]
        one_way = machine.gather_s(trained[stage], layout.replicas, layout.nb_part) * 1e3
        # a reduce-scatter and an all-gather; with shards, the norm still is that of whole gradients
        reduce = 2 * one_way
        last_bucket = reduce * min(1.0, BUCKET_BYTES / max(1, trained[stage]))
        begin = max(begin, done[device])
        done[device] = max(begin + reduce, finish + last_bucket)
        gather[device] += one_way if layout.shard != "none" else 0.0
    return max(0.0, max(done) - end) + max(gather)


def _host_bound_ms(layout: Layout, times: StageTimes, spread: Spread | None = None) -> float:
    """Returns the time of the process that calls most operators.

    The threads of `engine=local` take turns in one interpreter. Without the times of a schedule all
    backwards are whole.
    """
    called = [host * layout.chunks for host in times.host]
    if spread is not None:
        more = zip(called, times.host_in_parts, spread.divided, strict=True)
        called = [host + extra * number for host, extra, number in more]
    by_device = _by_device(layout, called)
    return sum(by_device) if layout.engine == "local" else max(by_device)


def _batch_ms(layout: Layout, times: StageTimes, spread: Spread) -> list[float]:
    """Returns how long each stage computes for a batch."""
    return [
        one * layout.chunks + (parts - whole) * number
        for one, parts, whole, number in zip(
            _sums(times), times.in_parts, times.backward, spread.divided, strict=True
        )
    ]


def _time_shared(nb_part: int, busy_share: float) -> float:
    """Returns the share of a pipeline's time in which devices slow each other down.

    At any time at least one device is busy; what they are beyond that, on average, counts. For two
    devices that is the share of the time in which both are busy.
    """
    return max(0.0, (nb_part * busy_share - 1) / (nb_part - 1)) if nb_part > 1 else 0.0


def _by_stage(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def _sums(times: StageTimes) -> list[float]:
    """Returns how long each stage takes for a forward and a whole backward."""
    return [f + b for f, b in zip(times.forward, times.backward, strict=True)]


def _by_device(layout: Layout, values: Sequence[float]) -> list[float]:
    sums = [0.0] * layout.nb_part
    for device, value in zip(layout.devices, values, strict=True):
        sums[device] += value
    return sums


# A rate for where none counts.
_ANY_RATE = 1e12


@dataclass(frozen=True)
class Prediction:
    """The numbers that a step is predicted to have; None where not known, with the reason.

    Attributes:
        step_ms: an optimizer step, in milliseconds.
        bubble: the share of the devices' time in the pipeline in which they wait.
        memory_bytes: the peak of each device of a replica, in the order of the pipeline.
        costs_from: where the layers' times are from: `measured` or `estimated`.
        reason: why something is None.
    """

    step_ms: float | None = None
    bubble: float | None = None
    memory_bytes: tuple[int, ...] | None = None
    costs_from: str | None = None
    reason: str | None = None


def predict_step(
    stages: Sequence[Sequence[Layer]],
    microbatch: Any,
    machine: Machine,
    job: Job,
    layout: Layout,
    measured: Sequence[LayerCost] | None = None,
    *,
    precision: str = "fp32",
    tf32: bool = False,
) -> Prediction:
    """Predicts a step of a model that is cut already; no layer runs.

    Args:
        stages: the layers of each stage, also on the meta device.
        microbatch: the inputs of the first micro-batch, of which shapes and types count.
        machine: the hardware; without a rate for the precision, the memory alone is predicted,
            unless the costs are measured.
        job: the work of a step.
        layout: how the model is spread.
        measured: the costs of all layers for such a micro-batch. None: they are counted.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.

    Raises:
        SplitError: a layer does not run on fake tensors.
    """
    layers = [layer for stage in stages for layer in stage]
    counts = [len(stage) for stage in stages]
    if measured is not None:
        table = replace(given_costs(lambda _: measured, layer_sizes(layers)), costs_from="measured")
    else:
        known = machine.flops_per_s or dict.fromkeys((*PRECISIONS, "tf32"), _ANY_RATE)
        counted_on = replace(machine, flops_per_s=known)
        table = counted_costs_of_one_size(layers, microbatch, counted_on, precision, tf32)
        if not machine.flops_per_s:
            return Prediction(
                memory_bytes=tuple(m.total for m in device_memory(table, job, layout, counts)),
                reason="`hybridtrain measure-machine`, once, or split=time would give the times",
            )
    found = price(table, machine, job, layout, counts)
    memory = tuple(each.total for each in found.memory)
    return Prediction(found.step_ms, found.bubble, memory, table.costs_from)


def why_not_priced(options: PipelineOptions) -> str | None:
    """Returns what of `options` the price of a step leaves out; None: nothing."""
    if options.compile:
        return "compile=true is not priced"
    if options.max_inflight is not None:
        return f"max_inflight={options.max_inflight} is not priced"
    if options.checkpoint not in CHECKPOINT_MODES:
        return f"checkpoint={options.checkpoint} is not priced: only whole stages are"
    return None
