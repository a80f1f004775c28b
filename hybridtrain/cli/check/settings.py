"""The parts of a check that need only the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import Parameter

from hybridtrain._base.text_table import counted
from hybridtrain.cli.check.report import Part, Report
from hybridtrain.cli.config.leftovers import leave_out_leftovers
from hybridtrain.cli.config.resolve import Settings, resolve_settings
from hybridtrain.cli.config.schema import Config, auto_keys
from hybridtrain.cli.run.auto import without_auto
from hybridtrain.cli.run.build import option_parts
from hybridtrain.cli.run.components import build_lr_schedule, build_optimizer, build_trackers
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.errors import UserError
from hybridtrain.loop import Callback


def composed(report: Report, overrides: Sequence[str], config_dir: str | None) -> Part:
    """Composes the config without wrong keys, and reports each wrong key as a problem."""

    def resolved(words: Sequence[str]) -> tuple[str, Settings]:
        settings = resolve_settings("train", words, config_dir)
        return f"run {settings.config.run_name}", settings

    try:
        settings = resolved(overrides)[1]
    except UserError as error:
        if len(overrides) == 1:
            report.problem("config", error)
            return Part("config")
        return _usable_settings(report, resolved, overrides, error)
    return report.part("config", lambda: (f"run {settings.config.run_name}", settings))


def _usable_settings(
    report: Report,
    resolved: Callable[[Sequence[str]], tuple[str, Settings]],
    overrides: Sequence[str],
    error: UserError,
) -> Part:
    """Reports each override that does not compose, and composes the others."""
    usable: list[str] = []
    wrong: list[str] = []
    # groups first, because other keys may be arguments of the options that they select
    for override in sorted(overrides, key=lambda word: "." in word.partition("=")[0]):
        try:
            resolved([*usable, override])
        except UserError as problem:
            report.problem("config", problem)
            wrong.append(override)
            if "." not in override.partition("=")[0]:
                return Part("config")  # without a recipe or group, nothing else can be checked
        else:
            usable.append(override)
    if not wrong:  # the overrides fail only in combination
        report.problem("config", error)
        return Part("config")
    text, settings = resolved(usable)
    return report.part("config", lambda: (f"{text}, without {' '.join(wrong)}", settings))


def without_auto_keys(settings: Settings) -> tuple[str, Config]:
    """Returns the config without leftovers, and with defaults in place of `auto`."""
    leave_out_leftovers(settings)
    config = without_auto(settings)
    auto = auto_keys(settings.config.pipeline)
    if not auto:
        return "none", config
    defaults = ", ".join(f"pipeline.{key}={getattr(config.pipeline, key)}" for key in auto)
    return f"the job chooses them; checked here with {defaults}", config


def options(report: Report, config: Part) -> dict[str, Part]:
    """Reports the parts of a run's options; returns them by their names in `RunOptions`."""

    def part(name: str, make: Callable[..., Any], *needs: Part) -> Part:
        def checked(*values: Any) -> tuple[str, Any]:
            value = make(*values)
            return _FINDINGS.get(name, lambda value: "")(value), True if value is None else value

        return report.part(name, checked, *needs)

    return option_parts(config, part, _trackers)


_FINDINGS: dict[str, Callable[[Any], str]] = {
    "metrics": ", ".join,
    "callbacks": lambda callbacks: ", ".join(type(callback).__name__ for callback in callbacks),
    "pipeline": lambda options: (
        f"{options.schedule}, {counted(options.chunks, 'micro-batch', 'es')}"
    ),
}


def _trackers(config: Config) -> Sequence[Callback]:
    """Checks the trackers without constructing them, because some report a run then."""
    return build_trackers(config, RunDirectory(config), quiet=True, dry_run=True)


def optimizer(config: Config) -> tuple[str, bool]:
    """Builds the optimizer and the learning-rate schedule, for one parameter."""
    optimizer = build_optimizer(config.optim, [Parameter(torch.zeros(1))], config.allow_targets)
    build_lr_schedule(config.lr_schedule, optimizer, 10**9, config.allow_targets)
    return type(optimizer).__name__, True


def run_directory(config: Config) -> tuple[str, bool]:
    """Checks that the run directory is writable and no other run is writing to it."""
    directory = RunDirectory(config)
    directory.check_writable()
    RunLock(directory.path).check()
    return f"{directory.path} is writable from here", True
