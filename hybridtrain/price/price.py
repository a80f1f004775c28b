"""The price of a layout, and the search for the layouts with the lowest price that fit.

The price is the time of an optimizer step, and the memory of each device at its peak:

    forwards and backwards by the schedule      simulated, with the transfers between stages
    + what the replicas exchange                the all-reduce overlaps with the last backwards
    + the optimizer                             reads and writes weights, gradients and state

Of thousands of layouts few are worth a simulation. A queue has them by a bound that none can be
faster than (`least_step_ms`, in closed form). The first of the queue is looked at more closely,
which makes its bound larger, and goes back into the queue:

    without a cut   all devices are equally busy       cheap, from sums
    cut             the bound of the schedule          closed form; it fits into memory
    priced          the simulated time                 the next result

So a result is never slower than a layout that was not simulated. Where a model can be cut in few
ways all of them go into the queue; else the most even one does, improved step by step. With
`recompute="layers"` a cut says which layers are recomputed: as few as memory asks for.

`predict_step` prices the one layout that a run has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, combinations, pairwise
from itertools import count as counter
from math import comb, lcm
from typing import Any, NamedTuple

from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer
from hybridtrain.options import PRECISIONS, PipelineOptions
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    LayerSize,
    LossOfStep,
    Objective,
    counted_costs_of_one_size,
    cut_by_costs,
    given_costs,
    layer_sizes,
)
from hybridtrain.price.layout import Choices, Layout, StepWork, layouts
from hybridtrain.price.stage_needs import (
    DeviceMemory,
    StageTimes,
    device_memory,
    most_in_flight,
    stage_times,
    with_weight_bytes,
)
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
        recomputed: the layers that are recomputed by themselves, by index.
        binds: what to change first: `compute`, `idle`, `transfers`, `all-reduce`, `optimizer`,
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
    recomputed: tuple[int, ...]
    binds: str

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device."""
        return max(memory.total for memory in self.memory)


def price(
    table: CostTable, hardware: Hardware, work: StepWork, layout: Layout, counts: Sequence[int]
) -> Price:
    """Returns what `layout` takes if its stages have `counts` layers each.

    Args:
        table: the costs of the layers, with those that are recomputed.
        hardware: its devices and links.
        work: the work of a step.
        layout: how the model is spread.
        counts: the number of layers of each stage.
    """
    times = stage_times(table, hardware, work, layout, counts)
    spread = spread_of(layout, times.durations)
    host = _host_bound_ms(layout, times, spread)
    by_device = _by_device(layout, _batch_ms(layout, times, spread))
    busy_share = sum(by_device) / (layout.nb_part * spread.length or 1.0)
    contention = table.contention_at(layout.samples(work))
    shared = _time_shared(layout.nb_part, busy_share)
    crowded = spread.length * (1 + (contention - 1) * shared)
    one_batch = max(crowded, host)
    # a long schedule of many devices is continued, by less than they may take
    one_batch = max(one_batch, least_batch_ms(layout, times))
    pipeline = one_batch * work.accumulate
    # what the schedule would take without transfers
    apart = replace(times, transfer=(0.0,) * len(times.transfer))
    transfer = 0.0
    if any(times.transfer):
        transfer = spread.length - spread_of(layout, apart.durations).length
    reduce = _exchange_ms(table.sizes, hardware, layout, counts, spread)
    optimizer = optimizer_ms(table.sizes, hardware, work, layout, counts)
    busy = max(by_device)
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    step = max(pipeline + reduce + optimizer, data)
    memory = device_memory(table, work, layout, counts)
    parts = {
        "compute": busy * work.accumulate,
        "idle": (spread.length - transfer - busy) * work.accumulate,
        "transfers": transfer * work.accumulate,
        "all-reduce": reduce,
        "optimizer": optimizer,
        "host": (one_batch - crowded) * work.accumulate,
        "data": step - (pipeline + reduce + optimizer),
    }
    # compute is always there: the rest binds where it is a fifth of the step
    rest = {name: ms for name, ms in parts.items() if name != "compute"}
    worst = max(rest, key=rest.__getitem__)
    binds = worst if rest[worst] > 0.2 * step else "compute"
    if max(m.total for m in memory) > 0.9 * hardware.usable_bytes:
        binds += ", memory"
    slowed = 1 + (contention - 1) * shared / (busy_share or 1.0)
    busy_share *= slowed * spread.length / (one_batch or 1.0)
    return Price(
        layout=layout,
        counts=tuple(counts),
        step_ms=step,
        pipeline_ms=pipeline,
        compute_ms=parts["compute"],
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


def least_step_ms(work: StepWork, layout: Layout, times: StageTimes, optimizer: float) -> float:
    """Returns what no step is faster than, whatever its schedule."""
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    return max(least_batch_ms(layout, times) * work.accumulate + optimizer, data)


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
    hardware: Hardware,
    work: StepWork,
    layout: Layout,
    counts: Sequence[int],
) -> float:
    """Returns the time of the optimizer on the device that has most to do.

    It reads weights, gradients and its tensors, and writes all but the gradients.
    """
    tensors = 3 + 2 * work.optimizer_tensors_per_param
    most = max(_by_device(layout, _by_stage([size.trained for size in sizes], counts)))
    shares = 1 if layout.shard == "none" else layout.replicas
    return tensors * most / shares / hardware.sustained_bandwidth * 1e3


def _exchange_ms(
    sizes: Sequence[LayerSize],
    hardware: Hardware,
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
        one_way = hardware.gather_s(trained[stage], layout.replicas, layout.nb_part) * 1e3
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
    hardware: Hardware,
    work: StepWork,
    layout: Layout,
    measured: Sequence[LayerCost] | None = None,
    *,
    precision: str = "fp32",
    tf32: bool = False,
    loss: LossOfStep | None = None,
    recomputed: Set[int] = frozenset(),
) -> Prediction:
    """Predicts a step of a model that is cut already; no layer runs.

    Args:
        stages: the layers of each stage, also on the meta device.
        microbatch: the inputs of the first micro-batch, of which shapes and types count.
        hardware: its devices and links; without a rate for the precision, the memory alone is
            predicted, unless the costs are measured.
        work: the work of a step.
        layout: how the model is spread.
        measured: the costs of all layers for such a micro-batch. None: they are counted.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.
        loss: that ends the last stage; None, or with measured costs: it is left out.
        recomputed: the layers that are recomputed by themselves, by index.

    Raises:
        SplitError: a layer does not run on fake tensors.
    """
    layers = [layer for stage in stages for layer in stage]
    counts = [len(stage) for stage in stages]
    if measured is not None:
        table = replace(given_costs(lambda _: measured, layer_sizes(layers)), costs_from="measured")
    else:
        known = hardware.flops_per_s or dict.fromkeys((*PRECISIONS, "tf32"), _ANY_RATE)
        counted_on = replace(hardware, flops_per_s=known)
        table = counted_costs_of_one_size(layers, microbatch, counted_on, precision, tf32, loss)
    table = table.recomputing(recomputed)
    if measured is None and not hardware.flops_per_s:
        return Prediction(
            memory_bytes=_as_measured(device_memory(table, work, layout, counts), hardware),
            reason="`hybridtrain measure-machine`, once, or split=time would give the times",
        )
    found = price(table, hardware, work, layout, counts)
    memory = _as_measured(found.memory, hardware)
    return Prediction(found.step_ms, found.bubble, memory, table.costs_from)


def _as_measured(memory: Sequence[DeviceMemory], hardware: Hardware) -> tuple[int, ...]:
    """Returns the peak of each device: of a GPU all, on a CPU what is counted there."""
    return tuple(m.kept if hardware.device == "cpu" else m.total for m in memory)


def why_not_priced(options: PipelineOptions) -> str | None:
    """Returns what of `options` the price of a step leaves out; None: nothing."""
    if options.compile:
        return "compile=true is not priced"
    if options.max_inflight is not None:
        return f"max_inflight={options.max_inflight} is not priced"
    return None


# A model that can be cut in no more ways is tried in all of them.
_FEW_CUTS = 50

# How many cuts are looked at to improve one.
_MOST_MOVES = 100

# Predictions are not better than this: of plans that are as fast, the simplest one is proposed.
ALIKE = 1.02
# As many layouts as asked for, and times as many that are as fast.
_MOST_ALIKE = 10

# Layouts of which the least memory is looked for if none fits.
_CLOSE = 20


class _Entry(NamedTuple):
    """A layout in the queue; `number` breaks ties, so that nothing else is compared."""

    bound_ms: float
    number: int
    layout: Layout
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
    """Returns the prices of `best` layouts that fit into memory: `proposed`, then the fastest.

    Args:
        table: the costs of the model's layers.
        hardware: its devices and links, all of which is used.
        work: the work of a step.
        choices: what may be chosen from.
        best: how many.

    Raises:
        ConfigError: no layout uses all devices and cuts all batches evenly.
        SplitError: no layout fits into memory; says how much is missing.
    """
    search = _Search(table, hardware, work)
    every = layouts(hardware, work, len(table.sizes), choices or Choices())
    found = search.fastest(every, best)
    if not found:
        raise SplitError(search.why_nothing_fits(every))
    first = proposed(found)
    return [first, *(one for one in found if one is not first)][:best]


def proposed(prices: Sequence[Price]) -> Price:
    """Returns the price that a person would choose, of the fastest and those that are as fast.

    It has the fewest stages; of these, the simplest engine and schedule, nothing recomputed or
    sharded if that is not needed, and then the least memory.
    """
    limit = ALIKE * min(one.step_ms for one in prices)

    def effort(one: Price) -> tuple[float, ...]:
        layout = one.layout
        return (
            layout.stages,
            layout.engine != "local",
            layout.splits_backwards,
            layout.recompute != "never",
            layout.shard != "none",
            one.peak_bytes,
            one.step_ms,
        )

    return min((one for one in prices if one.step_ms <= limit), key=effort)


class _Search:
    """Cuts and bounds, of which many layouts share some."""

    def __init__(self, table: CostTable, hardware: Hardware, work: StepWork) -> None:
        self._table = table
        self._machine = hardware
        self._job = work
        self._cut = cache(self._cut_by_time)
        self._times = cache(self._whole_times)
        self._weighed_at = cache(self._weighed_of)
        self._recomputed = cache(self._fewest_recomputed)
        # all but the last, whose cost is also that of the loss
        self._most_recomputed = table.recomputing(frozenset(range(len(table.sizes) - 1)))

    def fastest(self, every: Sequence[Layout], best: int) -> list[Price]:
        """Returns the prices of the `best` fastest layouts that fit into memory, by time.

        And of more that are as fast as the first one.
        """
        numbers = counter()
        queue = [_Entry(self.bound(layout), next(numbers), layout) for layout in every]
        heapq.heapify(queue)
        found: dict[Layout, Price] = {}
        fastest = math.inf
        while queue and len(found) < _MOST_ALIKE * best:
            entry = heapq.heappop(queue)
            if len(found) >= best and entry.bound_ms > ALIKE * fastest:
                break
            layout, counts = entry.layout, entry.counts
            if layout in found:  # with a better cut
                continue
            if entry.priced is not None:
                found[layout] = entry.priced
                fastest = min(fastest, entry.priced.step_ms)
            elif counts is not None:
                table = self._table_of(layout, counts)
                priced = price(table, self._machine, self._job, layout, counts)
                bound = max(entry.bound_ms, priced.step_ms)
                heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts, priced))
            else:
                for counts in self.cuts(layout):
                    bound = max(entry.bound_ms, self.bound_of_cut(layout, counts))
                    heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts))
        # bounds differ from prices by rounding
        return sorted(found.values(), key=lambda one: one.step_ms)

    def bound(self, layout: Layout) -> float:
        """Returns what no cut of the model is faster than, in milliseconds."""
        whole, largest = self._times(layout.samples(self._job), layout.recompute)
        busy = max(whole / layout.nb_part, largest) * layout.chunks
        if layout.stages_per_device == 1 and not layout.splits_backwards:
            busy = max(busy, _least_with_idle_time(whole, layout.nb_part, layout.chunks))
        load = self._job.data_ms_per_sample * self._job.samples / layout.replicas
        return max(busy, load) * self._job.accumulate

    def bound_of_cut(self, layout: Layout, counts: Sequence[int]) -> float:
        """Returns what no schedule of these stages is faster than, in milliseconds."""
        table = self._table_of(layout, counts)
        times = stage_times(table, self._machine, self._job, layout, counts)
        step = optimizer_ms(self._table.sizes, self._machine, self._job, layout, counts)
        return least_step_ms(self._job, layout, times, step)

    def cuts(self, layout: Layout) -> list[list[int]]:
        """Returns cuts that fit into memory, as the layers of each stage: all if there are few."""
        if not self._weights_fit(layout):
            return []
        layers = len(self._table.sizes)
        if comb(layers - 1, layout.stages - 1) > _FEW_CUTS:
            even = self.fitting_cut(layout)
            return [] if even is None else [self._improved(layout, even)]
        places = [at for at in range(1, layers) if at not in self._table.no_cut_before]
        every = combinations(places, layout.stages - 1)
        counts = [[b - a for a, b in pairwise((0, *bounds, layers))] for bounds in every]
        return [one for one in counts if self._fits(layout, one)]

    def _fits(self, layout: Layout, counts: Sequence[int]) -> bool:
        if layout.recompute == "layers":  # with none it is that of "never"
            return bool(self._recomputed(layout, tuple(counts)))
        return not any(map(self._is_over, device_memory(self._table, self._job, layout, counts)))

    def _table_of(self, layout: Layout, counts: Sequence[int]) -> CostTable:
        if layout.recompute != "layers":
            return self._table
        return self._table.recomputing(self._recomputed(layout, tuple(counts)) or frozenset())

    def _fewest_recomputed(self, layout: Layout, counts: tuple[int, ...]) -> frozenset[int] | None:
        """Returns layers whose recomputation makes these stages fit; None: it does not.

        On each device as few as are needed, of the order in which they free the most bytes for the
        time of their forward.
        """
        kept, again = (
            table.costs_at(layout.samples(self._job))
            for table in (self._table, self._most_recomputed)
        )
        in_flight = most_in_flight(layout)
        gains: list[list[tuple[float, int]]] = [[] for _ in range(layout.nb_part)]
        for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
            for index in range(start, end):
                freed = kept[index].activation_bytes - again[index].activation_bytes
                if freed:
                    rate = freed * in_flight[stage] / (kept[index].forward_ms or math.ulp(0.0))
                    gains[layout.devices[stage]].append((-rate, index))
        order = [[index for _, index in sorted(each)] for each in gains]

        def chosen(numbers: Sequence[int]) -> frozenset[int]:
            return frozenset(i for own, n in zip(order, numbers, strict=True) for i in own[:n])

        def over(numbers: Sequence[int]) -> list[bool]:
            table = self._table.recomputing(chosen(numbers))
            return list(map(self._is_over, device_memory(table, self._job, layout, counts)))

        # bisection, on all devices at once
        fewest = [0] * layout.nb_part
        most = [len(own) * is_over for own, is_over in zip(order, over(fewest), strict=True)]
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

    def _is_over(self, memory: DeviceMemory) -> bool:
        return memory.total > self._machine.usable_bytes

    def _weights_fit(self, layout: Layout) -> bool:
        weights = sum(cost.weight_bytes for cost in self._weighed(layout))
        return weights / layout.nb_part <= self._machine.usable_bytes

    def _improved(self, layout: Layout, counts: list[int]) -> list[int]:
        """Returns a cut with a smaller bound, found by moving layers to the next stage and back.

        The most even stages may send large messages, and may add up to uneven devices.
        """
        best = self.bound_of_cut(layout, counts)
        moves = iter(range(_MOST_MOVES))
        border = 0
        unmoved = 0
        while unmoved < layout.stages - 1 and next(moves, None) is not None:
            unmoved += 1
            for step in (-1, 1):
                moved = list(counts)
                moved[border] += step
                moved[border + 1] -= step
                if min(moved) < 1 or sum(moved[: border + 1]) in self._table.no_cut_before:
                    continue
                bound = self.bound_of_cut(layout, moved)
                if bound < best and self._fits(layout, moved):
                    counts, best, unmoved = moved, bound, 0
            border = (border + 1) % (layout.stages - 1)
        return counts

    def fitting_cut(self, layout: Layout) -> list[int] | None:
        """Returns the layers of each stage, as even as memory allows; None if nothing fits."""
        if not self._weights_fit(layout):
            return None
        limit = self._machine.usable_bytes
        try:
            counts = self._cut(layout.samples(self._job), layout.recompute, layout.stages)
            if self._fits(layout, counts):
                return counts
            single = layout.recompute == "layers"
            if single and self._recomputed(layout, tuple(counts)) == frozenset():
                return None  # nothing has to be recomputed
            if not self._may_fit(layout, limit / layout.stages_per_device):
                return None
            counts = self._cut_for_memory(layout, memory_weight=0.0, memory_limit=limit)
        except SplitError:  # too few layers or places to cut, or too much memory
            return None
        return counts if self._fits(layout, counts) else None

    def _may_fit(self, layout: Layout, limit: float) -> bool:
        """Returns whether stages that are filled up to `limit` have room for all layers.

        What comes from other stages is left out, so that a smaller stage never needs more. Far
        quicker than to look for a cut.
        """
        stage, used = 0, 0.0
        in_flight = most_in_flight(layout)
        for cost in self._weighed(layout):
            while True:
                alive = 1 if layout.recomputed else in_flight[stage]
                nbytes = cost.weight_bytes + alive * cost.activation_bytes
                if used + nbytes <= limit:
                    used += nbytes
                    break
                stage, used = stage + 1, 0.0
                if stage == layout.stages:
                    return False
        return True

    def why_nothing_fits(self, every: Sequence[Layout]) -> str:
        """Returns what is missing where the least is."""
        found: list[tuple[int, int, Layout]] = []
        for layout in sorted(every, key=self._least_bytes)[:_CLOSE]:
            try:
                counts = self._cut_for_memory(layout, memory_weight=1.0)
            except SplitError:
                continue
            table = self._most_recomputed if layout.recompute == "layers" else self._table
            memory = device_memory(table, self._job, layout, counts)
            device, nbytes = max(enumerate(m.total for m in memory), key=lambda pair: pair[1])
            found.append((nbytes, device, layout))
        if not found:
            return (
                f"no plan fits: the model's {len(self._table.sizes)} layers cannot be cut into as "
                f"many stages as asked for: lower nb_part= or stages_per_device="
            )
        nbytes, device, layout = min(found, key=lambda entry: entry[0])
        usable = self._machine.usable_bytes
        recompute = {"layers": "of single layers"}.get(layout.recompute, layout.recompute)
        return (
            f"no plan fits: {(nbytes - usable) / GIB:.1f} GiB are missing on device {device}; the "
            f"least memory is {nbytes / GIB:.1f} GiB of {usable / GIB:.1f} GiB that may be used "
            f"(nb_part={layout.nb_part}, chunks={layout.chunks}, recompute {recompute}, "
            f"shard={layout.shard}): more devices (hardware.nodes=), larger ones "
            f"(hardware.memory_gib=) or a smaller model would do"
        )

    def _least_bytes(self, layout: Layout) -> float:
        """Returns about how much a device needs: an even share, and the inputs of its stage."""
        costs = self._weighed(layout)
        alive = 1 if layout.recomputed else sum(most_in_flight(layout)) / layout.stages
        whole = sum(cost.weight_bytes + alive * cost.activation_bytes for cost in costs)
        return whole / layout.nb_part

    def _weighed(self, layout: Layout) -> list[LayerCost]:
        """Returns the costs with the bytes of weights, and the least of activations."""
        single = layout.recompute == "layers"
        return self._weighed_at(layout.samples(self._job), layout.replicas, layout.shard, single)

    def _weighed_of(self, samples: int, replicas: int, shard: str, single: bool) -> list[LayerCost]:
        layout = Layout(replicas=replicas, shard=shard)
        table = self._most_recomputed if single else self._table
        return with_weight_bytes(table.costs_at(samples), table.sizes, self._job, layout)

    def _cut_for_memory(self, layout: Layout, **goal: float) -> list[int]:
        objective = Objective(
            recomputes=bool(layout.recomputed),
            stages_per_device=layout.stages_per_device,
            **goal,  # type: ignore[arg-type]
        )
        in_flight = most_in_flight(layout)
        return cut_by_costs(self._weighed(layout), in_flight, objective, self._table.no_cut_before)

    def _cut_by_time(self, samples: int, recompute: str, stages: int) -> list[int]:
        again = 1 if recompute in ("never", "layers") else 2
        costs = [
            replace(cost, forward_ms=again * cost.forward_ms, crossing_ms=0.0)
            for cost in self._table.costs_at(samples)
        ]
        return cut_by_costs(costs, [1] * stages, Objective(), self._table.no_cut_before)

    def _whole_times(self, samples: int, recompute: str) -> tuple[float, float]:
        """Returns the milliseconds of all layers for a micro-batch, and of the largest one."""
        again = recompute == "always"
        times = [
            cost.forward_ms * (1 + again) + cost.backward_ms
            for cost in self._table.costs_at(samples)
        ]
        return sum(times), max(times)


def _least_with_idle_time(whole: float, stages: int, chunks: int) -> float:
    """Returns the least time of a batch, with one stage per device and whole backwards.

    Stage `s` takes `t[s]` for a micro-batch. It begins when the first one has passed the stages
    before it, and after its last backward come theirs. So the batch, of `m` micro-batches, takes at
    least `t[0] + ... + t[s-1] + m t[s]`. The largest of these is the smallest, M, if all are equal:
    `t[s] = M / m * (1 - 1 / m) ** s`, whose sum is `whole`.
    """
    return whole / (1 - (1 - 1 / chunks) ** stages)
