"""Schedules as data: for every device, the ordered list of its actions.

    1F1B, 4 stages, 6 micro-batches (GPipe: Huang et al., arXiv:1811.06965; 1F1B: Narayanan et al.,
    arXiv:2006.09503); time runs to the right, a backward is drawn twice as long as a forward

    stage 0  F0 F1 F2 F3 .. .. .. .. .. B0-- F4 B1-- F5 B2-- .. B3-- .. B4-- .. B5--
    stage 1     F0 F1 F2 .. .. .. B0-- F3 B1-- F4 B2-- F5 B3-- .. B4-- .. B5--
    stage 2        F0 F1 .. B0-- F2 B1-- F3 B2-- F4 B3-- F5 B4-- .. B5--
    stage 3           F0 B0-- F1 B1-- F2 B2-- F3 B3-- F4 B4-- F5 B5--

Everything else reads this one table: an engine executes it, `validate` proves that it cannot
deadlock, `peak_in_flight` counts the micro-batches that a stage keeps alive, `simulate` predicts
when everything runs. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from hybridtrain.errors import ScheduleError, did_you_mean


class Action(NamedTuple):
    """The forward (`F`) or backward (`B`) of one micro-batch on one stage."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each device, in order: `lanes[d]` are those of device `d`."""

    name: str
    stages: int
    chunks: int
    lanes: tuple[tuple[Action, ...], ...]

    @property
    def trains(self) -> bool:
        """True if it has backwards."""
        return any(action.kind == "B" for action in self.lanes[0])


class Span(NamedTuple):
    """The time of an action, measured or simulated; the unit is the caller's."""

    action: Action
    start: float
    end: float


Spans = Sequence[Sequence[Span]]
"""The spans of one step: a sequence per device."""


def gpipe(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns a schedule of all forwards, then all backwards.

    The backwards go in the order of the micro-batches, so that gradients are added up in the
    same order as in the unsplit model under gradient accumulation.
    """
    lanes = tuple(
        tuple(Action("F", s, i) for s in own for i in range(chunks))
        + tuple(Action("B", s, i) for s in reversed(own) for i in range(chunks))
        for own in _stages_of_devices(devices, stages_per_device)
    )
    return Schedule("gpipe", devices * stages_per_device, chunks, lanes)


def one_forward_one_backward(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns a schedule of a few forwards, then a backward and a forward in turn.

    With one stage per device, stage `s` holds at most `stages - s` micro-batches, whatever their
    number. With `v` stages per device (Narayanan et al., arXiv:2104.04473) device `d` has the
    stages `d`, `d + devices`, ... and takes the micro-batches in groups through one after the
    other; the bubble shrinks to a `v`th, from (P-1)/m of the computing time to (P-1)/(v m), for
    about twice the activations.
    """
    v = stages_per_device
    rounds = _even(chunks, max(1, chunks // devices))
    lanes = []
    for d, own in enumerate(_stages_of_devices(devices, v)):
        # each later device adds a forward to the warm-up, or two if stages are interleaved; each
        # further stage of this device adds a whole group
        later_devices = devices - 1 - d
        warm_up = 1 + (later_devices if v == 1 else 2 * later_devices + (v - 1) * len(rounds[0]))
        forwards = [Action("F", s, i) for group in rounds for s in own for i in group]
        backwards = [Action("B", s, i) for group in rounds for s in reversed(own) for i in group]
        lane = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            lane += [backward, *forwards[warm_up + k : warm_up + k + 1]]
        lanes.append(tuple(lane))
    return Schedule("1f1b", devices * v, chunks, tuple(lanes))


def in_blocks(builder: Builder, size: int, devices: int, chunks: int, v: int) -> Schedule:
    """Returns `builder`'s schedules for `size` micro-batches at a time, one after the other."""
    lanes: list[list[Action]] = [[] for _ in range(devices)]
    for block in _even(chunks, -(-chunks // size)):
        part = builder(devices, len(block), v)
        for lane, actions in zip(lanes, part.lanes, strict=True):
            lane += [action._replace(microbatch=block[action.microbatch]) for action in actions]
    return Schedule(part.name, devices * v, chunks, tuple(map(tuple, lanes)))


def forward_only(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Every micro-batch once through all stages, as in an evaluation; no backwards."""
    lanes = tuple(
        tuple(
            Action("F", s, i)
            for group in _even(chunks, max(1, chunks // devices))
            for s in own
            for i in group
        )
        for own in _stages_of_devices(devices, stages_per_device)
    )
    return Schedule("forward_only", devices * stages_per_device, chunks, lanes)


def _stages_of_devices(devices: int, stages_per_device: int) -> list[range]:
    stages = devices * stages_per_device
    return [range(device, stages, devices) for device in range(devices)]


def _even(count: int, parts: int) -> list[range]:
    """Returns the numbers below `count` in `parts` ranges, the longer ones first."""
    small, longer = divmod(count, parts)
    starts = [part * small + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


Builder = Callable[[int, int, int], Schedule]

SCHEDULES: dict[str, Builder] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


@lru_cache(maxsize=256)
def make_schedule(
    name: str,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    max_inflight: int | None = None,
) -> Schedule:
    """Builds and validates the schedule `name`; a short last batch asks for fewer `chunks`.

    Args:
        name: one of `SCHEDULES`.
        devices: how many.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        max_inflight: how many micro-batches may be in flight, begun and not finished, at one time.

    Raises:
        ScheduleError: `name` is unknown, or a count is not positive.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"schedule={name!r} is unknown; {did_you_mean(name, SCHEDULES, 'schedules')}"
        )
    if min(devices, chunks, stages_per_device, max_inflight or 1) < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 device, 1 chunk, 1 stage per device and 1 micro-batch "
            f"in flight, not {devices}, {chunks}, {stages_per_device}, {max_inflight}"
        )
    builder = SCHEDULES[name]
    schedule = builder(devices, chunks, stages_per_device)
    # stage 0 holds every micro-batch that is in flight
    if max_inflight is not None and peak_in_flight(schedule)[0] > max_inflight:
        schedule = in_blocks(builder, max_inflight, devices, chunks, stages_per_device)
    validate(schedule)
    return schedule


def validate(schedule: Schedule) -> None:
    """Proves that an engine can execute `schedule`: complete, in order, free of deadlock.

    In order means that each stage takes the micro-batches first to last, forward and backward:
    the engine's links are queues, and gradients must be added up as in the unsplit model.

    Raises:
        ScheduleError: names the rule and the first action that breaks it.
    """
    seen: dict[tuple[str, int], int] = {}
    device_of: dict[int, int] = {}
    for device, lane in enumerate(schedule.lanes):
        for action in lane:
            kind, stage, microbatch = action
            if kind not in ("F", "B"):
                raise ScheduleError(
                    f"{schedule.name}: {action} is not a forward (F) or backward (B)"
                )
            if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.chunks):
                raise ScheduleError(f"{schedule.name}: {action}: no such stage or micro-batch")
            if device_of.setdefault(stage, device) != device:
                raise ScheduleError(f"{schedule.name}: stage {stage} is on two devices")
            if seen.get((kind, stage), 0) != microbatch:
                raise ScheduleError(
                    f"{schedule.name}: {action} is out of order; stage {stage} must take each "
                    f"micro-batch once, first to last"
                )
            seen[kind, stage] = microbatch + 1
    for stage in range(schedule.stages):
        for name in "FB":
            if seen.get((name, stage), 0) != schedule.chunks:
                raise ScheduleError(f"{schedule.name}: stage {stage} lacks a {name}")
    simulate(schedule, [1.0] * schedule.stages, [1.0] * schedule.stages)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most micro-batches whose activations each stage holds at one time."""
    in_flight = [0] * schedule.stages
    peak = [0] * schedule.stages
    for lane in schedule.lanes:
        for kind, stage, _ in lane:
            in_flight[stage] += 1 if kind == "F" else -1
            peak[stage] = max(peak[stage], in_flight[stage])
    return tuple(peak)


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Predicts when each action runs if stage `s` takes `forward[s]` and `backward[s]` for each.

    A message between the stages `s` and `s + 1` takes `transfer[s]`, in which both go on; None: no
    time.

    Returns:
        the spans of each device, in the unit of the costs, starting at 0.

    Raises:
        ScheduleError: the actions wait for one another in a circle.
    """
    finished: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.lanes]
    clock = [0.0] * len(schedule.lanes)
    position = [0] * len(schedule.lanes)
    moved = True
    while moved:
        moved = False
        for device, lane in enumerate(schedule.lanes):
            while position[device] < len(lane):
                action = lane[position[device]]
                needs = _needs(action, schedule.stages)
                if any(need not in finished for need in needs):
                    break
                start = clock[device]
                for need in needs:
                    border = min(need.stage, action.stage)
                    way = transfer[border] if transfer and need.stage != action.stage else 0.0
                    start = max(start, finished[need] + way)
                cost = forward if action.kind == "F" else backward
                clock[device] = finished[action] = start + cost[action.stage]
                spans[device].append(Span(action, start, clock[device]))
                position[device] += 1
                moved = True
    stuck = [lane[p] for lane, p in zip(schedule.lanes, position, strict=True) if p < len(lane)]
    if stuck:
        raise ScheduleError(
            f"{schedule.name}: deadlock; waiting for one another: {', '.join(map(str, stuck))}"
        )
    return tuple(map(tuple, spans))


def predict(schedule: Schedule, measured: Spans, reduced: bool = False) -> Spans:
    """Returns the spans that `schedule` predicts for the mean measured costs of each stage.

    See `mean_costs` for `reduced`.
    """
    costs = mean_costs(measured, schedule.stages, reduced)
    return simulate(schedule, costs["F"], costs["B"])


def mean_costs(measured: Spans, stages: int, reduced: bool = False) -> dict[str, list[float]]:
    """Returns the mean duration of a micro-batch, by kind of action (`F` or `B`) and stage.

    Args:
        measured: the spans of a step.
        stages: how many.
        reduced: the last backward of each stage waits for the gradients of other replicas too, so
            it is left out of the mean where there are others.
    """
    costs: dict[str, list[list[float]]] = {kind: [[] for _ in range(stages)] for kind in "FB"}
    for lane in measured:
        for action, start, end in lane:
            costs[action.kind][action.stage].append(end - start)
    if reduced:  # a stage takes its micro-batches in order, so the last one is the last measured
        costs["B"] = [times[:-1] or times for times in costs["B"]]
    return {kind: [sum(x) / max(len(x), 1) for x in each] for kind, each in costs.items()}


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Returns the share of the devices' time, first start to last end, in which they are idle."""
    start = min(lane[0].start for lane in spans)
    end = max(lane[-1].end for lane in spans)
    busy = sum(span.end - span.start for lane in spans for span in lane)
    return 1.0 - busy / ((end - start) * len(spans))


def _needs(action: Action, stages: int) -> list[Action]:
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    needs = [Action("F", stage, microbatch)]
    if stage + 1 < stages:
        needs.append(Action("B", stage + 1, microbatch))
    return needs
