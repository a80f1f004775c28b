"""The command `results`: prints a table of runs, with the settings that differ and their results.

hybridtrain results digits-lr sort=-accuracy trainer.epochs=2 loss<0.5 output=results.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hybridtrain.cli.run.run_table import (
    OUTPUT_DIR,
    Run,
    best_run,
    lines_of,
    runs_of,
    runs_where,
    sorted_runs,
    table_of,
    write_table,
)
from hybridtrain.errors import ConfigError

_USAGE = (
    "usage: hybridtrain results <run_name or folder>... [sort=COLUMN or sort=-COLUMN] "
    "[COLUMN=value, 'COLUMN<value' or 'COLUMN>value']... [output=FILE.csv or FILE.md]; a folder "
    "can be a run, a sweep, or contain some"
)


def results(arguments: Sequence[str]) -> int:
    """Prints a table of runs to stdout, and the best run to stderr; returns the exit code.

    Args:
        arguments: folders (runs, sweeps, or folders that contain some) and names of runs in
            `outputs`; a column to sort by, conditions to select runs, and a file to write.

    Raises:
        ConfigError: an argument is invalid.
    """
    named = [word for word in arguments if not re.search("[=<>]", word) or _is_folder(word)]
    words = [word for word in arguments if word not in named]
    orders = [word.removeprefix("sort=") for word in words if word.startswith("sort=")]
    outputs = [Path(word.removeprefix("output=")) for word in words if word.startswith("output=")]
    few = len(orders) < 2 and len(outputs) < 2
    if not named or not few or any(word.startswith("-") for word in named):
        raise ConfigError(_USAGE)
    runs = runs_of(named)
    for word in words:
        if not word.startswith(("sort=", "output=")):
            runs = _matching(runs, word)
    runs = sorted_runs(runs, orders[0]) if orders else runs
    lines = lines_of(runs)
    print(table_of(lines), flush=True)
    if best := best_run(runs, orders[0] if orders else None):
        print(best, file=sys.stderr, flush=True)
    if outputs:
        write_table(lines, outputs[0])
    return 0


def _is_folder(argument: str) -> bool:
    return Path(argument).is_dir() or (Path(OUTPUT_DIR) / argument).is_dir()


def _matching(runs: Sequence[Run], condition: str) -> list[Run]:
    """Returns the runs that satisfy a condition such as `optim.lr=0.1` or `loss<0.5`."""
    match = re.fullmatch(r"([\w./@-]+?)(!=|<=|>=|=|<|>)(.*)", condition)
    if match is None:
        raise ConfigError(_USAGE)
    return runs_where(runs, *match.groups())
