"""The command `train`: trains a model, or resumes an interrupted run."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from functools import partial

import yaml
from omegaconf import OmegaConf

from hybridtrain import observe
from hybridtrain._base.torch_private import import_compiler
from hybridtrain.checkpoint import init_from, parse_init_from
from hybridtrain.cli.commands.layout_tables import placement_tables
from hybridtrain.cli.commands.result import Result, values_in_words
from hybridtrain.cli.config.changes import in_words
from hybridtrain.cli.config.overrides import given_keys, read_overrides, with_later
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.config.secrets import masked
from hybridtrain.cli.config.tree import to_tree, to_yaml
from hybridtrain.cli.run.build import build_run
from hybridtrain.cli.run.components import (
    build_lr_schedule,
    build_model_optimizer,
    build_trackers,
    check_evaluations,
)
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.directory import (
    RESULT,
    LogLines,
    RunDirectory,
    environment,
)
from hybridtrain.cli.run.lock import writing
from hybridtrain.cli.run.moved_base import load_moved_base
from hybridtrain.cli.run.prediction import beside_measured, predict_run, prediction_in_words
from hybridtrain.cli.run.resume import checkpoint_to_resume
from hybridtrain.cli.run.run_data import refuse_other_data
from hybridtrain.cli.run.run_record import record_of_run
from hybridtrain.cli.run.utilization import utilization
from hybridtrain.errors import ConfigError
from hybridtrain.loop import Callback, Tracker, Trainer
from hybridtrain.observe import MetricsFile, Progress, TimelineFiles

_log = logging.getLogger(__name__)

import_compiler()  # together with the command's other imports, see `cli.command_line`


def train(settings: Settings) -> Result:
    """Trains, or resumes training."""
    trackers = partial(_trackers, settings=settings)
    context = build_run(settings, writes=True, make_trackers=trackers)
    config, world, model = context.config, context.world, context.model
    loader, options = context.train_loader(), context.options
    total_steps = options.trainer.total_steps(loader.batches_per_epoch)
    check_evaluations(options.callbacks, options.trainer, total_steps)
    optimizer = build_model_optimizer(config.optim, model, config.allow_targets)
    lr_schedule = build_lr_schedule(
        config.lr_schedule, optimizer, total_steps, config.allow_targets
    )
    trainer = Trainer(
        model,
        optimizer,
        options.loss_fn,
        loader,
        options.trainer,
        evaluation=context.eval_loader(),
        metrics=options.metrics,
        lr_schedule=lr_schedule,
        store=None if config.checkpoint.every_steps == 0 else context.store,
        callbacks=[
            *utilization(context),
            *options.callbacks,
            *options.trackers,
            *_file_trackers(context.directory),
        ],
        record=record_of_run(context),
    )
    with writing(context.directory, world):
        return _train(context, trainer)


def _trackers(config: Config, settings: Settings) -> list[Callback]:
    directory = RunDirectory(config)
    return build_trackers(config, directory, quiet=settings.quiet, dry_run=settings.dry_run)


def _file_trackers(directory: RunDirectory) -> list[Tracker]:
    """Returns the trackers of every run, which write its files."""
    return [
        MetricsFile(directory.path / "metrics.jsonl"),
        TimelineFiles(directory.path),
        Progress(LogLines()),  # type: ignore[arg-type]
    ]


def _train(context: RunContext, trainer: Trainer) -> Result:
    """Trains, from the newest checkpoint if there is one, with the run directory locked."""
    settings, config, world = context.settings, context.config, context.world
    directory, plan, total_steps = context.directory, context.model.plan, trainer.total_steps
    checkpoint = checkpoint_to_resume(context)
    placement = placement_tables(plan, world)
    _log.info("run directory %s\n%s", directory.path, placement)
    if checkpoint is None and (initial := parse_init_from(config.init_from)) is not None:
        init_from(context.model, **initial)
    if checkpoint is not None:
        load_moved_base(context, checkpoint)
        allow = config.allow_changes
        world.on_main(lambda: refuse_other_data(checkpoint, context.data, allow))
        trainer.resume(checkpoint, allow_changes=allow)
        _log.info("resumed from %s, at step %d of %d", checkpoint, trainer.step, total_steps)
    if trainer.finished:
        # from rank 0, the only process that has to see the run directory
        world.on_main(lambda: _refuse_other_settings(context, trainer))
        _log.info(
            "the run %s; to continue training, %s; to start over, set another run_name=",
            _end_of(trainer), _way_on(trainer),
        )  # fmt: skip
        result = {}
        if trainer.evaluation is not None:
            result = trainer.evaluate()
            _log.info("%s", values_in_words(result))
        world.close()
        return {"step": trainer.step, **result}
    if world.is_main:
        _write_config(context)
        if plan.split != str(directory.plan):
            plan.write(directory.plan)
    shown = to_yaml(config, settings.texts, mask=True)
    texts = {"config": shown, "layout": placement, "overrides": values_to_compare(settings)}
    summary = trainer.fit({title: text for title, text in texts.items() if text})
    if world.is_main:
        prediction = predict_run(context)  # not earlier, because the first step would wait for it
        model = context.model
        compared = beside_measured(prediction, summary, model.schedule(model.plan.chunks))
        directory.write_summary({**summary, **compared, "environment": environment(world)})
        _log.info("%s", prediction_in_words(**compared))
        for line in summary["advice"]:
            _log.info("%s", line)
        if not settings.dry_run:  # a dry run removes the directory
            _log.info("run directory: %s", directory.path.resolve())
        if config.monitor.report and not settings.dry_run:
            _write_page(directory)
        if config.monitor.tensorboard and not settings.dry_run:
            # the parent, because for a run's own folder TensorBoard names the run "."
            _log.info("dashboard: tensorboard --logdir %s", directory.path.parent)
        # last, because most users look for it
        values = values_in_words(summary["eval"]) or "no evaluation"
        _log.info("done: %d steps, %s", trainer.step, values, extra=RESULT)
    world.close()
    return {"step": trainer.step, **(summary["eval"] or {})}


def _write_page(directory: RunDirectory) -> None:
    """Writes the report of a complete run; if that fails, only warns."""
    try:
        _log.info("report: %s", observe.write_report([directory.path]).resolve())
    except Exception as error:
        command = shlex.join(["hybridtrain", "report", str(directory.path)])
        _log.warning(
            "cannot write the report: %s: %s; the run itself is complete. To write the report "
            "later: %s", type(error).__name__, error, command,
        )  # fmt: skip
        _log.debug("no report", exc_info=True)


def values_to_compare(settings: Settings) -> str:
    """Returns the settings of the command line as YAML, for dashboards to compare runs."""
    tree = OmegaConf.create(masked(to_tree(settings.config)))
    values = {key: OmegaConf.select(tree, key) for key in given_keys(settings.overrides)}
    chosen = {
        key: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        for key, value in values.items()
        if value is not None
    }
    return yaml.safe_dump(chosen, sort_keys=False) if chosen else ""


def _stopped_by(trainer: Trainer) -> str:
    """Returns the names of the callbacks that ended a run before its last step, or ""."""
    return " and ".join(callback.state_name for callback in trainer.callbacks if callback.stops)


def _end_of(trainer: Trainer) -> str:
    if callbacks := _stopped_by(trainer):
        return f"was stopped early by {callbacks} at step {trainer.step} of {trainer.total_steps}"
    return f"is complete at step {trainer.step}"


def _way_on(trainer: Trainer) -> str:
    if callbacks := _stopped_by(trainer):
        return f"set callbacks=null, or callbacks= without {callbacks}"
    return "raise trainer.steps= or trainer.epochs="


def _refuse_other_settings(context: RunContext, trainer: Trainer) -> None:
    """Raises if the command changes the settings of a complete run, which would have no effect."""
    settings = context.settings
    every = [*settings.changes, *settings.kept]
    changes = [c for c in every if c.has_effect and c.key not in settings.moved]
    if changes:
        raise ConfigError(
            f"the run {context.directory.path} {_end_of(trainer)}, with {in_words(changes)}: to "
            f"train with the new settings, set another run_name=; to continue this run, "
            f"{_way_on(trainer)}"
        )


def _write_config(context: RunContext) -> None:
    """Writes the config, the base of all later commands on this run."""
    settings, config = context.settings, replace(context.config, allow_changes=False)
    if settings.of_run is not None and context.store.steps():
        config.resume = settings.of_run.resume  # where the run started
        if not settings.moved:
            config.init_from = settings.of_run.init_from
    if "classes" in config.data and (classes := context.data.metadata.get("classes")):
        config.data = {**config.data, "classes": list(classes)}  # the names behind the numbers
    overrides = settings.overrides
    if settings.of_run is not None:
        overrides = with_later(read_overrides(context.directory.path), overrides)
    context.directory.write_config(config, overrides, settings.texts)
