"""Metrics files for scripts and notebooks: JSON lines, or comma-separated values."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hybridtrain._base.files import atomic_file, check_replaceable, entries_of, open_to_append
from hybridtrain.loop import Run, Tracker

Entry = dict[str, Any]


class MetricsFile(Tracker):
    """Appends one JSON object per line to `path` for every call of `on_log`.

    Each object has "step", "time" (seconds since 1970) and the values by tag. NaN and infinities
    are `null`, because JSON has neither, and pandas reads `null` as NaN. Each line is flushed, so a
    killed run loses at most the line it was writing.

    Raises:
        ConfigError: the file exists and is not a metrics file. Nothing is removed from it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._check()
        self._file: TextIO | None = None
        self._first_step = -1

    def on_start(self, run: Run) -> None:
        """Opens the file: empty at step 0, otherwise keeping its lines up to this step."""
        self._first_step = run.step
        self._check()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if run.step == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            self._keep(lambda entry: entry["step"] <= self._first_step)
        self._open()

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Appends a line."""
        if self._file is None:
            raise RuntimeError(f"call {type(self).__name__}.on_start() first")
        # Writing to an open file that was removed succeeds, and the values would be lost.
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} has been removed")
        step = run.step
        entry = {"step": step, "time": round(time.time(), 3), **values}
        if step == self._first_step:  # a repeated evaluation replaces the previous one
            self._rewrite(lambda old: old["step"] < step or old.keys() != entry.keys())
        self._write(entry)

    def on_end(self, run: Run) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def abandon(self) -> None:
        """Closes the file if possible."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()

    def _check(self) -> None:
        """Checks that the file to replace is a metrics file."""
        check_replaceable(self.path, self._is_head, "a metrics file")

    def _is_head(self, head: bytes) -> bool:
        """Returns whether a file begins like a metrics file."""
        return head.startswith(b'{"step":') or any(self._entries(iter(head.splitlines())))

    def _text(self, entry: Entry) -> str:
        """Formats an entry as a line."""
        finite = {tag: x if x is None or math.isfinite(x) else None for tag, x in entry.items()}
        return json.dumps(finite, allow_nan=False) + "\n"

    def _head(self, entries: list[Entry]) -> str:
        """Returns the header of a file with `entries`."""
        return ""

    def _entries(self, lines: Iterator[bytes]) -> Iterator[Entry]:
        """Parses lines into entries, dropping a line that a killed run left incomplete."""
        return entries_of(lines)

    def _write(self, entry: Entry) -> None:
        assert self._file is not None
        self._file.write(self._text(entry))

    def _open(self) -> None:
        self._file = open_to_append(self.path)

    def _rewrite(self, wanted: Callable[[Entry], bool], more: Iterable[Entry] = ()) -> None:
        """Rewrites the open file with the given entries."""
        assert self._file is not None
        self._file.close()
        self._keep(wanted, more)
        self._open()

    def _keep(self, wanted: Callable[[Entry], bool], more: Iterable[Entry] = ()) -> None:
        """Rewrites the file with the given entries."""
        # A run that is killed here keeps the old file.
        with open(self.path, "rb") as old, atomic_file(self.path) as new:
            whole = (line for line in old if line.endswith(b"\n"))
            entries = [*filter(wanted, self._entries(whole)), *more]
            new.write(self._head(entries).encode())
            new.writelines(self._text(entry).encode() for entry in entries)
            new.flush()
            os.fsync(new.fileno())


class CSVFile(MetricsFile):
    """Appends a comma-separated line to `path` for every call of `on_log`.

    The columns are the keys of `metrics.jsonl` in order of first appearance; missing values are
    empty. When a new tag appears, the file is rewritten with a wider header. NaN and infinities are
    `nan` and `inf`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._columns: list[str] = []

    def on_start(self, run: Run) -> None:
        """Opens the file, see `MetricsFile.on_start`."""
        self._columns = []
        super().on_start(run)

    def _is_head(self, head: bytes) -> bool:
        return head.startswith((b"step,time,", b"step,time\n"))

    def _text(self, entry: Entry) -> str:
        return _comma_separated([entry.get(column) for column in self._columns])

    def _head(self, entries: list[Entry]) -> str:
        self._columns = list(dict.fromkeys(tag for entry in entries for tag in entry))
        return _comma_separated(self._columns) if entries else ""

    def _entries(self, lines: Iterator[bytes]) -> Iterator[Entry]:
        columns: list[str] = []
        for line in lines:
            with suppress(ValueError, csv.Error):
                (cells,) = csv.reader([line.decode()])
                if not columns:
                    columns = cells
                    continue
                pairs = zip(columns, cells, strict=True)
                entry: Entry = {column: float(cell) for column, cell in pairs if cell}
                yield {**entry, "step": int(entry["step"])}

    def _write(self, entry: Entry) -> None:
        if entry.keys() <= set(self._columns):
            super()._write(entry)
        else:
            self._rewrite(lambda old: True, [entry])


def _comma_separated(cells: list[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
