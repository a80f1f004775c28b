"""The commands of the command line: `train`, `plan`, `evaluate` and `export`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtrain.app.build import RunContext, build_monitor, build_scaler, setup_run
from hybridtrain.app.compose import to_yaml
from hybridtrain.app.config import Config
from hybridtrain.app.export import export_model
from hybridtrain.app.optim import build_lr_schedule, build_optimizer
from hybridtrain.app.placement_summary import placement_summary
from hybridtrain.app.resume import checkpoint_to_read, checkpoint_to_resume
from hybridtrain.app.run_directory import RunDirectory
from hybridtrain.checkpoint import state
from hybridtrain.errors import ConfigError
from hybridtrain.evaluation import evaluate as evaluate_model
from hybridtrain.losses import LOSSES
from hybridtrain.planning.plan import Plan
from hybridtrain.trainer import Trainer

_log = logging.getLogger(__name__)


def train(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains, or resumes training, and returns the summary."""
    context = setup_run(config, create=True)
    directory, world, model = context.directory, context.world, context.model
    loader, options = context.train_loader(), context.trainer_options
    total_steps = options.total_steps(loader.batches_per_epoch)
    optimizer = build_optimizer(config.optim, model.parameters(), config.allow_targets)
    lr_schedule = build_lr_schedule(
        config.lr_schedule, optimizer, total_steps, config.allow_targets
    )
    trainer = Trainer(
        model,
        optimizer,
        LOSSES[config.trainer.loss],
        loader,
        options,
        evaluation=context.eval_loader(),
        metrics=context.metrics,
        lr_schedule=lr_schedule,
        scaler=build_scaler(config, world),
        store=None if config.checkpoint.every_steps == 0 else context.store,
        monitor=build_monitor(config, directory) if world.is_main else None,
    )
    checkpoint = checkpoint_to_resume(context)
    placement = placement_summary(model.plan, world)
    _log.info("run directory %s\n%s", directory.path, placement)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        _log.info("resumed from %s, at step %d of %d", checkpoint, trainer.step, total_steps)
    if trainer.step >= total_steps:
        return _report_complete_run(context, trainer)
    if world.is_main:
        directory.write_config(config, overrides)
        if model.plan.split != str(directory.plan):
            directory.write_plan(model.plan)
    summary = trainer.fit({"config": to_yaml(config), "layout": placement})
    if world.is_main:
        directory.write_summary(summary)
        _log.info("%s", _outcome(directory, summary))
    world.close()
    return summary


def plan(config: Config, overrides: Sequence[str]) -> Plan:
    """Cuts the model as a run would, shows the plan and writes it."""
    context = setup_run(config, create=True, reuse_plan=False)
    plan = context.model.plan
    _log.info("%s", placement_summary(plan, context.world))
    if context.world.is_main:
        path = context.directory.write_plan(plan, proposed=bool(context.store.steps()))
        _log.info("wrote %s; to train with it: pipeline.split=%s", path, path)
    context.world.close()
    return plan


def evaluate(config: Config, overrides: Sequence[str]) -> dict[str, float]:
    """Evaluates the newest checkpoint of a run, or the one that `resume` names."""
    context = setup_run(config)
    loader = context.eval_loader()
    if loader is None:
        raise ConfigError(f"data._target_={config.data['_target_']} has no evaluation split")
    checkpoint = checkpoint_to_read(context)
    step = state.restore(checkpoint, context.model)["step"]
    result = evaluate_model(context.model, loader, LOSSES[config.trainer.loss], context.metrics)
    values = _values(result)
    _log.info("%s, step %d: %s  (%d samples)", checkpoint, step, values, result["samples"])
    context.world.close()
    return result


def export(config: Config, overrides: Sequence[str]) -> Path | None:
    """Writes a checkpoint's weights as one safetensors file, on rank 0."""
    context = setup_run(config)
    checkpoint = checkpoint_to_read(context)
    state.restore(checkpoint, context.model)
    path = context.directory.path / "export" / f"{checkpoint.name}.safetensors"
    if context.world.is_main:
        export_model(context.model, path)
        _log.info("wrote %s, of %s", path, checkpoint)
    context.world.close()
    return path if context.world.is_main else None


def _report_complete_run(context: RunContext, trainer: Trainer) -> dict[str, Any]:
    """Says that the run has reached its last step, evaluates it and returns its summary."""
    _log.info(
        "the run is complete at step %d; to train on, raise trainer.epochs or trainer.steps; to "
        "start again, set another run_name",
        trainer.step,
    )
    loader = context.eval_loader()
    if loader is not None:
        result = evaluate_model(context.model, loader, trainer.loss_fn, context.metrics)
        _log.info("%s", _values(result))
    summary = context.world.broadcast(context.world.on_main(context.directory.read_summary))
    context.world.close()
    return summary or {}


def _values(evaluation: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name} {value:.4f}" for name, value in evaluation.items() if name != "samples"
    )


def _outcome(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    return (
        f"done: {summary['steps']} steps, {_values(summary['eval'] or {}) or 'no evaluation'}\n"
        f"run directory: {directory.path.resolve()}\n"
        f"dashboard: tensorboard --logdir {directory.tensorboard}"
    )
