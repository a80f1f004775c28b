"""The command `report`: writes an HTML report of one or several runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtrain._base.text_table import in_one_line
from hybridtrain.cli.run.run_table import runs_of
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.observe import write_report

_USAGE = (
    "usage: hybridtrain report <run_name or folder>... [output=FILE.html]; a folder can be a run, "
    "a sweep, or contain some"
)


def report(arguments: Sequence[str]) -> int:
    """Writes the report and prints its path; returns the exit code.

    Args:
        arguments: runs, as for the command `results`, and `output=` with the path of the report.

    Raises:
        ConfigError: an argument is not a run, or a run has logged nothing.
    """
    outputs = [word.removeprefix("output=") for word in arguments if word.startswith("output=")]
    named = [word for word in arguments if not word.startswith("output=")]
    if not named or len(outputs) > 1 or any(word.startswith("-") or "=" in word for word in named):
        raise ConfigError(_USAGE)
    logged = [run.path for run in runs_of(named) if (run.path / "metrics.jsonl").is_file()]
    if not logged:
        raise ConfigError(
            f"{' '.join(named)}: no run has logged any metrics yet (no file metrics.jsonl)"
        )
    output = outputs[0] if outputs else None
    try:
        page = write_report(logged, output)
    except DataError:  # a file of the run is damaged, or not a run's file
        if not (runs := _readable(logged)):
            raise
        page = write_report(runs, output)
    print(page.resolve())
    return 0


def _readable(paths: Sequence[Path]) -> list[Path]:
    """Returns the runs that can be in a report; prints which are left out, and why."""
    readable = []
    for path in paths:
        try:
            with TemporaryDirectory() as folder:
                write_report([path], Path(folder) / "page.html")
        except DataError as error:
            print(in_one_line(f"left out {path}: {error}"), file=sys.stderr)
        else:
            readable.append(path)
    return readable
