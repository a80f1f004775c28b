"""A sweep: the same command for every combination of values, one after the other."""

from __future__ import annotations

import csv
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.app.compose import compose_settings, sweep_choices
from hybridtrain.app.config import Config
from hybridtrain.app.error_report import running_watchdog
from hybridtrain.app.settings import settle
from hybridtrain.errors import ConfigError, Interrupted, UserError
from hybridtrain.files import write_atomically
from hybridtrain.launch.environment import detect
from hybridtrain.text_table import text_table

Run = Callable[[str, Any], dict[str, Any]]


def sweep(command: str, overrides: Sequence[str], config_dir: str | None, run: Run) -> int:
    """Runs every combination of a `--multirun`; returns 0 if all have ended well.

    One that fails is reported, and the others go on. A table at the end and the file
    `<output_dir>/<name>-sweep-<keys>.csv` have the results.

    Args:
        command: train, plan, evaluate or export.
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
            "torchrun for each combination, from a shell loop or an array of jobs"
        )
    choices = sweep_choices(overrides, config_dir)
    configs = [compose_settings(choice, config_dir).config for choice in choices]
    swept = [len(set(values)) > 1 for values in zip(*choices, strict=True)]
    points = [
        [override for override, varies in zip(choice, swept, strict=True) if varies]
        for choice in choices
    ]
    names = _names(configs, points)
    results: list[dict[str, Any]] = []
    codes: list[int] = []
    for number, (choice, point, name) in enumerate(zip(choices, points, names, strict=True)):
        print(f"run {number + 1} of {len(choices)}: {' '.join(choice)}", file=sys.stderr)
        sys.stderr.flush()
        values = dict(override.lstrip("+").split("=", 1) for override in point if "=" in override)
        code, result = 0, {}
        try:
            result = run(command, settle(command, choice, config_dir, run_name=name))
        except Exception as error:
            code = _report(error)
        finally:
            if (watchdog := running_watchdog()) is not None:  # of a run that has failed
                watchdog.close()
        results.append({"run": name, **values, "exit code": code, **result})
        codes.append(code)
        if code == Interrupted.exit_code:
            break
    if command in ("train", "evaluate"):
        keys = "-".join(dict.fromkeys(o.lstrip("+").partition("=")[0] for p in points for o in p))
        base = "-".join(dict.fromkeys(str(config.run_name) for config in configs))
        path = Path(configs[0].output_dir) / f"{base}-sweep-{keys}.csv".replace("/", "_")
        _show_and_write(results, path)
    failed = [code for code in codes if code]
    return failed[0] if len(set(failed)) == 1 else int(bool(failed))


def _names(configs: Sequence[Config], points: Sequence[Sequence[str]]) -> list[str]:
    """Returns the runs' names, with the values, so that another sweep does not resume these runs.

    A `run_name` or recipe that is swept over is in the name already.
    """
    for left_out in (("run_name", "recipe"), ("run_name",)):
        names = []
        for config, point in zip(configs, points, strict=True):
            values = [o for o in point if o.lstrip("+").partition("=")[0] not in left_out]
            names.append("-".join([str(config.run_name), *values]).replace("/", "_"))
        if len(set(names)) == len(names):
            return names
    raise ConfigError(f"several runs of the sweep have the name {max(names, key=names.count)}")


def _report(error: Exception) -> int:
    """Prints an error and returns its exit code."""
    if isinstance(error, UserError):
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        print(f"error: {error}{notes}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1


def _show_and_write(results: Sequence[dict[str, Any]], path: Path) -> None:
    columns = list(dict.fromkeys(key for result in results for key in result))
    lines = [[_text(result.get(column)) for column in columns] for result in results]
    print("\n".join(text_table([columns, *lines], 0)), file=sys.stderr)
    file = io.StringIO()
    csv.writer(file).writerows(  # words: ok
        [columns, *([r.get(c) for c in columns] for r in results)]
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file.getvalue())
        print(f"wrote {path}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
