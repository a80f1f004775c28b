"""Several runs: the sweep of `--multirun`, one after the other, and the table of their results.

The command `results` prints the same table of runs that are there already.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from hybridtrain.app.compose import compose_settings, given_keys, parse_overrides, sweep_choices
from hybridtrain.app.config import Config
from hybridtrain.app.error_report import report_and_go_on
from hybridtrain.app.resolve import settle
from hybridtrain.errors import ConfigError, Interrupted
from hybridtrain.files import write_atomically
from hybridtrain.launch import current, detect
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
    listed = list(runs_of(arguments).values())
    print(table(listed), flush=True)
    if len(arguments) == 1 and (_folder(arguments[0]) / SWEEP_FILE).is_file():
        write_csv(listed, _folder(arguments[0]))
    return 0


def runs_of(arguments: Sequence[str]) -> dict[Path, dict[str, Any]]:
    """Returns the directories of runs that the arguments of a command name, each with its line.

    Raises:
        ConfigError: one of them is neither a run nor a folder with runs.
    """
    by_run: dict[Path, dict[str, Any]] = {}
    for argument in arguments:
        found = dict(_runs(_folder(argument)))
        if not found:
            raise ConfigError(f"there are no runs in {argument}")
        by_run |= found
    return by_run


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


@dataclass(frozen=True)
class SweepPoint:
    """One combination of a sweep.

    Attributes:
        overrides: all of this run's, without its name.
        swept: those of them that are not the same in all runs.
        run_name: the run's own name, with its values.
    """

    overrides: list[str]
    swept: list[str]
    run_name: str

    @property
    def values(self) -> dict[str, str]:
        """The keys that are swept over, with their values as text."""
        return dict(o.lstrip("+").split("=", 1) for o in self.swept if "=" in o)


@dataclass(frozen=True)
class Sweep:
    """The combinations of a `--multirun`.

    Attributes:
        points: one for each run.
        path: `<output_dir>/<name>-sweep-<keys>`, for what belongs to all runs.
    """

    points: list[SweepPoint]
    path: Path


def sweep_of(overrides: Sequence[str], config_dir: str | None = None) -> Sweep:
    """Returns the combinations that `overrides`, with several values for some keys, stand for.

    Raises:
        ConfigError: a combination is wrong, or two would have one name.
    """
    choices = sweep_choices(overrides, config_dir)
    configs = [compose_settings(choice, config_dir).config for choice in choices]
    varies = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    swept = [list(compress(choice, varies)) for choice in choices]
    names = _names(configs, swept)
    keys = "-".join(dict.fromkeys(key for own in swept for key in given_keys(own)))
    base = "-".join(dict.fromkeys(str(config.run_name) for config in configs))
    return Sweep(
        [SweepPoint(*point) for point in zip(choices, swept, names, strict=True)],
        Path(configs[0].output_dir) / f"{base}-sweep-{keys}".replace("/", "_"),
    )


def _names(configs: Sequence[Config], swept: Sequence[Sequence[str]]) -> list[str]:
    """Returns the runs' names, with the values, so that another sweep does not resume these runs.

    A `run_name` or recipe that is swept over is in the name already.
    """
    for left_out in (("run_name", "recipe"), ("run_name",)):
        names = []
        for config, own in zip(configs, swept, strict=True):
            values = [o for o in own if o.lstrip("+").partition("=")[0] not in left_out]
            names.append("-".join([str(config.run_name), *values]).replace("/", "_"))
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"several runs of the sweep have the name {max(names, key=names.count)}")


Run = Callable[[str, Any], dict[str, Any]]


def sweep(command: str, overrides: Sequence[str], config_dir: str | None, run: Run) -> int:
    """Runs every combination of a `--multirun`; returns 0 if all have ended well.

    One that fails is reported, and the others go on. A table at the end and the file
    `<output_dir>/<name>-sweep-<keys>.csv` have the results.

    Args:
        command: such as train, evaluate or export.
        overrides: with several values for some of the keys.
        config_dir: a folder with more groups and options.
        run: runs one command with its settings.

    Raises:
        ConfigError: a combination is wrong; none has begun.
    """
    launch = detect(os.environ)
    if launch.problem is not None:
        raise ConfigError(launch.problem)
    if launch.size > 1:
        raise ConfigError(
            "--multirun does not work under torchrun or srun: every process would sweep. Start one "
            "torchrun for each combination, or an array of jobs with hybridtrain submit --multirun"
        )
    planned = sweep_of(overrides, config_dir)
    points = planned.points
    results: list[dict[str, Any]] = []
    codes: list[int] = []
    for number, point in enumerate(points):
        print(f"run {number + 1} of {len(points)}: {' '.join(point.overrides)}", file=sys.stderr)
        sys.stderr.flush()
        code, result = 0, {}
        try:
            settings = settle(command, point.overrides, config_dir, point.run_name)
            if command == "train" and settings.config.monitor.group is None:
                settings.config.monitor.group = planned.path.name
            result = run(command, settings)
        except Exception as error:
            code = report_and_go_on(error)
        finally:
            if (watchdog := current()) is not None:  # of a run that has failed
                watchdog.close()
        results.append({"run": point.run_name, **point.values, "exit code": code, **result})
        codes.append(code)
        if code == Interrupted.exit_code:
            break
    if command in ("train", "evaluate"):
        print(table(results), file=sys.stderr)
        write_csv(results, planned.path)
    failed = [code for code in codes if code]
    return failed[0] if len(set(failed)) == 1 else int(bool(failed))
