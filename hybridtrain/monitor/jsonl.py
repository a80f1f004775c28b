"""The metrics of a run as a file of JSON lines, for scripts and notebooks."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hybridtrain.files import atomic_file
from hybridtrain.monitor.base import Monitor


class MetricsFile(Monitor):
    """Appends a line with one JSON object to `path` for every call of `scalars`.

    Each has "step", "time" (seconds since 1970) and the values by tag. NaN and the infinities are
    `null`: JSON has neither, and pandas reads `null` as NaN. Each line is written at once, so a
    killed run loses at most the line it was writing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._first_step = -1

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`; a fresh start (`first_step` 0) begins an empty file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first_step == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            _keep(self.path, lambda line: _step_of(line) <= first_step)
        self._first_step = first_step
        self._open()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`."""
        if self._file is None:
            raise RuntimeError("call MetricsFile.start() first")
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} has been removed")
        if step == self._first_step:  # an evaluation that is done again replaces the one before
            self._file.close()
            _keep(self.path, lambda line: _step_of(line) < step or not _has_tags(line, values))
            self._open()
        finite = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        line = {"step": step, "time": round(time.time(), 3), **finite}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """See `Monitor.close`."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def abandon(self) -> None:
        """See `Monitor.abandon`."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()

    def _open(self) -> None:
        self._file = open(self.path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115


def _keep(path: Path, wanted: Callable[[bytes], bool]) -> None:
    """Drops all other lines."""
    with open(path, "rb") as old, atomic_file(path) as new:
        new.writelines(filter(wanted, old))
        new.flush()
        os.fsync(new.fileno())


def _has_tags(line: bytes, values: Mapping[str, float]) -> bool:
    return bool(json.loads(line).keys() - {"step", "time"} == values.keys())


def _step_of(line: bytes) -> float:
    """Returns the step of a line; infinity for one that a killed run did not finish."""
    try:
        entry: Any = json.loads(line) if line.endswith(b"\n") else None
        return float(entry["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
