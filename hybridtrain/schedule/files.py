"""Schedules in files: the CSV form that torch.distributed.pipelining reads too.

A line per device, a cell per action in the device's order: stage, kind, micro-batch. Empty cells,
which show idle time, are skipped.

    0F0,0F1,,,0B0,0B1          stage 0: forwards of micro-batches 0 and 1, then their backwards
    ,1F0,1B0,1F1,1B1           stage 1
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.table import Action, Schedule, validate

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def write_csv(table: Schedule, path: str | Path) -> None:
    """Writes the actions of `table`, a line per device."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(
            [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in lane]
            for lane in table.lanes
        )


def read_csv(path: str | Path) -> Schedule:
    """Returns the schedule of a file, which is named after it.

    Raises:
        ScheduleError: the file cannot be read, a cell is not an action, or an engine cannot execute
            the table (see `validate`).
    """
    try:
        with open(path, newline="") as file:
            lines = [cells for cells in csv.reader(file) if any(map(str.strip, cells))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"{path}: cannot be read as a schedule: {error}") from error
    lanes = []
    for device, cells in enumerate(lines):
        lane = []
        for column, cell in enumerate(map(str.strip, cells), 1):
            if not cell:
                continue
            if (match := _CELL.fullmatch(cell)) is None:
                raise ScheduleError(
                    f"{path}: device {device}, column {column}: {cell!r} is not an action such as "
                    f"0F1 (stage, F, B, I or W, micro-batch)"
                )
            stage, kind, microbatch = match.groups()
            lane.append(Action(kind, int(stage), int(microbatch)))  # type: ignore[arg-type]
        lanes.append(tuple(lane))
    actions = [action for lane in lanes for action in lane]
    if not actions:
        raise ScheduleError(f"{path}: has no actions")
    table = Schedule(
        str(path),
        1 + max(action.stage for action in actions),
        1 + max(action.microbatch for action in actions),
        tuple(lanes),
    )
    validate(table)
    return table
