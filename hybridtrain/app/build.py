"""From a config to a run: the one room that knows every other."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader

from hybridtrain.app import instantiate
from hybridtrain.app.compose import to_yaml
from hybridtrain.app.config import Config, check
from hybridtrain.app.export import export_model
from hybridtrain.app.optim import build_lr_schedule, build_optimizer, optimizer_tensors_per_param
from hybridtrain.app.placement_summary import placement_summary
from hybridtrain.app.run_directory import RunDirectory
from hybridtrain.checkpoint import state
from hybridtrain.checkpoint.store import CheckpointStore, step_of
from hybridtrain.data.loader import EvalLoader, LoaderOptions, TrainLoader
from hybridtrain.data.splits import DataSplits
from hybridtrain.errors import CheckpointError, ConfigError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import LOSSES, METRICS
from hybridtrain.model import HybridModel
from hybridtrain.monitor import MetricsFile, Monitor, Monitors, Progress, TensorBoard, TimelineFiles
from hybridtrain.planning.plan import Plan
from hybridtrain.trainer import Trainer, count_steps
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

# The keys of `data` that the loader takes; the others go to the data set.
LOADER_KEYS = ("batch_size", "workers", "drop_last", "timeout_s")


@dataclass(frozen=True)
class Parts:
    """What every command needs, built from a config."""

    config: Config
    directory: RunDirectory
    world: World
    data: DataSplits
    model: HybridModel

    @property
    def loader_options(self) -> LoaderOptions:
        """How this run fetches batches."""
        data = self.config.data
        return LoaderOptions(
            workers=data.get("workers", 0),
            timeout_s=data.get("timeout_s", 120),
            collate=self.data.collate,
        )

    def evaluation(self) -> EvalLoader | None:
        """The evaluation half of the data, if there is one."""
        if self.data.eval is None:
            return None
        size = self.config.data["batch_size"]
        return EvalLoader(self.data.eval, size, self.world, options=self.loader_options)


def train(config: Config, overrides: Sequence[str]) -> dict[str, Any]:
    """The command `train`: trains, or goes on training, and returns the summary."""
    parts = _assemble(config, new=True)
    directory, world, model = parts.directory, parts.world, parts.model
    loader = TrainLoader(
        parts.data.train,
        config.data["batch_size"],
        world,
        seed=config.seed,
        drop_last=config.data.get("drop_last", False),
        options=parts.loader_options,
    )
    options = config.trainer
    total_steps = count_steps(loader, options.steps, options.epochs, options.accumulate)
    optimizer = build_optimizer(config.optim, model.parameters(), config.allow_targets)
    keeps = config.checkpoint.every_steps != 0
    trainer = Trainer(
        model,
        optimizer,
        LOSSES[options.loss],
        loader,
        evaluation=parts.evaluation(),
        metrics=_metrics(config),
        lr_schedule=build_lr_schedule(
            config.lr_schedule, optimizer, total_steps, config.allow_targets
        ),
        steps=options.steps,
        epochs=options.epochs,
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        scaler=_scaler(config, world),
        loss_scale=options.loss_scale,
        log_every=options.log_every,
        eval_every=options.eval_every,
        store=CheckpointStore(directory.checkpoints, config.checkpoint.keep) if keeps else None,
        checkpoint_every=config.checkpoint.every_steps or None,
        timeline_every=config.monitor.timeline_every,
        monitor=_monitor(config, directory) if world.is_main else None,
    )
    checkpoint = _checkpoint_to_resume(parts)
    layout = placement_summary(model, config.pipeline.schedule)
    log.info("run directory %s\n%s", directory.path, layout)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        log.info("resumed from %s, at step %d of %d", checkpoint, trainer.step, total_steps)
    if trainer.step >= total_steps:
        return _already_done(parts, trainer)
    if world.is_main:
        directory.write_config(config, overrides)
        if model.plan.split != str(directory.plan):
            directory.write_plan(model.plan)
    summary = trainer.fit({"config": to_yaml(config), "layout": layout})
    if world.is_main:
        directory.write_summary(summary)
        log.info("%s", _outcome(directory, summary))
    world.close()
    return summary


def plan_run(config: Config) -> Plan:
    """The command `plan`: divides the model as a run would, and shows and writes how."""
    parts = _assemble(config, new=True, plans=True)
    log.info("%s", placement_summary(parts.model, config.pipeline.schedule))
    if parts.world.is_main:
        is_used = bool(CheckpointStore(parts.directory.checkpoints).steps())
        path = parts.directory.write_plan(parts.model.plan, proposed=is_used)
        log.info("wrote %s; to train with it: pipeline.split=%s", path, path)
    parts.world.close()
    return parts.model.plan


def evaluate_run(config: Config) -> dict[str, float]:
    """The command `evaluate`: evaluates the newest checkpoint of a run, or the one named."""
    parts = _assemble(config)
    loader = parts.evaluation()
    if loader is None:
        raise ConfigError(f"data ({config.data['_target_']}) has no evaluation half")
    checkpoint = _needed_checkpoint(parts)
    step = state.restore(checkpoint, parts.model)["step"]
    result = evaluate(parts.model, loader, LOSSES[config.trainer.loss], _metrics(config))
    log.info("%s, step %d: %s  (%d samples)", checkpoint, step, _values(result), result["samples"])
    parts.world.close()
    return result


def export_run(config: Config) -> Path | None:
    """The command `export`: writes a checkpoint's weights as one safetensors file, on rank 0."""
    parts = _assemble(config)
    checkpoint = _needed_checkpoint(parts)
    state.restore(checkpoint, parts.model)
    path = parts.directory.path / "export" / f"{checkpoint.name}.safetensors"
    if parts.world.is_main:
        export_model(parts.model, path)
        log.info("wrote %s, of %s", path, checkpoint)
    parts.world.close()
    return path if parts.world.is_main else None


def _assemble(config: Config, new: bool = False, plans: bool = False) -> Parts:
    """World, data and model of a run; only a `new` run makes a directory.

    Where the model is cut is decided anew if that is what the command `plans`.
    """
    check(config)
    _check_choice("world.engine", config.world.engine, {"local": None})
    _check_choice("trainer.loss", config.trainer.loss, LOSSES)
    _metrics(config)  # so that a typo in a metric ends the run before it begins
    world = World.from_env(
        config.pipeline.nb_part,
        config.world.devices,
        config.world.backend,
        config.world.timeout_s,
    )
    directory = RunDirectory.of(config)
    if new:
        directory.create()
    directory.log_to_files(world.rank)
    data = _data(config, world)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    torch.set_float32_matmul_precision("high" if config.trainer.tf32 else "highest")
    torch.manual_seed(config.seed)
    split = config.pipeline.split
    if not plans:
        split = world.broadcast(world.on_main(lambda: _split(config, directory)))
    model = HybridModel(
        _model(config, data.facts),
        world,
        chunks=config.pipeline.chunks,
        schedule=config.pipeline.schedule,
        split=split,
        checkpoint=config.pipeline.checkpoint,
        stages_per_device=config.pipeline.stages_per_device,
        max_inflight=config.pipeline.max_inflight,
        batch_norm=config.pipeline.batch_norm,
        sync_batch_norm=config.pipeline.sync_batch_norm,
        precision=config.trainer.precision,
        compile=config.trainer.compile,
        seed=config.seed,
        find_unused_parameters=config.world.find_unused_parameters,
        broadcast_buffers=config.world.broadcast_buffers,
        example_inputs=_example_inputs(config, data, world),
        memory_weight=config.pipeline.memory_weight,
        memory_limit_gib=config.pipeline.memory_limit_gib,
        default_partition=config.pipeline.default_partition,
        optimizer_tensors_per_param=optimizer_tensors_per_param(config.optim, config.allow_targets),
    )
    return Parts(config, directory, world, data, model)


def _split(config: Config, directory: RunDirectory) -> Any:
    """How the model is cut: a run that goes on is not measured again if asked for the same."""
    asked = config.pipeline
    if asked.split not in ("time", "memory", "balanced") or not directory.plan.exists():
        return asked.split
    if config.resume is None or not CheckpointStore(directory.checkpoints).steps():
        return asked.split
    before = directory.read_config()
    for group, now in (("model", config.model), ("pipeline", vars(asked))):
        then = before.get(group, {})
        for key in [*now, *then]:
            if now.get(key) != then.get(key):
                log.info("measured anew: %s.%s is not what it was in this run", group, key)
                return asked.split
    log.info("cut as in %s", directory.plan)
    return str(directory.plan)


def _data(config: Config, world: World) -> DataSplits:
    """The data set: rank 0 first and alone if it may download, then the others."""

    def load(download: bool) -> DataSplits:
        chosen = dict(config.data)
        if "download" in chosen:
            chosen["download"] = download
        tokenizer = str(config.data.get("tokenizer", ""))
        if (
            "." in tokenizer or ":" in tokenizer
        ):  # a function by its path, not a name of torchtext's
            instantiate.resolve("data.tokenizer", tokenizer.replace(":", "."), config.allow_targets)
        splits = instantiate.build("data", chosen, config.allow_targets, ignore=LOADER_KEYS)
        if not isinstance(splits, DataSplits):
            raise ConfigError(
                f"data._target_={chosen['_target_']} must return a hybridtrain.data.DataSplits, "
                f"not {type(splits).__name__}"
            )
        return splits

    on_main = world.on_main(lambda: load(bool(config.data.get("download"))))
    return on_main if on_main is not None else load(False)


def _example_inputs(config: Config, data: DataSplits, world: World) -> Any:
    """The inputs of a batch, for measuring and tracing the model; always the same rows."""
    rows = min(-(-config.data["batch_size"] // world.size), len(data.train))  # type: ignore[arg-type]
    inputs, _ = next(iter(DataLoader(data.train, batch_size=rows, collate_fn=data.collate)))
    return inputs


def _model(config: Config, facts: Mapping[str, Any]) -> nn.Module:
    net = instantiate.build("model", config.model, config.allow_targets, facts=facts)
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"model._target_={config.model['_target_']} must give an nn.Module, "
            f"not {type(net).__name__}"
        )
    return net


def _scaler(config: Config, world: World) -> GradScaler | None:
    if config.trainer.precision != "fp16":
        return None
    device = world.devices[0].type
    if config.trainer.loss_scale is None:
        return GradScaler(device)
    return GradScaler(device, init_scale=config.trainer.loss_scale)


def _metrics(config: Config) -> dict[str, Any]:
    """The metrics of `trainer.metrics`: names of this project's, or torchmetrics' targets."""
    chosen = config.trainer.metrics
    if chosen is None:
        chosen = [] if config.trainer.loss == "mse" else ["accuracy"]
    if isinstance(chosen, Mapping):
        return {
            name: instantiate.build("trainer.metrics", given, config.allow_targets)
            if isinstance(given, Mapping)
            else METRICS[_check_choice(f"trainer.metrics.{name}", given, METRICS)]
            for name, given in chosen.items()
        }
    return {name: METRICS[_check_choice("trainer.metrics", name, METRICS)] for name in chosen}


def _monitor(config: Config, directory: RunDirectory) -> Monitor:
    monitors: list[Monitor] = [
        MetricsFile(directory.path / "metrics.jsonl"),
        TimelineFiles(directory.path),
    ]
    if config.monitor.tensorboard:
        monitors.append(TensorBoard(directory.tensorboard))
    if config.monitor.progress:
        monitors.append(Progress())
    return Monitors(monitors)


def _checkpoint_to_resume(parts: Parts, for_reading: bool = False) -> Path | None:
    """Where to go on from; rank 0 looks and tells the others."""
    resume, store = parts.config.resume, CheckpointStore(parts.directory.checkpoints)

    def find() -> Path | None:
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if restarted and store.steps():
            return store.newest()  # torchrun starts this run again: on from where it was
        if resume is None:
            if store.steps():
                raise ConfigError(
                    f"resume=null would start anew over the checkpoints in {store.root} (up to "
                    f"step {store.steps()[-1]}): set resume=auto to go on, or another run_name"
                )
            return None
        if resume == "auto":
            return store.newest()
        path = Path(resume)
        if not path.is_dir():
            raise CheckpointError(f"resume={resume}: there is no such checkpoint directory")
        later = [step for step in store.steps() if step > step_of(path)]
        if later and not for_reading:
            raise ConfigError(
                f"resume={resume}: the run directory has later checkpoints, up to step "
                f"{later[-1]}, which the new ones would mix with: set another run_name"
            )
        return path

    return parts.world.broadcast(parts.world.on_main(find))


def _needed_checkpoint(parts: Parts) -> Path:
    if parts.config.resume is None:
        raise ConfigError("resume=null: set it to auto, or to the path of a checkpoint")
    checkpoint = _checkpoint_to_resume(parts, for_reading=True)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {parts.directory.checkpoints}: train first, or set "
            f"run_name or resume=<path of a checkpoint>"
        )
    return checkpoint


def _already_done(parts: Parts, trainer: Trainer) -> dict[str, Any]:
    """The run has reached its last step before: says so and evaluates it once more."""
    log.info(
        "the run is complete at step %d; to train on, raise trainer.epochs or trainer.steps; to "
        "train anew, set another run_name",
        trainer.step,
    )
    loader = parts.evaluation()
    if loader is not None:
        result = evaluate(parts.model, loader, trainer.loss_fn, trainer.metrics)
        log.info("%s", _values(result))
    summary = parts.world.broadcast(parts.world.on_main(parts.directory.read_summary))
    parts.world.close()
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


def _check_choice(key: str, value: Any, choices: Mapping[str, Any]) -> str:
    if value not in choices:
        raise ConfigError(instantiate.unknown_option(key, str(value), list(choices)))
    return str(value)
