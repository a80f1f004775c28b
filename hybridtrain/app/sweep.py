"""A sweep: the same command for every combination of values, one after the other."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hybridtrain.app.error_report import running_watchdog
from hybridtrain.app.results import table, write_csv
from hybridtrain.app.settings import settle
from hybridtrain.app.sweep_points import sweep_of
from hybridtrain.errors import ConfigError, Interrupted, UserError
from hybridtrain.launch.environment import detect

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
