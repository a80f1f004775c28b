"""The metrics of a run as a file of JSON lines, for scripts and notebooks."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from hybridtrain.monitor.timeline import Lanes


class MetricsFile:
    """Appends one JSON object a line to `path` for every call of `scalars`.

    Each has "step", "time" (seconds since 1970) and the values by tag. NaN and the infinities
    are `null`: JSON has none of them, and a column of numbers and nulls is still read as numbers
    (pandas makes NaN of it). Each line is handed to the system at once, so a killed run loses
    none but perhaps the one it was writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`; a fresh start (`first_step` 0) begins an empty file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_step == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            _keep_until(self.path, first_step)
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def step(self, step: int, samples: int) -> None:
        """Do nothing: the file has the logged steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`."""
        if self._file is None:
            raise RuntimeError("MetricsFile.start() has to be called first")
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def timeline(self, step: int, predicted: Lanes, measured: Lanes) -> None:
        """Do nothing: a timeline is no number."""

    def close(self) -> None:
        """See `Monitor.close`."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _keep_until(path: Path, last_step: int) -> None:
    """Drop the lines of steps after `last_step` and those that are torn."""
    kept = path.with_name(f".{path.name}.tmp")
    with open(path, "rb") as old, open(kept, "wb") as new:
        new.writelines(line for line in old if _step_of(line) <= last_step)
        new.flush()
        os.fsync(new.fileno())
    # In one step: a run killed here still has the whole file.
    os.replace(kept, path)


def _step_of(line: bytes) -> float:
    """The step of a whole line; infinity for one that a killed run did not finish."""
    try:
        entry: Any = json.loads(line) if line.endswith(b"\n") else None
        return float(entry["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
