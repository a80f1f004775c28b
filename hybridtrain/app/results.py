"""Tables of the results of several runs: at the end of a sweep, and of the command `results`."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.app.compose import given_keys, parse_overrides
from hybridtrain.errors import ConfigError
from hybridtrain.files import write_atomically
from hybridtrain.text_table import text_table

SWEEP_FILE = Path("slurm") / "sweep.txt"
"""In the folder of a sweep that was submitted: the overrides of each run, one run a line."""

_OUTPUT_DIR = "outputs"


def results(arguments: Sequence[str]) -> int:
    """Prints a table of runs to stdout; returns the exit code.

    Args:
        arguments: folders of runs, of a sweep that was submitted, or with several runs in them; or
            the names of runs in `outputs`.

    Raises:
        ConfigError: one of them is none of that.
    """
    if not arguments or any(argument.startswith("-") for argument in arguments):
        raise ConfigError(
            "usage: hybridtrain results <run_name or folder>...; a folder is that of a run, of a "
            "sweep that was submitted, or one with runs in it"
        )
    by_run: dict[Path, dict[str, Any]] = {}
    for argument in arguments:
        found = dict(_runs(_folder(argument)))
        if not found:
            raise ConfigError(f"there are no runs in {argument}")
        by_run |= found
    listed = list(by_run.values())
    print(table(listed), flush=True)
    if len(arguments) == 1 and (_folder(arguments[0]) / SWEEP_FILE).is_file():
        write_csv(listed, _folder(arguments[0]))
    return 0


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a line for each of `results`, and the keys of all as columns."""
    columns = _columns(results)
    lines = [[_text(result.get(column)) for column in columns] for result in results]
    return "\n".join(text_table([columns, *lines], 0))


def write_csv(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the table to `<path>.csv` and says so, or why not, on stderr."""
    columns = _columns(results)
    file = io.StringIO()
    csv.writer(file).writerows(  # words: ok
        [columns, *([result.get(column) for column in columns] for result in results)]
    )
    path = path.with_name(f"{path.name}.csv")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue())
        print(f"wrote {path}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def read_sweep(path: Path) -> list[list[str]]:
    """Returns the overrides of each line of a sweep's file; none if there is no file."""
    if not path.is_file():
        return []
    return [shlex.split(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _folder(argument: str) -> Path:
    """Returns the folder that an argument of the command stands for."""
    for folder in (Path(argument), Path(_OUTPUT_DIR) / argument):
        if folder.is_dir():
            return folder.resolve()  # "." has neither a name nor a parent
    raise ConfigError(f"there is neither a folder {argument} nor a run {_OUTPUT_DIR}/{argument}")


def _runs(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the runs of `folder` with their lines of the table."""
    combinations = read_sweep(folder / SWEEP_FILE)
    if combinations:
        yield from _runs_of_sweep(folder, combinations)
    elif (folder / "config.yaml").is_file():
        yield folder, {"run": folder.name, **_result(folder)}
    else:
        for run in sorted(folder.iterdir()):
            if (run / "config.yaml").is_file():
                yield run, {"run": run.name, **_result(run)}


def _runs_of_sweep(
    folder: Path, combinations: Sequence[Sequence[str]]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    by_name = {_run_name(overrides): overrides for overrides in combinations}
    all_values = [_values(overrides) for overrides in by_name.values()]
    swept = [
        key
        for key in dict.fromkeys(key for values in all_values for key in values)
        if key != "run_name" and len({values.get(key) for values in all_values}) > 1
    ]
    for name, values in zip(by_name, all_values, strict=True):
        run = folder.parent / name
        own = {key: values[key] for key in swept if key in values}
        yield run, {"run": name, **own, **_result(run)}


def _run_name(overrides: Sequence[str]) -> str:
    names = [o for o in parse_overrides(overrides) if o.key_or_group == "run_name"]
    if not names:
        raise ConfigError(f"a line of {SWEEP_FILE} has no run_name=: {' '.join(overrides)}")
    return str(names[-1].value())


def _values(overrides: Sequence[str]) -> dict[str, str]:
    return {
        key: override.partition("=")[2]
        for key, override in zip(given_keys(overrides), overrides, strict=True)
    }


def _result(run: Path) -> dict[str, Any]:
    """Returns what a run has come to: its state, its step and its latest evaluation."""
    lines = list(_json_lines(run / "metrics.jsonl"))
    step = max((int(line.get("step", 0)) for line in lines), default=0)
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {}
    if summary and summary["steps"] >= step:
        return {"state": "done", "step": summary["steps"], **(summary["eval"] or {})}
    values = {
        key.removeprefix("eval/"): value
        for line in lines
        for key, value in line.items()
        if key.startswith("eval/")
    }
    state = "not done" if (run / "config.yaml").is_file() else "not begun"
    return {"state": state, "step": step, **values}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of a file that may be written at this moment, or not be there."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the last line, half written
            continue


def _columns(results: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for result in results for key in result))


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
