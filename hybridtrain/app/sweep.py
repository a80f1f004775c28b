"""A sweep: the same command for every combination of values, one after the other."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from hybridtrain.app.compose import compose_settings, given_keys, sweep_choices
from hybridtrain.app.config import Config
from hybridtrain.app.error_report import running_watchdog
from hybridtrain.app.resolve import settle
from hybridtrain.app.results import table, write_csv
from hybridtrain.errors import ConfigError, Interrupted, UserError
from hybridtrain.launch import detect


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
            result = run(command, settle(command, point.overrides, config_dir, point.run_name))
        except Exception as error:
            code = _report(error)
        finally:
            if (watchdog := running_watchdog()) is not None:  # of a run that has failed
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


def _report(error: Exception) -> int:
    """Prints an error and returns its exit code."""
    if isinstance(error, UserError):
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        print(f"error: {error}{notes}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1
