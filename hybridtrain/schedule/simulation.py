"""The times of a schedule's actions for given costs, and the costs from measured spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybridtrain.schedule.table import Action, ActionKind, Schedule, Span, Spans


@dataclass(frozen=True)
class Durations:
    """The time that each stage takes for one micro-batch, in any unit.

    Attributes:
        forward: of each stage.
        backward: a whole one.
        weight: of a backward's second part, to the weights.
        transfer: from each stage to the next, and back.
        in_parts: both parts of a backward together, no shorter than a whole one; None: as long.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    in_parts: tuple[float, ...] | None = None

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        transfer: Sequence[float] | None = None,
        split: float = 1.0,
    ) -> Durations:
        """Returns durations in which a backward has two equal parts.

        But for the first stage, whose input needs no gradient: all of it is to the weights.

        Args:
            forward: of each stage.
            backward: a whole one of each stage.
            transfer: of each border; None: no time.
            split: how long both parts of a backward take, over a whole one.
        """
        in_parts = [b if stage == 0 else split * b for stage, b in enumerate(backward)]
        weight = [b if stage == 0 else b / 2 for stage, b in enumerate(in_parts)]
        ways = transfer or [0.0] * (len(forward) - 1)
        times = map(tuple, (forward, backward, weight, ways, in_parts))
        return cls(*times)

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Returns those of stages that take 1 for a forward and 2 for a backward."""
        return cls.of([1.0] * stages, [2.0] * stages)

    @property
    def of_actions(self) -> dict[ActionKind, Sequence[float]]:
        """The durations of each stage, by the kind of action."""
        both = self.backward if self.in_parts is None else self.in_parts
        to_input = [b - w for b, w in zip(both, self.weight, strict=True)]
        return {"F": self.forward, "B": self.backward, "I": to_input, "W": self.weight}

    def spans(self, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
        """Returns when each action of `schedule` runs."""
        return spans_for(schedule, self.of_actions, self.transfer)

    def length(self, schedule: Schedule) -> float:
        """Returns when the last action of `schedule` ends."""
        return window(self.spans(schedule))[1]


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: Sequence[float] | None = None,
    weight: Sequence[float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Predicts when each action runs if stage `s` takes `forward[s]` and `backward[s]` for each.

    A message between the stages `s` and `s + 1` takes `transfer[s]`, in which both go on; None: no
    time. Of a backward that is in two parts, the one to the weights takes `weight[s]`; None: half.

    Returns:
        the spans of each device, in the unit of the costs, starting at 0.

    Raises:
        ScheduleError: the actions wait for one another in a circle.
    """
    weights = [0.5 * b for b in backward] if weight is None else weight
    ways = [0.0] * (schedule.stages - 1) if transfer is None else transfer
    return Durations(*map(tuple, (forward, backward, weights, ways))).spans(schedule)


def spans_for(
    schedule: Schedule,
    times: Mapping[ActionKind, Sequence[float]],
    transfer: Sequence[float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Returns when each action runs, for the times of each stage by kind; see `simulate`."""
    return spans_of(schedule, lambda action: times[action.kind][action.stage], transfer)


def spans_of(
    schedule: Schedule,
    seconds: Callable[[Action], float],
    transfer: Sequence[float] | None = None,
    delays: Mapping[Action, float] | None = None,
) -> tuple[tuple[Span, ...], ...]:
    """Returns when each action runs.

    Args:
        schedule: the table.
        seconds: of an action.
        transfer: of each border, in which the stages on both sides go on; None: no time.
        delays: of each action, between the time when all that it needs is there, its device too,
            and its start; None: none.
    """
    ways = transfer or [0.0] * (schedule.stages - 1)
    # what an action needs of the same stage has run before it on the same device
    forward_ends = [[0.0] * schedule.chunks for _ in range(schedule.stages)]
    gradient_ends = [[0.0] * schedule.chunks for _ in range(schedule.stages)]
    spans: list[list[Span]] = [[] for _ in schedule.lanes]
    clock = [0.0] * len(schedule.lanes)
    for device, action in schedule.in_one_order:
        kind, stage, microbatch = action
        start = clock[device]
        if kind == "F" and stage > 0:
            start = max(start, forward_ends[stage - 1][microbatch] + ways[stage - 1])
        elif kind in "BI" and stage + 1 < schedule.stages:
            start = max(start, gradient_ends[stage + 1][microbatch] + ways[stage])
        if delays is not None:
            start += delays[action]
        end = clock[device] = start + seconds(action)
        if kind == "F":
            forward_ends[stage][microbatch] = end
        elif kind in "BI":
            gradient_ends[stage][microbatch] = end
        spans[device].append(Span(action, start, end))
    return tuple(map(tuple, spans))


def predict(schedule: Schedule, measured: Spans) -> Spans:
    """Returns the spans that `schedule` predicts for the mean measured costs of each stage."""
    return spans_for(schedule, mean_costs(measured, schedule.stages))


def mean_costs(measured: Spans, stages: int) -> dict[ActionKind, list[float]]:
    """Returns the mean duration of a micro-batch, by kind of action and stage.

    `B` is that of whole backwards; of a stage without any, the sum of `I` and `W`.

    Args:
        measured: the spans of a step.
        stages: how many.
    """
    kinds: tuple[ActionKind, ...] = ("F", "B", "I", "W")
    times: dict[ActionKind, list[dict[int, float]]]
    times = {kind: [{} for _ in range(stages)] for kind in kinds}
    for lane in measured:
        for (kind, stage, microbatch), start, end in lane:
            times[kind][stage][microbatch] = end - start
    costs = {kind: [_mean(each) for each in times[kind]] for kind in kinds}
    for stage in range(stages):
        if not times["B"][stage]:
            costs["B"][stage] = costs["I"][stage] + costs["W"][stage]
    return costs


def mean_backwards(measured: Spans, stages: int) -> list[float]:
    """Returns the mean duration of each stage's backward of a micro-batch, whole or in two parts.

    See `mean_costs` for the arguments.
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
    """Returns when the first action of all devices begins and when the last one ends."""
    return min(lane[0].start for lane in spans), max(lane[-1].end for lane in spans)


def length(spans: Spans) -> float:
    """Returns the time from the first action of all devices to the last."""
    begin, end = window(spans)
    return end - begin


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Returns the share of the devices' time, first start to last end, in which they are idle."""
    start, end = window(spans)
    busy = sum(span.end - span.start for lane in spans for span in lane)
    return 1.0 - busy / ((end - start) * len(spans))
