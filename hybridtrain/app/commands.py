"""The commands of the command line: `train`, `plan`, `evaluate` and `export`."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

from hybridtrain.app.build import build_monitor, build_scaler, setup_run
from hybridtrain.app.compose import to_yaml
from hybridtrain.app.config import Config
from hybridtrain.app.optim import build_lr_schedule, build_optimizer
from hybridtrain.app.resume import checkpoint_to_read, checkpoint_to_resume
from hybridtrain.checkpoint import state
from hybridtrain.checkpoint.tensor_files import write_weights
from hybridtrain.errors import ConfigError
from hybridtrain.evaluation import evaluate as evaluate_model
from hybridtrain.losses import LOSSES
from hybridtrain.planning.plan import Plan, table
from hybridtrain.text_table import text_table
from hybridtrain.trainer import Trainer
from hybridtrain.world import World

_log = logging.getLogger(__name__)


def train(config: Config, overrides: Sequence[str]) -> None:
    """Trains, or resumes training."""
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
    placement = _placement(model.plan, world)
    _log.info("run directory %s\n%s", directory.path, placement)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        _log.info("resumed from %s, at step %d of %d", checkpoint, trainer.step, total_steps)
    if trainer.step >= total_steps:
        _log.info(
            "the run is complete at step %d; to train on, raise trainer.epochs or trainer.steps; "
            "to start again, set another run_name",
            trainer.step,
        )
        if trainer.evaluation is not None:
            result = evaluate_model(model, trainer.evaluation, trainer.loss_fn, trainer.metrics)
            _log.info("%s", _values(result))
        world.close()
        return
    if world.is_main:
        directory.write_config(config, overrides)
        if model.plan.split != str(directory.plan):
            model.plan.write(directory.plan)
    summary = trainer.fit({"config": to_yaml(config), "layout": placement})
    if world.is_main:
        directory.write_summary(summary)
        _log.info("done: %d steps, %s", trainer.step, _values(summary["eval"]) or "no evaluation")
        _log.info("run directory: %s", directory.path.resolve())
        if config.monitor.tensorboard:
            _log.info("dashboard: tensorboard --logdir %s/tensorboard", directory.path)
    world.close()


def plan(config: Config, overrides: Sequence[str]) -> None:
    """Cuts the model as a run would, shows the plan and writes it."""
    context = setup_run(config, create=True, reuse_plan=False)
    plan = context.model.plan
    _log.info("%s", _placement(plan, context.world))
    if context.world.is_main:
        # A run that has begun keeps the plan that it is cut by.
        path = context.directory.plan.with_stem("plan.new" if context.store.steps() else "plan")
        plan.write(path)
        _log.info("wrote %s; to train with it: pipeline.split=%s", path, path)
    context.world.close()


def evaluate(config: Config, overrides: Sequence[str]) -> None:
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


def export(config: Config, overrides: Sequence[str]) -> None:
    """Writes a checkpoint's weights as one safetensors file, on rank 0.

    `net.load_state_dict(safetensors.torch.load_file(path))` reads it back.
    """
    context = setup_run(config)
    checkpoint = checkpoint_to_read(context)
    state.restore(checkpoint, context.model)
    path = context.directory.path / "export" / f"{checkpoint.name}.safetensors"
    if context.world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_weights(path, context.model.state_dict())
        _log.info("wrote %s, of %s", path, checkpoint)
    context.world.close()


def _values(evaluation: Mapping[str, float] | None) -> str:
    values = dict(evaluation or {})
    values.pop("samples", None)
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def _placement(plan: Plan, world: World) -> str:
    """Returns tables of the stages and of the devices of all processes; a collective call."""
    hosts = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    parameters = sum(cost.parameters for cost in plan.costs)
    head = (
        f"{_count(world.size, 'process', 'es')} x {_count(len(plan.stages), 'stage')}, "
        f"{plan.schedule}, {_count(plan.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"started by {world.launcher}, {world.backend}"
    )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(hosts)
    ]
    return "\n".join([head, table(plan), *text_table(processes, 1)])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
