"""A table of runs, read from their directories: the settings that differ, and the results."""

from __future__ import annotations

import csv
import io
import operator
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridtrain._base.files import (
    check_replaceable,
    json_lines,
    read_file,
    read_json,
    reading,
    write_atomically,
)
from hybridtrain._base.text_table import in_one_line, markdown_table, text_table
from hybridtrain._base.yaml_text import load_yaml
from hybridtrain.cli.config.overrides import hydra_quoted, parse_overrides, read_overrides
from hybridtrain.cli.config.places import grants
from hybridtrain.errors import ConfigError, DataError
from hybridtrain.observe import RunSettings, that_differ

SWEEP_FILE = Path("slurm") / "sweep.txt"
"""The file in a submitted sweep's folder with the overrides of each run, one run per line."""

OUTPUT_DIR = "outputs"
"""The folder in which commands look up runs by name."""

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass
class Run:
    """A run, read from its directory.

    Attributes:
        path: the run directory; it may not exist yet for a submitted run.
        name: its name, relative to the folder on the command line.
        overrides: the overrides that started it.
        reached: its state, step and latest evaluation.
        config: the saved config; empty for a run that has not begun.
    """

    path: Path
    name: str
    overrides: list[str]
    reached: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> RunSettings:
        """The settings of the run, for comparison with other runs."""
        return RunSettings(self.config, self.overrides)


def runs_of(arguments: Iterable[str]) -> list[Run]:
    """Returns the runs that the arguments of a command name.

    Raises:
        ConfigError: one of them is neither a run nor a folder with runs.
    """
    by_path: dict[Path, Run] = {}
    for argument in arguments:
        found = (list(_runs(folder)) for folder in _folders(argument))
        runs = next(filter(None, found), [])
        if not runs:
            raise ConfigError(f"{argument} contains no runs (folders with a file config.yaml)")
        by_path |= {run.path: run for run in runs}
    return list(by_path.values())


def lines_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns one table row per run: its name, the settings that differ, its results."""
    differ = that_differ([run.settings for run in runs])
    return [
        {"run": run.name, **{key: run.settings.get(key) for key in differ}, **run.reached}
        for run in runs
    ]


def table_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text table of `lines`, with all their keys as columns."""
    return "\n".join(text_table(_cells(lines), 0))


def write_table(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the table as Markdown or CSV, and reports success or failure on stderr."""
    if path.suffix not in (".csv", ".md"):
        raise ConfigError(f"output={path} must end in .csv or .md")
    file = io.StringIO()
    if path.suffix == ".md":
        print(markdown_table(_cells(lines)), file=file)
    else:
        columns = _columns(lines)
        csv.writer(file).writerow(columns)
        csv.writer(file).writerows([line.get(column) for column in columns] for line in lines)
    begin = (b"run,", b"run\r", b"| run |", b"|run|")
    check_replaceable(path, lambda head: head.startswith(begin), "a table of results")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue())
        print(f"wrote {path}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def best_run(
    runs: Sequence[Run], order: str | None = None, config_dir: str | None = None
) -> str | None:
    """Returns the name, value and command of the best of several runs; None: unknown.

    It compares runs by `order`, such as `-accuracy`, if that is a result; else by
    `checkpoint.best`; else by loss. The metric defines whether larger or smaller is better; `order`
    decides for metrics that do not. The command includes the folder `config_dir`.
    """
    from hybridtrain.cli.run.components import direction_of  # with torch

    config: dict[str, Any] = next((run.config for run in runs if run.config), {})
    options, trainer = (
        group if isinstance(group := config.get(name), Mapping) else {}
        for name in ("checkpoint", "trainer")
    )
    best = options.get("best")
    key = str(best or "loss")
    if order is not None and any(order.lstrip("-") in run.reached for run in runs):
        key = order.lstrip("-")
    compared = [run for run in runs if isinstance(run.reached.get(key), int | float)]
    if len(compared) < 2:
        return None
    mode = options.get("best_mode") if key == best else None
    try:
        mode = direction_of("checkpoint.best_mode", key, mode, trainer.get("metrics"))
    except ConfigError:  # a user-defined metric, or a setting to sort by
        if order is None:
            return None
        mode = "max" if order.startswith("-") else "min"
    wanted = "-" * (mode == "max") + key
    run = sorted_runs(compared, wanted)[0]
    # users paste the command, and a run directory must never grant permissions
    left_out = [o for o in run.overrides if grants(o)]
    words = [
        o
        for o in run.overrides
        if not o.startswith(("run_name=", "output_dir=", "monitor.group=")) and o not in left_out
    ]
    words.append(f"run_name={hydra_quoted(str(run.config.get('run_name', run.name)))}")
    output_dir = run.config.get("output_dir", OUTPUT_DIR)
    place = Path(str(output_dir)) / str(run.config.get("run_name", run.name))
    if output_dir != OUTPUT_DIR and place.resolve() == run.path.resolve():
        words.append(f"output_dir={hydra_quoted(str(output_dir))}")
    if config_dir is not None:
        words += ["--config-dir", config_dir]
    said = f"best by {key}: {run.name}, {_text(run.reached[key])}"
    keys = ", ".join(o.partition("=")[0] for o in left_out)
    note = f"\n  (without {keys}: add it yourself if you trust the run)" if keys else ""
    return in_one_line(said) + f"\n  hybridtrain {in_one_line(shlex.join(words))}{note}"


def runs_where(runs: Sequence[Run], column: str, sign: str, value: str) -> list[Run]:
    """Returns the runs where a column compares with `value` as `sign` says.

    Raises:
        ConfigError: no run has the column.
    """
    column = _known_column(runs, column)
    wanted = _number(yaml.safe_load(value))

    def holds(run: Run) -> bool:
        value = _number(_value(run, column))
        if sign in ("=", "!="):
            return bool((value == wanted) == (sign == "="))
        both = isinstance(value, float) and isinstance(wanted, float)
        return both and bool(_COMPARISONS[sign](value, wanted))

    return [run for run in runs if holds(run)]


def read_sweep(path: Path) -> list[list[str]]:
    """Returns the overrides in each line of a sweep's file; none if there is no file."""
    if not path.is_file():
        return []
    return [shlex.split(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _folders(argument: str) -> list[Path]:
    """Returns the folders that an argument may refer to, such as a data folder and a run."""
    places = (Path(argument), Path(OUTPUT_DIR) / argument)
    # resolved, because "." has neither a name nor a parent
    if folders := [folder.resolve() for folder in places if folder.is_dir()]:
        return folders
    raise ConfigError(f"there is no folder {argument} and no run {OUTPUT_DIR}/{argument}")


def _runs(folder: Path) -> Iterator[Run]:
    """Yields the runs of a folder: the folder itself, runs in it, and runs of its sweeps."""
    if (folder / "config.yaml").is_file():
        yield _run(folder, folder.name)
        return
    names: dict[Path, str] = {}
    for path in sorted([*folder.glob("*/config.yaml"), *folder.glob("*/*/config.yaml")]):
        if not (path.parents[1] / "config.yaml").is_file():  # nothing within a run
            names[path.parent] = str(path.parent.relative_to(folder))
    for overrides in read_sweep(folder / SWEEP_FILE):
        run_names = [o for o in parse_overrides(overrides) if o.key_or_group == "run_name"]
        if not run_names:
            line = " ".join(overrides)
            raise ConfigError(f"a line of {SWEEP_FILE} has no run_name=: {line}")
        path = folder.parent / str(run_names[-1].value())
        if path not in names:
            yield Run(path, path.name, overrides, {"state": "not begun", "step": 0})
    for path, name in names.items():
        yield _run(path, name)


def _run(path: Path, name: str) -> Run:
    """Reads a run. If a file is damaged, its table row names it; other runs still appear."""
    try:
        return Run(path, name, read_overrides(path), _reached(path), _config(path / "config.yaml"))
    except DataError as error:
        why = str(error).replace(f"{path}/", "")
        why = why if len(why) < 100 else f"{why[:97]}..."
        return Run(path, name, [], {"state": why, "step": 0})


def _config(path: Path) -> dict[str, Any]:
    with reading(path):
        config = load_yaml(read_file(path).decode()) or {}
        if not isinstance(config, dict):
            raise TypeError("not a mapping")
    return config


def _reached(run: Path) -> dict[str, Any]:
    """Returns a run's state, step and latest evaluation."""
    lines = list(json_lines(run / "metrics.jsonl"))
    step = max((line["step"] for line in lines), default=0)
    summary = read_json(run / "summary.json")
    with reading(run / "summary.json"):
        if summary is not None and summary["steps"] >= step:
            return {"state": "done", "step": int(summary["steps"]), **(summary["eval"] or {})}
    values = {
        key.removeprefix("eval/"): value
        for line in lines
        for key, value in line.items()
        if key.startswith("eval/")
    }
    return {"state": "not done", "step": step, **values}


def _value(run: Run, column: str) -> Any:
    """Returns a run's value in a column, or of a setting without a column."""
    cells = {"run": run.name, **run.reached}
    return cells[column] if column in cells else run.settings.get(column)


def _known_column(runs: Sequence[Run], column: str) -> str:
    """Returns the name of a column.

    Raises:
        ConfigError: no run has it.
    """
    if all(_value(run, column) is None for run in runs):
        raise ConfigError(
            f"no run has {column}: sort and select by a column of the table ({_names(runs)}) or a "
            f"key such as optim.lr"
        )
    return column


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(_columns(lines_of(runs)))


def sorted_runs(runs: Sequence[Run], order: str) -> list[Run]:
    """Returns the runs sorted by a column (`-column`: largest first), runs without it last.

    Raises:
        ConfigError: no run has the column.
    """
    column = _known_column(runs, order.lstrip("-"))

    def of_type(value: Any) -> tuple[bool, float, str]:
        number = _number(value) if isinstance(value, int | float) else None
        if isinstance(number, float) and number == number:
            return False, number, str(value)
        return True, 0.0, str(value)

    having = [run for run in runs if _value(run, column) is not None]
    having.sort(key=lambda run: of_type(_value(run, column)), reverse=order.startswith("-"))
    return [*having, *(run for run in runs if _value(run, column) is None)]


def _number(value: Any) -> Any:
    """Returns numbers as floats, also `1e-3`, which YAML reads as a string; others as strings."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)


def _cells(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    columns = _columns(lines)
    return [columns, *([_text(line.get(column)) for column in columns] for line in lines)]


def _columns(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line))


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
