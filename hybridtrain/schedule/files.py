"""Schedules in files, in two forms with one reader.

`.csv`, which torch.distributed.pipelining reads too: a line per device, a cell per action in the
device's order: stage, kind, micro-batch. Empty cells, which show idle time, are skipped.

    0F0,0F1,,,0B0,0B1          stage 0: forwards of micro-batches 0 and 1, then their backwards
    ,1F0,1B0,1F1,1B1           stage 1

`.yaml`, a plan: its key `actions` has a text per device, with the actions as messages and pictures
name them: kind, micro-batch, stage.

    actions:
    - F0@0 F1@0 B0@0 B1@0
    - F0@1 B0@1 F1@1 B1@1
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.table import Action, Schedule, validate

_CELL = re.compile(r"(?P<stage>\d+)(?P<kind>[FBIW])(?P<microbatch>\d+)")
_WORD = re.compile(r"(?P<kind>[FBIW])(?P<microbatch>\d+)@(?P<stage>\d+)")
_OF_A_PLAN = (".yaml", ".yml")


def is_file(name: str) -> bool:
    """Returns whether a schedule is named by its file: the name ends in `.csv` or `.yaml`."""
    return name.endswith((".csv", *_OF_A_PLAN))


def write_csv(table: Schedule, path: str | Path) -> None:
    """Writes the actions of `table`, a line per device."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(
            [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in lane]
            for lane in table.lanes
        )


def actions_as_text(table: Schedule) -> list[str]:
    """Returns a text per device: the key `actions` of a plan."""
    return [" ".join(map(str, lane)) for lane in table.lanes]


def read_schedule(path: str | Path) -> Schedule:
    """Returns the schedule of a file, which is named after it.

    Args:
        path: a `.csv` file, or a plan (`.yaml`).

    Raises:
        ScheduleError: the file cannot be read, something in it is not an action, or an engine
            cannot execute the table (see `validate`).
    """
    is_plan = str(path).endswith(_OF_A_PLAN)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            lines = _lines_of_plan(yaml.safe_load(file), path) if is_plan else _lines_of_csv(file)
    except (OSError, UnicodeDecodeError, csv.Error, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ScheduleError(f"{path}: cannot be read as a schedule: {reason}") from error
    form, unit = (_WORD, "action") if is_plan else (_CELL, "column")
    example = "F1@0 (micro-batch 1, stage 0)" if is_plan else "0F1 (stage 0, micro-batch 1)"
    lanes = []
    for device, cells in enumerate(lines):
        lane = []
        for column, cell in enumerate(map(str.strip, cells), 1):
            if not cell:
                continue
            if (match := form.fullmatch(cell)) is None:
                raise ScheduleError(
                    f"{path}: device {device}, {unit} {column}: {cell!r} is not an action such as "
                    f"{example}, with F, B, I or W"
                )
            stage, microbatch = int(match["stage"]), int(match["microbatch"])
            lane.append(Action(match["kind"], stage, microbatch))  # type: ignore[arg-type]
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


def _lines_of_csv(file: Iterable[str]) -> list[list[str]]:
    return [cells for cells in csv.reader(file) if any(map(str.strip, cells))]


def _lines_of_plan(content: object, path: str | Path) -> list[list[str]]:
    """Returns the words of each device.

    Raises:
        ScheduleError: the content of the file is not a plan with actions.
    """
    texts = content.get("actions") if isinstance(content, Mapping) else None
    if not texts:
        raise ScheduleError(
            f"{path}: has no key `actions` with the order of each device; `hybridtrain plan` "
            f"writes one"
        )
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ScheduleError(f"{path}: actions={texts!r} must be a list of texts, one per device")
    return [text.split() for text in texts]
