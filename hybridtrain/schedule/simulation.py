"""Simulates a schedule for given costs, and derives costs from measured spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridtrain.schedule.offload import Held, Offloading, offload_copies
from hybridtrain.schedule.table import (
    Action,
    ActionKind,
    CopySpan,
    Schedule,
    Span,
    Spans,
    SpansWithCopies,
    copies_of,
)


@dataclass(frozen=True)
class CopyTimes:
    """The times of the copies between devices and the host, in any unit.

    Attributes:
        away: for each stage, the time of a copy of one micro-batch to the host.
        back: for each stage, the time of the copy back.
        both: how many times as long a copy takes while one runs in the other direction.
        offloading: how copies run, see `Offloading`. Where they take no time on a timeline of their
            own, as on a CPU, the device itself copies.
    """

    away: tuple[float, ...]
    back: tuple[float, ...]
    both: float = 1.0
    offloading: Offloading = "overlapped"


@dataclass(frozen=True)
class Durations:
    """The time of each stage for one micro-batch, in any unit.

    Attributes:
        forward: the time of each stage's forward.
        backward: the time of each stage's whole backward.
        weight: the time of each stage's backward to the weights.
        transfer: the time of a message from each stage to the next, and back.
        in_parts: the total time of both parts of a split backward, at least that of a whole one;
            None if equal.
        copies: the times of the copies of offloaded activations; None: nothing is copied.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    in_parts: tuple[float, ...] | None = None
    copies: CopyTimes | None = None

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        transfer: Sequence[float] | None = None,
        split: float = 1.0,
    ) -> Durations:
        """Returns durations in which a backward splits into two equal parts.

        The first stage is an exception: its input needs no gradient, so its backward is entirely to
        the weights.

        Args:
            forward: the time of each stage's forward.
            backward: the time of each stage's whole backward.
            transfer: the message time at each boundary; None for zero.
            split: the ratio of a split backward's total time to a whole backward.
        """
        in_parts = [b if stage == 0 else split * b for stage, b in enumerate(backward)]
        weight = [b if stage == 0 else b / 2 for stage, b in enumerate(in_parts)]
        ways = transfer or [0.0] * (len(forward) - 1)
        return cls(tuple(forward), tuple(backward), tuple(weight), tuple(ways), tuple(in_parts))

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Returns durations of equal stages: 1 for a forward, 2 for a backward."""
        return cls.of([1.0] * stages, [2.0] * stages)

    @property
    def of_actions(self) -> dict[ActionKind, Sequence[float]]:
        """The durations of each stage, by action kind."""
        both = self.backward if self.in_parts is None else self.in_parts
        to_input = [b - w for b, w in zip(both, self.weight, strict=True)]
        return {"F": self.forward, "B": self.backward, "I": to_input, "W": self.weight}

    def spans(self, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
        """Returns the span of each action of `schedule`."""
        return spans_for(schedule, self.of_actions, self.transfer, self.copies)

    def length(self, schedule: Schedule) -> float:
        """Returns the end of the last action of `schedule`."""
        return window(self.spans(schedule))[1]


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Predicts spans if stage `s` takes `forward[s]` and `backward[s]` per micro-batch.

    A message between the stages `s` and `s + 1` takes `transfer[s]`, during which both stages
    continue; None for zero. In a split backward, the part to the weights takes `weight[s]`; None
    for half.

    Returns:
        the spans of each device, in the unit of the costs, starting at 0.

    Raises:
        ScheduleError: the actions deadlock.
    """
    weights = [0.5 * b for b in backward] if weight is None else weight
    ways = [0.0] * (schedule.stages - 1) if transfer is None else transfer
    durations = Durations(tuple(forward), tuple(backward), tuple(weights), tuple(ways))
    return durations.spans(schedule)


def spans_for(
    schedule: Schedule,
    times: Mapping[ActionKind, Sequence[float]],
    transfer: Sequence[float] | None = None,
    copies: CopyTimes | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Returns the span of each action, from each stage's times by action kind; see `spans_of`."""

    def seconds(action: Action) -> float:
        return times[action.kind][action.stage]

    return spans_of(schedule, seconds, transfer, copies=copies)


def spans_of(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    transfer: Sequence[float] | None = None,
    delays: Mapping[Action, float] | None = None,
    copies: CopyTimes | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Returns the span of each action; with `copies`, these are `SpansWithCopies`.

    Args:
        schedule: the schedule.
        seconds: returns the duration of an action.
        transfer: the message time at each boundary, during which both stages continue; None for
            zero.
        delays: the delay of each action between the time when its inputs and device are ready and
            its start; None for no delays.
        copies: the times of the copies of offloaded activations; None: nothing is copied.
    """
    ways = transfer or [0.0] * (schedule.stages - 1)
    # dependencies within a stage have already run on the same device
    forward_ends = [[0.0] * schedule.chunks for _ in range(schedule.stages)]
    gradient_ends = [[0.0] * schedule.chunks for _ in range(schedule.stages)]
    spans: list[list[Span]] = [[] for _ in schedule.lanes]
    clock = [0.0] * len(schedule.lanes)
    copying = [] if copies is None else [_CopyLane(schedule, copies) for _ in schedule.lanes]
    # In this order everything an action needs has an end already.
    for device, action in schedule.in_one_order:
        kind, stage, microbatch = action
        start = clock[device]
        if kind == "F" and stage > 0:
            # A message takes its time while both devices go on, so it only delays the receiver.
            start = max(start, forward_ends[stage - 1][microbatch] + ways[stage - 1])
        elif kind in "BI" and stage + 1 < schedule.stages:
            start = max(start, gradient_ends[stage + 1][microbatch] + ways[stage])
        if delays is not None:
            start += delays[action]
        if copying:
            start = copying[device].before(action, clock[device], start)
        end = clock[device] = start + seconds(action)
        if copying:
            # On a CPU the device itself copies, and is not free before that.
            clock[device] = copying[device].after(action, end)
        if kind == "F":
            forward_ends[stage][microbatch] = end
        elif kind in "BI":
            gradient_ends[stage][microbatch] = end
        spans[device].append(Span(action, start, end))
    if copying:
        return SpansWithCopies.of(spans, [lane.spans for lane in copying])
    return tuple(map(tuple, spans))


class _CopyLane:
    """The copies of a device in both directions, in parallel to its actions.

    actions       F0     F1       F2         ...  B0
    to the host      0>>>>>>  1>>>>>>             the action after the next waits for a copy
    back                             <<<<<<0      the action waits for its activations

    Args:
        schedule: the schedule.
        times: the times of the copies.
    """

    def __init__(self, schedule: Schedule, times: CopyTimes) -> None:
        self._copies = offload_copies(schedule, times.offloading)
        self._times = times
        self._overlaps = times.offloading == "overlapped"
        self._clocks = {False: 0.0, True: 0.0}  # of each direction, by `CopySpan.back`
        self._left: list[float] = []  # when what left after each action is away
        self._away: dict[Held, float] = {}
        self._there: dict[Held, float] = {}
        self.spans: list[CopySpan] = []

    def before(self, action: Action, free: float, start: float) -> float:
        """Brings back what comes before an action, and returns when the action starts.

        Args:
            action: the action.
            free: when the device has ended its action before.
            start: when its inputs are there and the device is free.
        """
        if self._overlaps and len(self._left) > 1:  # else more would be on the device
            free = max(free, self._left[-2])
            start = max(start, free)
        for held in self._copies[action].back:
            # Not before it has left: a copy back reads what the copy to the host has written.
            begin = max(free, self._away.pop(held, 0.0)) if self._overlaps else start
            self._there[held] = end = self._copy(held, True, begin)
            if not self._overlaps:
                start = end
        return max(start, self._there.get(action[1:], 0.0)) if action.kind != "F" else start

    def after(self, action: Action, end: float) -> float:
        """Sends away what leaves after an action, and returns when the device is free."""
        away = self._copies[action].away
        if away is not None:
            self._away[away] = self._copy(away, False, end)
        left = self._clocks[False]
        self._left.append(left)
        return end if self._overlaps else max(end, left)

    def _copy(self, held: Held, back: bool, ready: float) -> float:
        """Copies as soon as its direction is free, and returns when that is done."""
        stage, microbatch = held
        start = max(ready, self._clocks[back])
        needs = (self._times.back if back else self._times.away)[stage]
        # the other copy, which is earlier, keeps its end
        together = max(0.0, self._clocks[not back] - start)
        # The part of this copy that runs beside one in the other direction is slower by this
        # factor.
        slow = min(needs * self._times.both, together)
        end = start + slow + needs - slow / self._times.both
        self._clocks[back] = end
        self.spans.append(CopySpan(stage, microbatch, back, start, end))
        return end


def predict(schedule: Schedule, measured: Spans, offloading: Offloading = "instant") -> Spans:
    """Simulates `schedule` with the mean measured costs of each stage.

    Args:
        schedule: the schedule.
        measured: the spans of a step.
        offloading: how the copies of offloaded activations run, if there are some.
    """
    times = mean_costs(measured, schedule.stages)
    return spans_for(schedule, times, copies=_mean_copies(measured, schedule.stages, offloading))


def _mean_copies(measured: Spans, stages: int, offloading: Offloading) -> CopyTimes | None:
    """Returns the mean time of a copy of each stage; None if nothing was copied."""
    times: dict[bool, list[dict[int, float]]]
    times = {back: [{} for _ in range(stages)] for back in (False, True)}
    lanes = copies_of(measured)
    for lane in lanes:
        for copy in lane:
            times[copy.back][copy.stage][copy.microbatch] = copy.end - copy.start
    away, back = (tuple(map(_mean, times[back])) for back in (False, True))
    return CopyTimes(away, back, offloading=offloading) if lanes else None


def mean_costs(measured: Spans, stages: int) -> dict[ActionKind, list[float]]:
    """Returns the mean duration of a micro-batch, by action kind and stage.

    `B` is the mean over whole backwards; for a stage without any, it is the sum of `I` and `W`.

    Args:
        measured: the spans of a step.
        stages: the number of stages.
    """
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W")
    times: dict[ActionKind, list[dict[int, float]]]
    times = {kind: [{} for _ in range(stages)] for kind in kinds}
    for lane in measured:
        for (kind, stage, microbatch), start, end in lane:
            times[kind][stage][microbatch] = end - start
    costs = {kind: [_mean(durations) for durations in times[kind]] for kind in kinds}
    for stage in range(stages):
        if not times["B"][stage]:
            costs["B"][stage] = costs["I"][stage] + costs["W"][stage]
    return costs


def mean_backwards(measured: Spans, stages: int) -> list[float]:
    """Returns the mean duration of each stage's backward of a micro-batch, whole or split.

    The arguments are the same as for `mean_costs`.
    """
    times: list[dict[int, float]] = [{} for _ in range(stages)]
    for lane in measured:
        for (kind, stage, microbatch), start, end in lane:
            if kind != "F":
                times[stage][microbatch] = times[stage].get(microbatch, 0.0) + end - start
    return list(map(_mean, times))


def _mean(times: dict[int, float]) -> float:
    return sum(times.values()) / max(len(times), 1)


def window(spans: Spans) -> tuple[float, float]:
    """Returns the begin of the first and the end of the last action over all devices."""
    return min([lane[0].start for lane in spans]), max([lane[-1].end for lane in spans])


def length(spans: Spans) -> float:
    """Returns the time from the first action to the last over all devices."""
    begin, end = window(spans)
    return end - begin


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Returns the idle fraction of device time, from first start to last end."""
    start, end = window(spans)
    busy = sum(span.end - span.start for lane in spans for span in lane)
    return 1.0 - busy / ((end - start) * len(spans))
