"""The price of a layout: the time of an optimizer step, and the memory of each device at its peak.

    forwards and backwards by the schedule      simulated, with the transfers between stages
    + what the replicas exchange                the all-reduce overlaps with the last backwards
    + the optimizer                             reads and writes weights, gradients and state

`least_step_ms` is a bound from below in closed form, for a search that cannot simulate everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise

from hybridtrain.machine import Machine
from hybridtrain.planning.cost_table import CostTable, LayerSize
from hybridtrain.planning.device_memory import DeviceMemory, device_memory, most_in_flight
from hybridtrain.planning.layout import Job, Layout
from hybridtrain.schedule import (
    SEARCH,
    Durations,
    Spans,
    make_schedule,
    simulate,
)

# A schedule with more actions is simulated for fewer micro-batches: in its middle each takes as
# long as the one before.
MOST_ACTIONS = 8_000
_MOST_GROUPS = 50

# DDP's default size of a bucket. The all-reduce of the last one begins when the backward has ended.
BUCKET_BYTES = 25 * 2**20

# The host's time for a backward in two parts, over that for a whole one: the graph is walked once,
# and each node with weights is called by itself.
SPLIT_HOST = 2.5


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
    binds: str

    @property
    def peak_bytes(self) -> int:
        """The memory of the fullest device."""
        return max(memory.total for memory in self.memory)


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage for one micro-batch, and of each border between two stages.

    `weight` is the part of `backward` that a schedule may put off.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    host: tuple[float, ...]
    recompute: tuple[float, ...]


def stage_times(
    table: CostTable, machine: Machine, job: Job, layout: Layout, counts: Sequence[int]
) -> StageTimes:
    """Returns how long the actions of each stage take, and the messages between stages."""
    costs = table.costs_at(layout.samples(job))
    again = layout.recomputed
    forward, backward, weight, host, recompute = [], [], [], [], []
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        own, called = costs[start:end], table.host_ms[start:end]
        f, b = sum(c.forward_ms for c in own), sum(c.backward_ms for c in own)
        action = _action_ms(machine, layout, stage)
        # the first stage's input needs no gradient: its backward is to the weights alone
        in_two = layout.splits_backwards and stage > 0
        # a GPU computes meanwhile; a CPU does not
        before = action if machine.device == "cpu" else 0.0
        host_f = sum(f for f, _ in called) + action
        host_b = sum(b for _, b in called) * (SPLIT_HOST if in_two else 1.0) + (1 + in_two) * action
        forward.append(max(f + before, host_f))
        backward.append(
            max(b + again * f + (1 + in_two) * before, host_b + again * (host_f - action))
        )
        # what is recomputed is not divided
        weight.append((0.5 if in_two else 1.0) * backward[-1] if layout.splits_backwards else 0.0)
        host.append(host_f + host_b + again * (host_f - action))
        recompute.append(again * f)
    cuts = list(accumulate(counts))[:-1]
    transfer = [
        _transfer_ms(machine, layout, border, costs[cut - 1].crossing_bytes)
        for border, cut in enumerate(cuts)
    ]
    return StageTimes(*map(tuple, (forward, backward, weight, transfer, host, recompute)))


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
    shape = layout.schedule, layout.nb_part, layout.chunks, layout.stages_per_device
    spread = _simulated(*shape, times)
    host = _host_bound_ms(layout, times)
    busy_share = sum(_sums(times)) * layout.chunks / (layout.nb_part * spread.length or 1.0)
    contention = table.contention_at(layout.samples(job))
    shared = _time_shared(layout.nb_part, busy_share)
    crowded = spread.length * (1 + (contention - 1) * shared)
    one_batch = max(crowded, host)
    pipeline = one_batch * job.accumulate
    # what the schedule would take without transfers
    apart = replace(times, transfer=(0.0,) * len(times.transfer))
    transfer = (spread.length - _simulated(*shape, apart).length) if any(times.transfer) else 0.0
    reduce = _exchange_ms(table.sizes, machine, layout, counts, spread)
    optimizer = optimizer_ms(table.sizes, machine, job, layout, counts)
    busy = max(_by_device(layout, _sums(times)))
    data = job.data_ms_per_sample * job.samples * job.accumulate / layout.replicas
    step = max(pipeline + reduce + optimizer, data)
    memory = device_memory(table, job, layout, counts)
    parts = {
        "compute": busy * layout.chunks * job.accumulate,
        "bubble": (spread.length - transfer - busy * layout.chunks) * job.accumulate,
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
        binds=binds,
    )


def least_step_ms(job: Job, layout: Layout, times: StageTimes, optimizer: float) -> float:
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
    least = max(least, _host_bound_ms(layout, times))
    data = job.data_ms_per_sample * job.samples * job.accumulate / layout.replicas
    return max(least * job.accumulate + optimizer, data)


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


@dataclass(frozen=True)
class _Spread:
    """The end of one batch, and of each stage's last backward with its begin; milliseconds."""

    length: float
    last_backward: tuple[tuple[float, float], ...]


@lru_cache(maxsize=1024)
def _simulated(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int, times: StageTimes
) -> _Spread:
    """Returns when the last actions of a batch run."""
    stages = nb_part * stages_per_device
    run = partial(_run, schedule, nb_part, stages_per_device, times)
    # after some groups of `nb_part` the schedule repeats itself
    groups = min(max(2, MOST_ACTIONS // (2 * stages * nb_part)), _MOST_GROUPS)
    less = groups * nb_part + chunks % nb_part
    if chunks <= less + nb_part:
        return run(chunks)
    short, longer = run(less), run(less + nb_part)
    more = (longer.length - short.length) / nb_part * (chunks - less)
    return _Spread(short.length + more, tuple((a + more, b + more) for a, b in short.last_backward))


def simulated(
    name: str, nb_part: int, chunks: int, stages_per_device: int, times: StageTimes
) -> Spans:
    """Returns when the actions of so many micro-batches run, in milliseconds."""
    durations = Durations(times.forward, times.backward, times.weight, times.transfer)
    searched = durations if name == SEARCH else None
    schedule = make_schedule(name, nb_part, chunks, stages_per_device, None, searched)
    return simulate(schedule, times.forward, times.backward, times.transfer, times.weight)


def _run(
    name: str, nb_part: int, stages_per_device: int, times: StageTimes, chunks: int
) -> _Spread:
    spans = simulated(name, nb_part, chunks, stages_per_device, times)
    last = [(0.0, 0.0)] * nb_part * stages_per_device
    for lane in spans:
        for action, start, end in lane:
            if action.ends_microbatch and action.microbatch == chunks - 1:
                last[action.stage] = start, end
    return _Spread(max(end for _, end in last), tuple(last))


def _exchange_ms(
    sizes: Sequence[LayerSize],
    machine: Machine,
    layout: Layout,
    counts: Sequence[int],
    spread: _Spread,
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
        device = layout.device_of(stage)
        one_way = machine.gather_s(trained[stage], layout.replicas, layout.nb_part) * 1e3
        # a reduce-scatter and an all-gather; with shards, the norm still is that of whole gradients
        reduce = 2 * one_way
        last_bucket = reduce * min(1.0, BUCKET_BYTES / max(1, trained[stage]))
        begin = max(begin, done[device])
        done[device] = max(begin + reduce, finish + last_bucket)
        gather[device] += one_way if layout.shard != "none" else 0.0
    return max(0.0, max(done) - end) + max(gather)


def _action_ms(machine: Machine, layout: Layout, stage: int) -> float:
    """Returns the host's time for a forward or backward of `stage`, beside its operators.

    With a process for each device, what comes from another stage is received and what goes to
    another is sent.
    """
    messages = (stage > 0) + (stage < layout.stages - 1)
    if layout.engine == "local" or layout.nb_part == 1:
        messages = 0
    return (machine.action_s + messages * machine.message_s) * 1e3


def _transfer_ms(machine: Machine, layout: Layout, border: int, nbytes: float) -> float:
    """Returns the time of a message from stage `border` to the next one."""
    device, to = layout.device_of(border), layout.device_of(border + 1)
    in_node = machine.devices_per_node
    if device == to or (layout.engine == "local" and machine.device == "cpu"):
        return 0.0
    return machine.transfer_s(nbytes, device // in_node != to // in_node) * 1e3


def _host_bound_ms(layout: Layout, times: StageTimes) -> float:
    """Returns the time of the process that calls most operators.

    The threads of `engine=local` take turns in one interpreter.
    """
    by_device = _by_device(layout, times.host)
    called = sum(by_device) if layout.engine == "local" else max(by_device)
    return called * layout.chunks


def _time_shared(nb_part: int, busy_share: float) -> float:
    """Returns the share of a pipeline's time in which devices slow each other down.

    At any time at least one device is busy; what they are beyond that, on average, counts. For two
    devices that is the share of the time in which both are busy.
    """
    return max(0.0, (nb_part * busy_share - 1) / (nb_part - 1)) if nb_part > 1 else 0.0


def _sums(times: StageTimes) -> list[float]:
    return [f + b for f, b in zip(times.forward, times.backward, strict=True)]


def _by_stage(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [sum(values[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]


def _by_device(layout: Layout, values: Sequence[float]) -> list[float]:
    sums = [0.0] * layout.nb_part
    for stage, value in enumerate(values):
        sums[layout.device_of(stage)] += value
    return sums
