"""The price of a layout, and the search for the layouts with the lowest price that fit.

The price is the time of an optimizer step and the peak memory of each device:

    forwards and backwards by the schedule      simulated, with the transfers between stages
    + communication between replicas            the all-reduce overlaps with the last backwards
    + the optimizer                             reads and writes weights, gradients and state

The search is best-first: simulating thousands of layouts would take too long. A priority queue
orders layouts by a lower bound of their step time (`least_step_ms`, in closed form). The search
takes the first layout from the queue, computes a tighter bound and puts it back:

    without a cut   all devices are equally busy       cheap, from sums
    cut             the bound of the schedule          closed form; it fits into memory
    priced          the simulated time                 the next result

So no unsimulated layout is faster than a result. If a model has few possible cuts, all of them
enter the queue; otherwise the most even cut does, before and after local improvement. With
`recompute="layers"` the cut determines which layers are recomputed: as few as memory allows.

`predict_step` prices the one layout of a run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, pairwise
from itertools import count as counter
from math import comb, lcm
from typing import Any, NamedTuple

from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import SplitError, argument, setting
from hybridtrain.graph import Layer
from hybridtrain.options import PRECISIONS, PipelineOptions
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    LayerSize,
    LossOfStep,
    Objective,
    counted_costs_of_one_size,
    every_cut,
    find_cut,
    given_costs,
    improved_cut,
    layer_sizes,
)
from hybridtrain.price.layout import Choices, ParallelLayout, StepWork, layouts
from hybridtrain.price.stage_needs import (
    DeviceMemory,
    StageTimes,
    device_memory,
    has_table,
    most_in_flight,
    stage_times,
    with_weight_bytes,
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
        reduce_ms: communication between replicas after the end of the backwards.
        optimizer_ms: the optimizer's update.
        data_ms: loading the next batches, which overlaps with everything else.
        bubble: the share of the devices' time in the pipeline in which they are idle, 0 to 1.
        memory: the peak memory of each device.
        in_flight: for each stage, the peak number of micro-batches in flight.
        recomputed: the indices of the layers that are recomputed individually.
        binds: the bottleneck: `compute`, `idle`, `transfers`, `all-reduce`, `optimizer`, `host` or
            `data`, plus `memory` where memory is nearly full.
    """

    layout: ParallelLayout
    counts: tuple[int, ...]
    step_ms: float
    pipeline_ms: float
    compute_ms: float
    host_ms: float
    recompute_ms: float
    transfer_ms: float
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
    host = _host_bound_ms(layout, times, simulated)
    by_device = _by_device(layout, _batch_ms(layout, times, simulated))
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
    reduce = _exchange_ms(table.sizes, hardware, layout, counts, simulated)
    optimizer = optimizer_ms(table.sizes, hardware, work, layout, counts)
    busy = max(by_device)
    compute = busy
    if hardware.device != "cpu":  # a CPU computes what its host time calls
        compute = min(busy, max(_by_device(layout, times.device)) * layout.chunks)
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    step = max(pipeline + reduce + optimizer, data)
    memory = device_memory(table, hardware, work, layout, counts)
    parts = {
        "compute": compute * work.accumulate,
        "idle": (simulated.length - transfer - busy) * work.accumulate,
        "transfers": transfer * work.accumulate,
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
        recompute_ms=max(_by_device(layout, times.recompute)) * layout.chunks * work.accumulate,
        transfer_ms=parts["transfers"],
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
    shape = layout.nb_part, layout.chunks, layout.stages_per_device
    return _simulated(layout.schedule, *shape, durations)


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


def least_step_ms(
    work: StepWork, layout: ParallelLayout, times: StageTimes, optimizer: float
) -> float:
    """Returns a lower bound of the step time in milliseconds, for any schedule."""
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    return max(least_batch_ms(layout, times) * work.accumulate + optimizer, data)


def least_batch_ms(layout: ParallelLayout, times: StageTimes) -> float:
    """Returns a lower bound of a batch's milliseconds, for any schedule of these stages.

    Device d cannot begin before the first micro-batch has passed the devices before it. Then it
    computes all its actions, and after its last backward the gradient passes those devices again.
    If it may hold n micro-batches, every n of them take at least the time of one micro-batch from
    d to the last device and back.
    """
    through = 0.0
    least = 0.0
    # with two-part backwards, the weight parts may run after the gradients have gone back
    whole = not layout.splits_backwards
    in_flight = most_in_flight(layout) if layout.stages_per_device == 1 and whole else ()
    end_to_end = sum(_sums(times)) + 2 * sum(times.transfer)
    busy = _by_device(layout, _sums(times))
    for device in range(layout.nb_part):
        least = max(least, through + busy[device] * layout.chunks)
        if in_flight:
            least = max(
                least,
                through + (end_to_end - through) * (1 + (layout.chunks - 1) // in_flight[device]),
            )
        through += times.forward[device] + whole * times.backward[device]
        if device < len(times.transfer):
            through += (1 + whole) * times.transfer[device]
    return max(least, _host_bound_ms(layout, times))


def optimizer_ms(
    sizes: Sequence[LayerSize],
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    counts: Sequence[int],
) -> float:
    """Returns the optimizer's milliseconds on the device with the most parameters.

    The optimizer reads weights, gradients and its state, and writes weights and state.
    """
    tensors = 3 + 2 * work.optimizer_tensors_per_param
    trained = _by_device(layout, _by_stage([size.trained for size in sizes], counts))
    most = max(nbytes / speed for nbytes, speed in zip(trained, layout.speeds, strict=True))
    shares = 1 if layout.shard == "none" else layout.replicas
    return tensors * most / shares / hardware.sustained_bandwidth * 1e3


def _exchange_ms(
    sizes: Sequence[LayerSize],
    hardware: Hardware,
    layout: ParallelLayout,
    counts: Sequence[int],
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
    trained = _by_stage([size.trained for size in sizes], counts)
    order = sorted(range(layout.stages), key=lambda stage: simulated.last_backward[stage])
    for stage in order:
        begin, finish = simulated.last_backward[stage]
        device = layout.devices[stage]
        one_way = hardware.gather_s(trained[stage], layout.replicas, layout.nb_part) * 1e3
        # a reduce-scatter and an all-gather, also with shards: the norm needs whole gradients
        reduce = 2 * one_way
        last_bucket = reduce * min(1.0, BUCKET_BYTES / max(1, trained[stage]))
        begin = max(begin, reduce_end[device])
        reduce_end[device] = max(begin + reduce, finish + last_bucket)
        gather[device] += one_way if layout.shard != "none" else 0.0
    return max(0.0, max(reduce_end) - end) + max(gather)


def _host_bound_ms(
    layout: ParallelLayout, times: StageTimes, simulated: SimulatedStep | None = None
) -> float:
    """Returns the milliseconds of the process that launches the most operators.

    The threads of `engine=local` take turns in one interpreter. Without a simulation, all backwards
    count as whole.
    """
    calls_ms = [host * layout.chunks for host in times.host]
    if simulated is not None:
        split_calls = zip(calls_ms, times.host_in_parts, simulated.divided, strict=True)
        calls_ms = [host + extra * number for host, extra, number in split_calls]
    by_device = _by_device(layout, calls_ms)
    return sum(by_device) if layout.engine != "distributed" else max(by_device)


def _batch_ms(layout: ParallelLayout, times: StageTimes, simulated: SimulatedStep) -> list[float]:
    """Returns the milliseconds that each stage computes for a batch."""
    return [
        whole_ms * layout.chunks + (split_ms - backward_ms) * split_count
        for whole_ms, split_ms, backward_ms, split_count in zip(
            _sums(times), times.in_parts, times.backward, simulated.divided, strict=True
        )
    ]


def _time_shared(nb_part: int, busy_share: float) -> float:
    """Returns the share of a pipeline's time in which devices slow each other down.

    At any time at least one device is busy, so only further busy devices count. For two devices the
    result is the share of the time in which both are busy.
    """
    return max(0.0, (nb_part * busy_share - 1) / (nb_part - 1)) if nb_part > 1 else 0.0


def _by_stage(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def _sums(times: StageTimes) -> list[float]:
    """Returns the milliseconds of a forward and a whole backward of each stage."""
    return [f + b for f, b in zip(times.forward, times.backward, strict=True)]


def _by_device(layout: ParallelLayout, values: Sequence[float]) -> list[float]:
    sums = [0.0] * layout.nb_part
    for device, value in zip(layout.devices, values, strict=True):
        sums[device] += value
    return sums


# A placeholder rate where only memory is predicted.
_ANY_RATE = 1e12


@dataclass(frozen=True)
class Prediction:
    """The predicted numbers of a step; None for an unknown number, with the reason.

    Attributes:
        step_ms: the milliseconds of an optimizer step.
        bubble: the share of the devices' time in the pipeline in which they are idle, 0 to 1.
        memory_bytes: the peak memory of each device of a replica, in pipeline order.
        costs_from: the source of the layers' times: `measured` or `estimated`.
        reason: why a number is None.
        host_bound: whether the devices wait for the host more than for anything else.
    """

    step_ms: float | None = None
    bubble: float | None = None
    memory_bytes: tuple[int, ...] | None = None
    costs_from: str | None = None
    reason: str | None = None
    host_bound: bool = False


def predict_step(
    layers: Sequence[Layer],
    counts: Sequence[int],
    microbatch: Any,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    measured: Sequence[LayerCost] | None = None,
    *,
    precision: str = "fp32",
    tf32: bool = False,
    loss: LossOfStep | None = None,
    recomputed: Set[int] = frozenset(),
    gpus: Sequence[int] = (),
) -> Prediction:
    """Predicts a step of a model that is already cut, without running a kernel.

    Args:
        layers: the layers of the model, also on the meta device.
        counts: the number of layers of each stage.
        microbatch: the inputs of the first micro-batch; only shapes and types matter.
        hardware: the devices and links. Without a rate for the precision only memory is predicted,
            unless `measured` is given.
        work: the work of a step.
        layout: the parallel layout.
        measured: measured costs of all layers for such a micro-batch; None: count them.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: whether fp32 matrix products run in TF32.
        loss: the loss that ends the last stage; None, or with measured costs: left out.
        recomputed: the indices of the layers that are recomputed individually.
        gpus: the GPU of each device of a pipeline, by its index; empty: all differ. Devices that
            share a GPU compute one after the other, and their idle time is not predicted.

    Raises:
        SplitError: a layer does not run on fake tensors.
    """
    if measured is not None:
        table = replace(given_costs(lambda _: measured, layer_sizes(layers)), costs_from="measured")
    else:
        rates = hardware.flops_per_s or dict.fromkeys((*PRECISIONS, "tf32"), _ANY_RATE)
        rated_hardware = replace(hardware, flops_per_s=rates)
        table = counted_costs_of_one_size(layers, microbatch, rated_hardware, precision, tf32, loss)
    table = table.recomputing(recomputed)
    if measured is None and not hardware.flops_per_s:
        return Prediction(
            memory_bytes=_as_measured(
                device_memory(table, hardware, work, layout, counts), hardware, gpus
            ),
            reason="to predict times, run `hybridtrain measure-machine` or set "
            f"{setting('split', 'time')}",
        )
    priced = price(table, hardware, work, layout, counts)
    memory = _as_measured(priced.memory, hardware, gpus)
    step_ms = priced.step_ms
    bubble: float | None = priced.bubble
    if len(set(gpus)) < len(gpus):
        times = stage_times(table, hardware, work, layout, counts)
        busy_ms = [0.0] * (max(gpus) + 1)
        for gpu, device_ms in zip(gpus, _by_device(layout, times.device), strict=True):
            busy_ms[gpu] += device_ms * layout.chunks * work.accumulate
        step_ms += max(0.0, max(busy_ms) - priced.pipeline_ms)
        bubble = None
    host_bound = priced.binds.startswith("host")
    return Prediction(step_ms, bubble, memory, table.costs_from, host_bound=host_bound)


def _as_measured(
    memory: Sequence[DeviceMemory], hardware: Hardware, gpus: Sequence[int]
) -> tuple[int, ...]:
    """Returns the predicted peak of each device, counted as a run measures it.

    The allocator counts all that is on a GPU, also for several devices of a pipeline.
    """
    if hardware.device == "cpu":
        return tuple(m.kept for m in memory)
    gpus = gpus or range(len(memory))
    once = round(hardware.library_gib * GIB)  # one thread per GPU runs backwards
    totals = dict.fromkeys(gpus, once)
    for gpu, device in zip(gpus, memory, strict=True):
        totals[gpu] += device.total - once
    return tuple(totals[gpu] for gpu in gpus)


def why_not_priced(options: PipelineOptions) -> str | None:
    """Returns which of `options` a price does not cover, as text; None: it covers all."""
    if options.compile:
        return f"{setting('compile', True)} is not priced"
    if options.max_inflight is not None:
        return f"{setting('max_inflight', options.max_inflight)} is not priced"
    return None


# A model with at most this many cuts is tried with all of them.
_FEW_CUTS = 50

# The accuracy of predictions: of plans within this factor, the simplest is proposed.
ALIKE = 1.02
# The search stops after this many times `best` layouts, if they are equally fast.
_MOST_ALIKE = 10

# If no layout fits: the number of layouts whose minimum memory is always computed, and the number
# of cuts after which the computation stops.
_CLOSE = 20
_MOST_EVALUATED = 5_000


class DoesNotFit(SplitError):
    """No layout fits into the memory of the devices.

    Attributes:
        layout: the layout that needs the least memory.
        device: its most loaded device.
        nbytes: the peak memory of that device.
        memory_gib: the smallest memory of a device with which that layout fits, in GiB.
    """

    def __init__(self, layout: ParallelLayout, device: int, nbytes: int, hardware: Hardware):
        is_equal = not layout.arrangement.device_memory_gib
        usable = round(layout.usable_bytes(hardware)[device])
        missing = with_unit(nbytes - usable)
        recompute = {"layers": "of single layers"}.get(layout.recompute, layout.recompute)
        self.layout, self.device, self.nbytes = layout, device, nbytes
        self.memory_gib = _rounded_up(nbytes / GIB / (1 - hardware.margin) + hardware.reserved_gib)
        self.in_words = (
            f"{setting('nb_part', layout.nb_part)}, {setting('chunks', layout.chunks)}, "
            f"{setting('schedule', layout.schedule)}, recompute {recompute}, "
            f"{setting('shard', layout.shard)}"
        )
        super().__init__(
            f"no plan fits: the plan with the least memory needs {with_unit(nbytes)} on device "
            f"{device}, {missing} more than the {with_unit(usable)} that may be used "
            f"({self.in_words}). Use more devices (hardware.nodes=), devices with more memory"
            + f" (hardware.memory_gib={self.memory_gib:g})" * is_equal
            + " or a smaller model"
        )


def _rounded_up(number: float) -> float:
    """Rounds a number up to four significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 3)
    return float(f"{math.ceil(number / unit - 1e-9) * unit:.4g}")


class _Entry(NamedTuple):
    """A layout in the queue; `number` breaks ties, so that layouts are never compared."""

    bound_ms: float
    number: int
    layout: ParallelLayout
    counts: list[int] | None = None
    priced: Price | None = None


def find_layouts(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    choices: Choices | None = None,
    *,
    best: int = 10,
) -> list[Price]:
    """Returns the prices of `best` layouts that fit into memory: the proposed, then the fastest.

    Args:
        table: the costs of the model's layers.
        hardware: the devices and links; every layout uses all devices.
        work: the work of a step.
        choices: the values that the search may choose from; None: all.
        best: the number of prices to return.

    Raises:
        ConfigError: no layout uses all devices and divides all batches evenly.
        DoesNotFit: no layout fits into memory; the message says how much is missing.
        SplitError: the model cannot be cut into as many stages.
    """
    choices = choices or Choices()
    search = _Search(table, hardware, work, choices.options)
    candidates = layouts(hardware, work, len(table.sizes), choices)
    prices = search.fastest(candidates, best)
    if not prices:
        raise search.why_nothing_fits(candidates)
    proposal = proposed(prices)
    return [proposal, *(price for price in prices if price is not proposal)][:best]


def proposed(prices: Sequence[Price]) -> Price:
    """Returns the simplest of the layouts that are about as fast as the fastest.

    The simplest has the fewest stages, then the simplest engine and schedule, then no recomputation
    and no sharding if possible, and then the least memory.
    """
    limit = ALIKE * min(price.step_ms for price in prices)

    def effort(price: Price) -> tuple[float, ...]:
        layout = price.layout
        return (
            layout.stages,
            layout.engine == "distributed",
            layout.splits_backwards,
            layout.recompute != "never",
            layout.shard != "none",
            price.peak_bytes,
            price.step_ms,
        )

    return min((price for price in prices if price.step_ms <= limit), key=effort)


class _Search:
    """The search: cuts, bounds and prices, cached where layouts share them."""

    def __init__(
        self,
        table: CostTable,
        hardware: Hardware,
        work: StepWork,
        options: PipelineOptions | None = None,
    ) -> None:
        self._table = table
        self._hardware = hardware
        self._work = work
        self._options = options
        self._even_cut = cache(self._most_even_cut)
        self._times = cache(self._whole_times)
        self._weighed_at = cache(self._weighed_of)
        self._recomputed = cache(self._fewest_recomputed)
        # all but the last layer, whose cost includes the loss
        self._most_recomputed = table.recomputing(frozenset(range(len(table.sizes) - 1)))

    def fastest(self, candidates: Sequence[ParallelLayout], best: int) -> list[Price]:
        """Returns the prices of the `best` fastest layouts that fit into memory, by time.

        More layouts are included if they are about as fast as the fastest.
        """
        numbers = counter()
        queue = [_Entry(self.bound(layout), next(numbers), layout) for layout in candidates]
        heapq.heapify(queue)
        prices: dict[ParallelLayout, Price] = {}
        fastest = math.inf
        while queue and len(prices) < _MOST_ALIKE * best:
            entry = heapq.heappop(queue)
            if len(prices) >= best and entry.bound_ms > ALIKE * fastest:
                break
            layout, counts = entry.layout, entry.counts
            if layout in prices:  # with a better cut
                continue
            if entry.priced is not None:
                prices[layout] = entry.priced
                fastest = min(fastest, entry.priced.step_ms)
            elif counts is not None:
                table = self._table_of(layout, counts)
                priced = price(table, self._hardware, self._work, layout, counts)
                bound = max(entry.bound_ms, priced.step_ms)
                heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts, priced))
            elif has_table(layout):
                for counts in self.cuts(layout):
                    bound = max(entry.bound_ms, self.bound_of_cut(layout, counts))
                    heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts))
        # bounds differ from prices by rounding
        return sorted(prices.values(), key=lambda price: price.step_ms)

    def bound(self, layout: ParallelLayout) -> float:
        """Returns a lower bound of the step's milliseconds, for any cut of the model."""
        whole, largest = self._times(layout.samples(self._work), layout.recomputed)
        busy = max(whole / sum(layout.speeds), largest / max(layout.speeds)) * layout.chunks
        is_equal = len(set(layout.speeds)) == 1
        if layout.stages_per_device == 1 and not layout.splits_backwards and is_equal:
            of_speed = whole / layout.speeds[0]
            busy = max(busy, _least_with_idle_time(of_speed, layout.nb_part, layout.chunks))
        load = self._work.data_ms_per_sample * self._work.samples / layout.replicas
        return max(busy, load) * self._work.accumulate

    def bound_of_cut(self, layout: ParallelLayout, counts: Sequence[int]) -> float:
        """Returns a lower bound of the step's milliseconds for this cut, for any schedule."""
        table = self._table_of(layout, counts)
        times = stage_times(table, self._hardware, self._work, layout, counts)
        step = optimizer_ms(self._table.sizes, self._hardware, self._work, layout, counts)
        return least_step_ms(self._work, layout, times, step)

    def cuts(self, layout: ParallelLayout) -> list[list[int]]:
        """Returns cuts that fit into memory, as layers per stage: all, or the best of many.

        The best are the most even cut and the one with the smallest bound. Either may be faster
        when it is simulated.
        """
        if not self._weights_fit(layout):
            return []
        no_cut_before = self._table.no_cut_before
        fits = partial(self._fits, layout)
        if (few := self._few_cuts(layout)) is not None:
            return list(filter(fits, few))
        samples = layout.samples(self._work)
        counts = self._even_cut(samples, layout.recompute, layout.stage_speeds)
        if counts is None:  # too few places to cut
            return []
        if layout.recompute == "layers" and self._recomputed(layout, tuple(counts)) == frozenset():
            return []  # the same as "never"
        if not fits(counts):
            limit = self._stage_devices_limits(layout)
            by_memory = (
                self._cut_by_memory(layout, memory_weight=0.0, memory_limit=limit),
                self._cut_by_memory(layout, memory_weight=1.0),  # the last resort
            )
            counts = next((cut for cut in by_memory if cut is not None and fits(cut)), None)
            if counts is None:
                return []
        improved = improved_cut(counts, partial(self.bound_of_cut, layout), fits, no_cut_before)
        return [improved] if improved == counts else [improved, counts]

    def _few_cuts(self, layout: ParallelLayout) -> list[list[int]] | None:
        """Returns all cuts that the stages may have; None: there are many."""
        if self._options is not None:
            counts = self._cut_of_run(self._options, layout)
            return [] if counts is None else [counts]
        layers = len(self._table.sizes)
        if comb(layers - 1, layout.stages - 1) > _FEW_CUTS:
            return None
        return list(every_cut(layers, layout.stages, self._table.no_cut_before))

    def _cut_of_run(self, options: PipelineOptions, layout: ParallelLayout) -> list[int] | None:
        """Returns the cut that `options` determine for this layout, without a search."""
        recompute = "never" if layout.recompute == "layers" else layout.recompute
        of_run = replace(
            options,
            schedule=layout.schedule,
            stages_per_device=layout.stages_per_device,
            recompute=recompute,
        )
        costs = self._weighed_at(layout.samples(self._work), layout.replicas, layout.shard, False)
        goal = replace(Objective.of(of_run), speeds=layout.stage_speeds)
        return find_cut(costs, most_in_flight(layout), goal, self._table.no_cut_before)

    def _fits(self, layout: ParallelLayout, counts: Sequence[int]) -> bool:
        if layout.recompute == "layers":  # without recomputed layers, the cut of "never"
            return bool(self._recomputed(layout, tuple(counts)))
        return not any(self._over(layout, self._table, counts))

    def _table_of(self, layout: ParallelLayout, counts: Sequence[int]) -> CostTable:
        if layout.recompute != "layers":
            return self._table
        return self._table.recomputing(self._recomputed(layout, tuple(counts)) or frozenset())

    def _fewest_recomputed(
        self, layout: ParallelLayout, counts: tuple[int, ...]
    ) -> frozenset[int] | None:
        """Returns the layers to recompute so that these stages fit; None if they cannot fit.

        On each device, layers are taken in the order of bytes freed per time of their forward,
        until the rest fits.
        """
        order = self._by_gain(layout, counts)

        def chosen(numbers: Sequence[int]) -> frozenset[int]:
            return frozenset(
                i for indexes, n in zip(order, numbers, strict=True) for i in indexes[:n]
            )

        def over(numbers: Sequence[int]) -> list[bool]:
            table = self._table.recomputing(chosen(numbers))
            return self._over(layout, table, counts)

        # bisection, on all devices at once
        fewest = [0] * layout.nb_part
        most = [
            len(indexes) * is_over for indexes, is_over in zip(order, over(fewest), strict=True)
        ]
        if any(over(most)):
            return None
        while fewest != most:
            middle = [(low + high) // 2 for low, high in zip(fewest, most, strict=True)]
            for device, is_over in enumerate(over(middle)):
                if is_over:
                    fewest[device] = middle[device] + 1
                else:
                    most[device] = middle[device]
        return chosen(most)

    def _by_gain(self, layout: ParallelLayout, counts: Sequence[int]) -> list[list[int]]:
        """Returns the layers of each device that free memory, the most per time first."""
        stored, recomputed = (
            table.costs_at(layout.samples(self._work))
            for table in (self._table, self._most_recomputed)
        )
        in_flight = most_in_flight(layout)
        gains: list[list[tuple[float, int]]] = [[] for _ in range(layout.nb_part)]
        for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
            for index in range(start, end):
                freed = stored[index].activation_bytes - recomputed[index].activation_bytes
                if freed:
                    rate = freed * in_flight[stage] / (stored[index].forward_ms or math.ulp(0.0))
                    gains[layout.devices[stage]].append((-rate, index))
        return [[index for _, index in sorted(pairs)] for pairs in gains]

    def _over(self, layout: ParallelLayout, table: CostTable, counts: Sequence[int]) -> list[bool]:
        """Returns whether each device needs more memory than it has."""
        memory = device_memory(table, self._hardware, self._work, layout, counts)
        limits = layout.usable_bytes(self._hardware)
        return [m.total > limit for m, limit in zip(memory, limits, strict=True)]

    def _stage_devices_limits(self, layout: ParallelLayout) -> tuple[float, ...]:
        """Returns the usable bytes of each stage's device."""
        limits = layout.usable_bytes(self._hardware)
        libraries = self._hardware.library_bytes
        return tuple(limits[device] - libraries for device in layout.devices)

    def _weights_fit(self, layout: ParallelLayout) -> bool:
        weights = sum(cost.weight_bytes for cost in self._weighed(layout))
        return weights <= sum(layout.usable_bytes(self._hardware))

    def why_nothing_fits(self, candidates: Sequence[ParallelLayout]) -> SplitError:
        """Returns the error of a search without a result, about the layout with the least memory.

        Examines all cuts of all layouts or, if there are too many, the cuts that may need the least
        memory.
        """
        least: tuple[int, int, ParallelLayout] | None = None
        evaluated = 0
        closest = sorted(filter(has_table, candidates), key=self._least_bytes)
        for number, layout in enumerate(closest):
            if number >= _CLOSE and evaluated > _MOST_EVALUATED:
                break
            cuts = self._few_cuts(layout)
            evaluated += _FEW_CUTS if cuts is None else len(cuts)
            if cuts is None:
                counts = self._cut_by_memory(layout, memory_weight=1.0)
                cuts = [] if counts is None else [counts]
            for counts in cuts:
                nbytes, device = self._least_peak(layout, counts)
                if least is None or nbytes < least[0]:
                    least = nbytes, device, layout
        if least is None:
            return SplitError(
                f"no plan fits: the model's {len(self._table.sizes)} layers cannot be cut into as "
                f"many stages as requested: lower {argument('nb_part')} or "
                f"{argument('stages_per_device')}"
            )
        nbytes, device, layout = least
        return DoesNotFit(layout, device, nbytes, self._hardware)

    def _least_peak(self, layout: ParallelLayout, counts: Sequence[int]) -> tuple[int, int]:
        """Returns the peak bytes and index of the most loaded device, with maximal recomputation.

        Devices on which recomputation frees no memory do not recompute.
        """
        tables = [self._table]
        if layout.recompute == "layers":
            orders = self._by_gain(layout, counts)
            tables.append(self._table.recomputing(frozenset(chain.from_iterable(orders))))
        by_table = [
            device_memory(table, self._hardware, self._work, layout, counts) for table in tables
        ]
        peaks = [min(m.total for m in memory) for memory in zip(*by_table, strict=True)]
        limits = layout.usable_bytes(self._hardware)
        device = max(range(len(peaks)), key=lambda device: (peaks[device] / limits[device], device))
        return peaks[device], device

    def _least_bytes(self, layout: ParallelLayout) -> float:
        """Returns an estimate of the bytes per device: an even share of weights and activations."""
        costs = self._weighed(layout)
        alive = 1 if layout.recomputed else sum(most_in_flight(layout)) / layout.stages
        whole = sum(cost.weight_bytes + alive * cost.activation_bytes for cost in costs)
        return whole / layout.nb_part

    def _weighed(self, layout: ParallelLayout) -> list[LayerCost]:
        """Returns the costs with weight bytes, and with the least activation bytes possible."""
        single = layout.recompute == "layers"
        return self._weighed_at(layout.samples(self._work), layout.replicas, layout.shard, single)

    def _weighed_of(self, samples: int, replicas: int, shard: str, single: bool) -> list[LayerCost]:
        layout = ParallelLayout(replicas=replicas, shard=shard)
        table = self._most_recomputed if single else self._table
        return with_weight_bytes(table.costs_at(samples), table.sizes, self._work, layout)

    def _cut_by_memory(self, layout: ParallelLayout, **goal: Any) -> list[int] | None:
        objective = Objective(
            recomputes=bool(layout.recomputed),
            stages_per_device=layout.stages_per_device,
            speeds=layout.stage_speeds,
            **goal,
        )
        in_flight = most_in_flight(layout)
        return find_cut(self._weighed(layout), in_flight, objective, self._table.no_cut_before)

    def _most_even_cut(
        self, samples: int, recompute: str, speeds: tuple[float, ...]
    ) -> list[int] | None:
        forwards = 1 if recompute in ("never", "layers") else 2
        costs = [
            replace(cost, forward_ms=forwards * cost.forward_ms, crossing_ms=0.0)
            for cost in self._table.costs_at(samples)
        ]
        goal = Objective(speeds=speeds)
        return find_cut(costs, [1] * len(speeds), goal, self._table.no_cut_before)

    def _whole_times(self, samples: int, recomputed: float) -> tuple[float, float]:
        """Returns the milliseconds of a micro-batch in all layers, and in the slowest layer."""
        times = [
            cost.forward_ms * (1 + recomputed) + cost.backward_ms
            for cost in self._table.costs_at(samples)
        ]
        return sum(times), max(times)


def _least_with_idle_time(whole: float, stages: int, chunks: int) -> float:
    """Returns the least time of a batch, with one stage per device and whole backwards.

    Stage `s` takes `t[s]` per micro-batch. It begins when the first micro-batch has passed the
    stages before it, and their backwards follow its last backward. So a batch of `m` micro-batches
    takes at least `t[0] + ... + t[s-1] + m t[s]`. The maximum over `s` is smallest, M, if all are
    equal: `t[s] = M / m * (1 - 1 / m) ** s`, and these add up to `whole`.
    """
    return whole / (1 - (1 - 1 / chunks) ** stages)
