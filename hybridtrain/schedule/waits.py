"""The waits of the devices in a measured step, and its critical path.

device 0   |F0|F1|......|B0|B1|      from the end of one action to the start of the next:
device 1   ...|F0|.|B0|....          stage    the other stage has not produced its input
                                     message  the input is in transit
                                     host     the input is there, but the host has not begun it
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

from hybridtrain.schedule.simulation import window
from hybridtrain.schedule.table import Action, Schedule, Spans, needs_of

WaitFor = Literal["stage", "message", "host"]


class Wait(NamedTuple):
    """A time in which a device runs no action, in the unit of the spans.

    Attributes:
        device: its index in the pipeline.
        reason: the cause of the wait.
        start: the start of the wait.
        end: the end of the wait.
    """

    device: int
    reason: WaitFor
    start: float
    end: float


class _Start(NamedTuple):
    """The start of an action in a measured step, with everything it had to wait for.

    Attributes:
        device: the device that runs it.
        before: the previous action of the device; None for the first.
        needed: the actions that produce its inputs.
        free: the time when the device was free.
        ready: the time when all its inputs were produced, before their transfer.
        start: the time when it began.
        crosses: whether an input comes from another device.
    """

    device: int
    before: Action | None
    needed: list[Action]
    free: float
    ready: float
    start: float
    crosses: bool


def schedule_of(spans: Spans) -> Schedule:
    """Returns the executed schedule."""
    actions = [span.action for lane in spans for span in lane]
    return Schedule(
        "recorded",
        1 + max(action.stage for action in actions),
        1 + max(action.microbatch for action in actions),
        tuple(tuple(span.action for span in lane) for lane in spans),
    )


def late_starts(
    schedule: Schedule, measured: Spans
) -> tuple[Mapping[Action, float], Mapping[Action, float]]:
    """Returns each action's delay after its inputs were produced, and the host's part of it.

    An action without inputs from other devices is delayed by the host alone. For the others, the
    host's part is the typical host delay, and the rest is due to the message.
    """
    starts = _starts(schedule, measured)
    delays = {action: max(0.0, start.start - start.ready) for action, start in starts.items()}
    # Their inputs are on the same device, so nothing but the host can delay them.
    alone = [delay for action, delay in delays.items() if not starts[action].crosses]
    # The median, because a garbage collection or a log line delays single actions.
    usual = median(alone or [0.0])
    between = {a: min(delay, usual) if starts[a].crosses else delay for a, delay in delays.items()}
    return delays, between


def waits(measured: Spans) -> list[Wait]:
    """Returns the waits of all devices between the step's first and last action."""
    schedule = schedule_of(measured)
    between = late_starts(schedule, measured)[1]
    intervals = []
    for action, start in _starts(schedule, measured).items():
        # In order: first nothing to take, then a message, and last the host's own delay.
        on_its_way = start.start - between[action]
        reasons: dict[WaitFor, float] = {"stage": start.ready, "message": on_its_way}
        begin = start.free
        for reason, end in (*reasons.items(), ("host", start.start)):
            if end > begin:
                intervals.append(Wait(start.device, reason, begin, end))
                begin = end
    last = window(measured)[1]
    intervals += [
        Wait(device, "stage", lane[-1].end, last)
        for device, lane in enumerate(measured)
        if lane[-1].end < last
    ]
    return intervals


def critical_path(measured: Spans) -> list[Action]:
    """Returns the actions on the critical path of the step, in order.

    Each action began when the previous one had ended, on the same device or on the device that
    produced its input. If one of them were faster, the step would be shorter.
    """
    starts = _starts(schedule_of(measured), measured)
    ends = {span.action: span.end for lane in measured for span in lane}
    path = [max(ends, key=ends.__getitem__)]
    while True:
        start = starts[path[-1]]
        before = [*start.needed, *([] if start.before is None else [start.before])]
        if not before:
            return path[::-1]
        # The latest of what it had to wait for is what it did wait for.
        path.append(max(before, key=ends.__getitem__))


def _starts(schedule: Schedule, measured: Spans) -> dict[Action, _Start]:
    """Returns, for each action, everything it had to wait for."""
    ends = {span.action: span.end for lane in measured for span in lane}
    made = {
        **{("F", a.stage, a.microbatch): a for a in ends if a.kind == "F"},
        **{("I", a.stage, a.microbatch): a for a in ends if a.kind in "BI"},
    }
    # A device is free from the beginning of the step, not from its first action.
    first = window(measured)[0]
    starts = {}
    for device, lane in enumerate(measured):
        free, before = first, None
        for action, start, end in lane:
            needed = [made[need] for need in needs_of(action, schedule.stages)]
            ready = max([free, *(ends[other] for other in needed)])
            crosses = any(schedule.lane_of[other.stage] != device for other in needed)
            starts[action] = _Start(device, before, needed, free, ready, start, crosses)
            free, before = end, action
    return starts
