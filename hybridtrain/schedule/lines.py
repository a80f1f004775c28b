"""A schedule as text, one line for each device, as a plan file holds it.

F0 F1 F2 I0 W0 F3 ...       a device with one stage: the actions and their micro-batches
F0@0 F1@0 F0@3 B0@3 ...     a device with several: `@` and the stage
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.placement import Placement, stages_at
from hybridtrain.schedule.table import WORDS, Action, Schedule, validate

_ACTION = re.compile(rf"([{''.join(WORDS)}])([0-9]{{1,9}})(?:@([0-9]{{1,9}}))?")


def as_lines(schedule: Schedule) -> list[str]:
    """Returns the lines of `schedule`, which `from_lines` reads."""
    alone = schedule.stages == len(schedule.lanes)
    return [
        " ".join(str(action).partition("@")[0] if alone else str(action) for action in lane)
        for lane in schedule.lanes
    ]


def from_lines(
    name: str,
    lines: Sequence[str],
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    placement: Placement = "loop",
) -> Schedule:
    """Returns the schedule that `lines` describe, after `validate` has accepted it.

    Raises:
        ScheduleError: it is not one of so many devices, stages and micro-batches, or no engine can
            execute it; says what is wrong.
    """
    if len(lines) != devices:
        raise ScheduleError(f"{len(lines)} lines for {devices} devices")
    lanes = []
    for device, line in enumerate(lines):
        own = stages_at(device, devices, stages_per_device, placement)
        lanes.append(tuple(_action(text, device, own) for text in line.split()))
    schedule = Schedule(name, devices * stages_per_device, chunks, tuple(lanes))
    validate(schedule)
    return schedule


def _action(text: str, device: int, own: Sequence[int]) -> Action:
    found = _ACTION.fullmatch(text)
    if found is None:
        raise ScheduleError(
            f"device {device}: {text!r} is not an action such as F0, B3 or I3@{own[-1]}"
        )
    kind, microbatch, stage = found.groups()
    if stage is None and len(own) > 1:
        raise ScheduleError(f"device {device}: {text!r} lacks its stage, such as {text}@{own[-1]}")
    if stage is not None and int(stage) not in own:
        raise ScheduleError(f"device {device}: {text!r} is of another device's stage; it has {own}")
    return Action(kind, int(stage or own[0]), int(microbatch))  # type: ignore[arg-type]
