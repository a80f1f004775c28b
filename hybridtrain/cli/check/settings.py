"""The parts of a check that need only the config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.parameter import Parameter

from hybridtrain._base.text_table import counted
from hybridtrain.cli.check.report import Part, Report
from hybridtrain.cli.config.leftovers import leave_out_leftovers
from hybridtrain.cli.config.resolve import Settings, resolve_settings
from hybridtrain.cli.config.schema import Config, auto_keys
from hybridtrain.cli.run.auto import without_auto
from hybridtrain.cli.run.build import (
    check_choices,
    loader_options,
    pipeline_options,
    trainer_options,
)
from hybridtrain.cli.run.components import (
    build_callbacks,
    build_loss,
    build_lr_schedule,
    build_metrics,
    build_optimizer,
    build_trackers,
)
from hybridtrain.cli.run.directory import RunDirectory
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.errors import UserError
from hybridtrain.loss import LossFn
from hybridtrain.options import LoaderOptions, PipelineOptions, TrainerOptions


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


def keys(config: Config) -> tuple[str, bool]:
    """Checks the keys that no object of the library checks."""
    check_choices(config)
    return "", True


def loss(config: Config) -> tuple[str, LossFn]:
    """Builds the loss."""
    loss_fn = build_loss(config)
    return "", loss_fn


def metrics(config: Config, loss_fn: LossFn) -> tuple[str, bool]:
    """Builds the metrics."""
    return ", ".join(build_metrics(config, loss_fn)), True


def callbacks(config: Config) -> tuple[str, bool]:
    """Builds the callbacks, and checks the trackers."""
    directory = RunDirectory(config)
    callbacks = build_callbacks(config, directory)
    build_trackers(config, directory, quiet=True, dry_run=True)
    return ", ".join(type(callback).__name__ for callback in callbacks), True


def trainer(config: Config) -> tuple[str, TrainerOptions]:
    """Builds the options of the trainer."""
    return "", trainer_options(config)


def loader(config: Config) -> tuple[str, LoaderOptions]:
    """Builds the options of the loaders."""
    return "", loader_options(config)


def pipeline(config: Config) -> tuple[str, PipelineOptions]:
    """Builds the options of the model."""
    options = pipeline_options(config)
    return f"{options.schedule}, {counted(options.chunks, 'micro-batch', 'es')}", options


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
