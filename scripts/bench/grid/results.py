"""Outcomes of cells, and the JSON-lines file that keeps those which were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.grid.cells import Cell

# Reviews of the training split: an epoch.
EPOCH = 25_000

MEMORY, TIMEOUT, ERROR = "out of memory", "timeout", "error"


@dataclass(frozen=True)
class Outcome:
    """The time of a cell's step, or the reason why there is none.

    Attributes:
        cell: the configuration.
        step_ms: an optimizer step.
        failure: `out of memory`, `timeout` or `error` of a cell that was tried, or that is
            predicted not to fit; empty for one that is impossible.
        reason: why there is no time.
        facts: what else is known about it.
    """

    cell: Cell
    step_ms: float | None = None
    failure: str = ""
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second, over all devices."""
        return None if self.step_ms is None else self.cell.samples / self.step_ms * 1e3

    @property
    def epoch_s(self) -> float | None:
        """Seconds of an epoch."""
        return None if self.samples_per_s is None else EPOCH / self.samples_per_s


def rounded(value: float) -> str:
    """Returns a whole number, or three digits of one below 100."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class Results:
    """The outcomes of tasks, each appended to a file when it is there.

    A task is what a measuring process is told: a cell, and all that its time depends on. Of several
    lines of one task the last counts. A line that was cut short by a crash is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Outcome] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            task, outcome = record["task"], record["outcome"]
            cell = Cell(**outcome.pop("cell"))
            self._known[_key(task)] = Outcome(cell, **outcome)

    def get(self, task: Mapping[str, Any]) -> Outcome | None:
        """Returns the outcome of `task`, or None if it has not been run."""
        return self._known.get(_key(task))

    def add(self, task: Mapping[str, Any], outcome: Outcome) -> None:
        """Appends an outcome; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"task": task, "outcome": asdict(outcome)})
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * self._torn + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._torn = False
        self._known[_key(task)] = outcome


def _key(task: Mapping[str, Any]) -> str:
    return json.dumps(task, sort_keys=True)
