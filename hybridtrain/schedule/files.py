"""Schedules in files: two formats with one reader.

`.csv`, as in torch.distributed.pipelining: one line per device, with one cell per action in
execution order: stage, kind, micro-batch. Empty cells show idle time and are skipped. Files of
spreadsheets may begin with a byte order mark, and separate cells by semicolons or tabs.

    0F0,0F1,,,0B0,0B1          stage 0: forwards of micro-batches 0 and 1, then their backwards
    ,1F0,1B0,1F1,1B1           stage 1

`.yaml`, a plan: the key `actions` has one string per device, with the actions as shown in messages
and pictures: kind, micro-batch, stage.

    actions:
    - F0@0 F1@0 B0@0 B1@0
    - F0@1 B0@1 F1@1 B1@1
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.table import Action, Schedule, validate

_CELL = re.compile(r"(?P<stage>\d+)(?P<kind>[FBIW])(?P<microbatch>\d+)")
_WORD = re.compile(r"(?P<kind>[FBIW])(?P<microbatch>\d+)@(?P<stage>\d+)")
_OF_A_PLAN = (".yaml", ".yml")


def is_file(name: str) -> bool:
    """Returns whether a schedule name is a file: it ends in `.csv` or `.yaml`."""
    return name.endswith((".csv", *_OF_A_PLAN))


def write_csv(table: Schedule, path: str | Path) -> None:
    """Writes the actions of `table`, one line per device."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(
            [f"{stage}{kind}{microbatch}" for kind, stage, microbatch in lane]
            for lane in table.lanes
        )


def actions_as_text(table: Schedule) -> list[str]:
    """Returns one string per device, the format of the key `actions` of a plan."""
    return [" ".join(map(str, lane)) for lane in table.lanes]


def read_schedule(path: str | Path) -> Schedule:
    """Reads a schedule from a file; its name is the path.

    Args:
        path: a `.csv` file, or a plan (`.yaml`).

    Raises:
        ScheduleError: the file cannot be read, an entry is not an action, or an engine cannot
            execute the table (see `validate`).
    """
    is_plan = str(path).endswith(_OF_A_PLAN)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read()
        # `safe_load`, because a plan may come from someone else.
        lines = _lines_of_plan(yaml.safe_load(text), path) if is_plan else _lines_of_csv(text)
    except (OSError, UnicodeDecodeError, csv.Error, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ScheduleError(f"{path}: cannot read a schedule from this file: {reason}") from error
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
        raise ScheduleError(f"{path}: contains no actions")
    table = Schedule(
        str(path),
        1 + max(action.stage for action in actions),
        1 + max(action.microbatch for action in actions),
        tuple(lanes),
    )
    # A file is the user's text: an engine would hang on a table that deadlocks.
    validate(table)
    return table


def _lines_of_csv(text: str) -> list[list[str]]:
    # actions contain none of these separators
    delimiter = next((mark for mark in ";\t" if mark in text and "," not in text), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return [cells for cells in lines if any(map(str.strip, cells))]


def _lines_of_plan(content: object, path: str | Path) -> list[list[str]]:
    """Returns the actions of each device as words.

    Raises:
        ScheduleError: the file does not contain a plan with actions.
    """
    texts = content.get("actions") if isinstance(content, Mapping) else None
    if not texts:
        raise ScheduleError(
            f"{path}: missing the key `actions`, the execution order of each device; `hybridtrain "
            "plan` writes it"
        )
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ScheduleError(f"{path}: actions={texts!r} must be a list of strings, one per device")
    return [text.split() for text in texts]
