"""The command `report`: the page of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrain.app.results import runs_of
from hybridtrain.errors import ConfigError
from hybridtrain.report import write_report

_USAGE = (
    "usage: hybridtrain report <run_name or folder>... [output=FILE.html]; a folder is that of a "
    "run, of a sweep, or one with these in it"
)


def report(arguments: Sequence[str]) -> int:
    """Writes the page and prints its path; returns the exit code.

    Args:
        arguments: runs as of the command `results`, and `output=` with the path of the page.

    Raises:
        ConfigError: one of them is none of that, or has logged nothing.
    """
    outputs = [word.removeprefix("output=") for word in arguments if word.startswith("output=")]
    named = [word for word in arguments if not word.startswith("output=")]
    if not named or len(outputs) > 1 or any(word.startswith("-") or "=" in word for word in named):
        raise ConfigError(_USAGE)
    runs = [run.path for run in runs_of(named) if (run.path / "metrics.jsonl").is_file()]
    if not runs:
        raise ConfigError(f"{' '.join(named)}: no run has logged anything yet")
    print(write_report(runs, outputs[0] if outputs else None).resolve())
    return 0
