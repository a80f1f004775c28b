"""The sweep of `--multirun`: one command per combination, in sequence, in one folder.

<output_dir>/digits-lr-chunks/
    lr_0.001-chunks_4/      a run, named digits-lr-chunks/lr_0.001-chunks_4
    results.csv             the table printed at the end
    slurm/sweep.txt         in submitted sweeps: the overrides of each run
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from hybridtrain.cli.config.compose import compose_settings
from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.resolve import resolve_settings
from hybridtrain.cli.config.run_name import shortened, with_digest
from hybridtrain.cli.config.sweeps import sweep_choices
from hybridtrain.cli.run.errors import report_and_go_on
from hybridtrain.cli.run.run_table import best_run, runs_of, table_of, write_table
from hybridtrain.errors import ConfigError, Interrupted
from hybridtrain.launch import current, detect


@dataclass(frozen=True)
class SweepPoint:
    """One combination of a sweep.

    Attributes:
        overrides: all overrides of this run except its name.
        swept: the overrides that differ across runs.
        run_name: the run's own name, with its values.
    """

    overrides: list[str]
    swept: list[str]
    run_name: str

    @property
    def values(self) -> dict[str, str]:
        """The swept keys, with their values as text."""
        return dict(o.lstrip("+").split("=", 1) for o in self.swept if "=" in o)


@dataclass(frozen=True)
class Sweep:
    """The combinations of a `--multirun`.

    Attributes:
        points: one per run.
        path: the folder of the sweep's files, and of runs without a name of their own.
    """

    points: list[SweepPoint]
    path: Path


def sweep_of(overrides: Sequence[str], config_dir: str | None = None) -> Sweep:
    """Returns the combinations of `overrides` with several values for some keys.

    Raises:
        ConfigError: a combination is wrong, or occurs twice.
    """
    choices = sweep_choices(overrides, config_dir)
    if twice := next((choice for n, choice in enumerate(choices) if choice in choices[:n]), None):
        raise ConfigError(
            f"the sweep has this combination twice: {' '.join(twice)}; write each value once"
        )
    configs = [compose_settings(choice, config_dir).config for choice in choices]
    varies = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    swept = [list(compress(choice, varies)) for choice in choices]
    folder, names = names_of([str(config.run_name) for config in configs], swept)
    return Sweep(
        [SweepPoint(*point) for point in zip(choices, swept, names, strict=True)],
        Path(configs[0].output_dir) / folder,
    )


def names_of(base_names: Sequence[str], swept: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """Returns the names of a sweep's folder and of its runs.

    A run is named after its values, so that another sweep does not resume it. Runs keep names that
    already differ, as with `run_name=a,b` or two recipes. Names that are too long for a folder, or
    equal, end in a digest.

    Args:
        base_names: the name of each run without a sweep.
        swept: for each run, the overrides that differ across runs.
    """
    bases = list(dict.fromkeys(base_names))
    in_name = ("run_name",) if len(bases) == 1 else ("run_name", "recipe")
    keys = _short(key for words in swept for key in given_keys(words) if key not in in_name)
    # A name may be group/name, and run names have two parts as well.
    folder = shortened("-".join([*bases, *(keys.values() or ["sweep"])]).replace("/", "-"))
    if len(set(base_names)) == len(base_names):
        return folder, list(base_names)
    names = []
    for base, words in zip(base_names, swept, strict=True):
        parts = [base.replace("/", "-")] if len(bases) > 1 else []
        for key, word in zip(given_keys(words), words, strict=True):
            if key in keys:
                # Only characters that a shell accepts without quotes.
                value = re.sub(r"[^\w.+-]+", "_", word.partition("=")[2]).strip("._")
                parts.append(f"{keys[key]}_{value}".strip("_"))
        names.append("-".join(parts))
    # values may differ only in characters that a name does not have
    distinct = [
        with_digest(name, " ".join(words)) if names.count(name) > 1 else name
        for name, words in zip(names, swept, strict=True)
    ]
    return folder, [f"{folder}/{shortened(name)}" for name in distinct]


def _short(keys: Iterable[str]) -> dict[str, str]:
    """Returns the last part of each key, or the whole key if two share it."""
    whole = list(dict.fromkeys(keys))
    last = [key.rpartition(".")[2] for key in whole]
    return {
        key: (word if last.count(word) == 1 else key).replace("/", "_")
        for key, word in zip(whole, last, strict=True)
    }


RunCommand = Callable[[str, Any], dict[str, Any]]


def run_sweep(
    command: str, overrides: Sequence[str], config_dir: str | None, run: RunCommand
) -> int:
    """Runs every combination of a `--multirun`; returns 0 if all succeeded.

    If a run fails, it is reported and the others continue. A table at the end and the file
    `results.csv` in the sweep's folder have the results.

    Args:
        command: such as train, evaluate or export.
        overrides: overrides with several values for some keys.
        config_dir: a folder with more groups and options.
        run: runs one command with its settings.

    Raises:
        ConfigError: a combination is wrong; no run has started.
    """
    launch = detect(os.environ)
    if launch.problem is not None:
        raise ConfigError(launch.problem)
    if launch.size > 1:
        raise ConfigError(
            "--multirun does not work under torchrun or srun, where every process would run the "
            "sweep: start one torchrun per combination, or submit an array of jobs with "
            "hybridtrain submit --multirun"
        )
    sweep = sweep_of(overrides, config_dir)
    points = sweep.points
    results: list[dict[str, Any]] = []
    codes: list[int] = []
    for number, point in enumerate(points):
        print(f"run {number + 1} of {len(points)}: {' '.join(point.overrides)}", file=sys.stderr)
        sys.stderr.flush()
        code, result = 0, {}
        try:
            settings = resolve_settings(command, point.overrides, config_dir, point.run_name)
            if command == "train" and settings.config.monitor.group is None:
                settings.config.monitor.group = sweep.path.name
            settings.quiet = command == "train"  # one line per run; its log has the rest
            result = run(command, settings)
        except Exception as error:
            code = report_and_go_on(error)
        finally:
            if (watchdog := current()) is not None:  # left by a failed run
                watchdog.close()
        results.append({"run": point.run_name, **point.values, "exit code": code, **result})
        codes.append(code)
        if code == Interrupted.exit_code:
            break
    if command in ("train", "evaluate"):
        print(table_of(results), file=sys.stderr)
        write_table(results, sweep.path / "results.csv")
        directories = [sweep.path.parent / point.run_name for point in points]
        runs = runs_of(str(run) for run in directories if run.is_dir())
        if best := best_run(runs, config_dir=config_dir):
            print(best, file=sys.stderr)
    failed = [code for code in codes if code]
    return failed[0] if len(set(failed)) == 1 else int(bool(failed))
