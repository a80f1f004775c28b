"""The waits of a measured step's devices, and the chain of actions that it is as long as.

device 0   |F0|F1|......|B0|B1|      from the end of one action to the start of the next:
device 1   ...|F0|.|B0|....          stage    until the other stage has what it needs
                                     message  while that is on its way
                                     host     all is there, and nothing has begun it
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Literal, NamedTuple

from hybridtrain.schedule.simulation import window
from hybridtrain.schedule.table import Action, Schedule, Spans, needs_of

WaitFor = Literal["stage", "message", "host"]


class Wait(NamedTuple):
    """A time in which a device runs no action; the unit is that of the spans.

    Attributes:
        device: its number in the pipeline.
        reason: what it waits for.
        start: of the time.
        end: of the time.
    """

    device: int
    reason: WaitFor
    start: float
    end: float


class _Start(NamedTuple):
    """The start of an action of a measured step, and all that it had to wait for.

    Attributes:
        device: that runs it.
        before: the action that the device ran before; None: it is the first one.
        needed: the actions whose values it needs.
        free: when the device was free.
        ready: when all that it needs was there, but for the way.
        start: when it began.
        crosses: a value comes from another device.
    """

    device: int
    before: Action | None
    needed: list[Action]
    free: float
    ready: float
    start: float
    crosses: bool


def schedule_of(spans: Spans) -> Schedule:
    """Returns the table that was run."""
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
    """Returns how long each action began after all that it needs was there, and the host's part.

    An action that needs nothing of another device is late because of the host alone; one that does
    is given as much of the host's time as those usually take, and the rest is the message's.
    """
    starts = _starts(schedule, measured)
    delays = {action: max(0.0, each.start - each.ready) for action, each in starts.items()}
    alone = [delay for action, delay in delays.items() if not starts[action].crosses]
    usual = median(alone or [0.0])
    between = {a: min(delay, usual) if starts[a].crosses else delay for a, delay in delays.items()}
    return delays, between


def waits(measured: Spans) -> list[Wait]:
    """Returns when the devices waited, between the first action of all and the last."""
    schedule = schedule_of(measured)
    between = late_starts(schedule, measured)[1]
    found = []
    for action, each in _starts(schedule, measured).items():
        on_its_way = each.start - between[action]
        reasons: dict[WaitFor, float] = {"stage": each.ready, "message": on_its_way}
        begin = each.free
        for reason, end in (*reasons.items(), ("host", each.start)):
            if end > begin:
                found.append(Wait(each.device, reason, begin, end))
                begin = end
    last = window(measured)[1]
    found += [
        Wait(device, "stage", lane[-1].end, last)
        for device, lane in enumerate(measured)
        if lane[-1].end < last
    ]
    return found


def critical_path(measured: Spans) -> list[Action]:
    """Returns the actions that the step is as long as, in order.

    Each began when the one before it had ended, on its device or on the one that it needs a value
    of: were one of them faster, the step would be shorter.
    """
    starts = _starts(schedule_of(measured), measured)
    ends = {span.action: span.end for lane in measured for span in lane}
    path = [max(ends, key=ends.__getitem__)]
    while True:
        start = starts[path[-1]]
        before = [*start.needed, *([] if start.before is None else [start.before])]
        if not before:
            return path[::-1]
        path.append(max(before, key=ends.__getitem__))


def _starts(schedule: Schedule, measured: Spans) -> dict[Action, _Start]:
    """Returns what each action had to wait for."""
    ends = {span.action: span.end for lane in measured for span in lane}
    made = {
        **{("F", a.stage, a.microbatch): a for a in ends if a.kind == "F"},
        **{("I", a.stage, a.microbatch): a for a in ends if a.kind in "BI"},
    }
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
