"""Builds the objects of a run from its config: world, data, model, loaders, metrics, monitors."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain.checkpoint import CheckpointStore, find_weights, parse_init_from
from hybridtrain.cli.config.resolve import Settings, agreed, leave_out_leftovers
from hybridtrain.cli.config.schema import (
    AUTO,
    LOADER_OPTIONS,
    Config,
    arguments_of,
    check,
    errors_with_config_keys,
)
from hybridtrain.cli.run.components import (
    build_callbacks,
    build_loss,
    build_metrics,
    build_model,
    load_data,
    load_for_trained,
    optimizer_tensors_per_param,
)
from hybridtrain.cli.run.directory import LogLines, RunDirectory, checkpoint_to_read
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.cli.run.pricing import chosen, with_largest_batch, without_auto
from hybridtrain.data import (
    DataSplits,
    EvalLoader,
    StreamLoader,
    TrainLoader,
    WithoutTargets,
    already_batched,
    example_batch,
    is_stream,
    length_of,
)
from hybridtrain.errors import check_choice
from hybridtrain.launch import raise_on_signals
from hybridtrain.loop import Monitor, Monitors, TrainerOptions
from hybridtrain.loss import LossFn
from hybridtrain.model import HybridModel
from hybridtrain.observe import MetricsFile, Progress, TimelineFiles
from hybridtrain.options import LoaderOptions, PipelineOptions
from hybridtrain.pipeline import ENGINES
from hybridtrain.world import World

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The settings of a run that need neither processes nor data."""

    pipeline: PipelineOptions
    trainer: TrainerOptions
    loader: LoaderOptions
    loss_fn: LossFn
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The objects of a run before its model; `build()` makes the model."""

    settings: Settings
    config: Config
    directory: RunDirectory
    store: CheckpointStore
    world: World
    data: DataSplits
    build: Callable[[], nn.Module]
    example_inputs: Any
    example_targets: Any
    options: RunOptions


@dataclass(frozen=True)
class RunContext(Setup):
    """The same objects and the model, which is what most commands work with."""

    model: HybridModel

    def train_loader(self) -> TrainLoader | StreamLoader:
        """Returns the loader of the training split."""
        size, seed, options = self.config.data["batch_size"], self.config.seed, self.options.loader
        kind = StreamLoader if is_stream(self.data.train) else TrainLoader
        return kind(self.data.train, size, self.world, seed=seed, options=options)

    def predict_loader(self) -> EvalLoader | None:
        """Returns the loader of inputs without targets; without these, the evaluation's."""
        if self.data.predict is None:
            return self.eval_loader()
        size, options = self.config.data["batch_size"], self.options.loader
        if self.data.predict_collate is not None:
            options = replace(options, collate=self.data.predict_collate)
        return EvalLoader(self.data.predict, size, self.world, options=options, inputs_alone=True)

    def eval_loader(self) -> EvalLoader | None:
        """Returns the loader of the evaluation split, if there is one."""
        if self.data.eval is None:
            return None
        return EvalLoader(
            self.data.eval,
            self.config.data["batch_size"],
            self.world,
            options=self.options.loader,
            classes=self.data.metadata.get("classes"),
        )


@contextmanager
def writing(directory: RunDirectory, world: World) -> Iterator[None]:
    """Makes the run directory, and keeps it from other writers until the end of the block.

    Raises:
        ConfigError: it cannot be written to.
        UserError: another process writes to it.
    """
    directory.create()
    lock = RunLock(directory.path)
    world.on_main(lock.acquire)
    try:
        yield
    finally:
        lock.release()


def setup_run(
    settings: Settings, *, writes: bool = False, reuse_plan: bool = True, predicts: bool = False
) -> RunContext:
    """Checks the config, joins the other processes, loads the data and builds the model.

    Nothing is written, but the logs of a run directory that exists.

    Args:
        settings: the settings of the command.
        writes: the command is going to write to the run directory (`writing`).
        reuse_plan: cut a resumed run by its own plan if that was made with the same settings.
        predicts: the command is going to predict `data.predict_path`, for which training data is
            loaded only if it must be.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    setup = set_up(settings, join, writes, predicts)
    world, options = setup.world, setup.options.pipeline
    if reuse_plan:
        split: Any = world.on_main(lambda: _split_or_plan(settings, setup.directory, setup.store))
        options = replace(options, split=world.broadcast(split))
    model = HybridModel.construct(setup.build, world, options, example_inputs=setup.example_inputs)
    loss_fn = setup.options.loss_fn
    with errors_with_config_keys({"loss": "trainer.loss", "loss_fn": "trainer.loss"}):
        model.resolve_loss(loss_fn)  # refuses what cannot be weighted
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(model.pipeline.output_device)
    return RunContext(**vars(setup), model=model)


def join(config: Config) -> World:
    """Joins the other processes, those that the launcher has announced."""
    if config.trainer.deterministic:
        # cuBLAS reads it with its first matrix product, and repeats its results with it alone
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return World.from_env(
        config.pipeline.nb_part,
        config.world.devices,
        config.world.backend,
        config.world.timeout_s,
        config.world.engine,
        config.world.stall_s or 0,
        config.world.inner,
    )


def _set_numerics(deterministic: bool, tf32: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32  # PyTorch's own default is True


def set_up(
    settings: Settings, world_of: Callable[[Config], World], writes: bool, predicts: bool = False
) -> Setup:
    """Checks the config, joins the other processes by `world_of`, and loads the data.

    Raises:
        UserError: a value of the config is wrong, or the run directory cannot be written to.
    """
    config = without_auto(settings)
    leave_out_leftovers(settings)
    options = checked_options(config)
    world = world_of(config)
    if (of_rank_0 := agreed(config, world)) != config:
        config = of_rank_0
        options = checked_options(config)
    directory = RunDirectory(config)
    world.watch(directory.path / "stalls")
    raise_on_signals()
    store = CheckpointStore(
        directory.checkpoints,
        config.checkpoint.keep,
        config.checkpoint.background,
        config.checkpoint.writers,
    )
    if writes:
        directory.check_writable()
        world.on_main(RunLock(directory.path).check)
        if (initial := parse_init_from(config.init_from)) and not store.steps():
            world.on_main(lambda: find_weights(initial["source"]))
    directory.log_to_files(world.rank, settings.quiet)
    for note in settings.notes:
        _log.info("%s", note)
    if predicts and config.data.get("predict_path") is not None:
        checkpoint = checkpoint_to_read(config.resume, store, world)
        data = load_for_trained(settings, world, checkpoint, samples=True)
    else:
        data = load_data(config, world)
    _log.info("%s", data)
    if data.without_samples:
        _log.warning("no training sample has the class %s", ", ".join(data.without_samples[:8]))
    config = chosen(settings, config, data, world, options.pipeline.optimizer_tensors_per_param)
    if settings.config.data.get("batch_size") == AUTO:
        config = with_largest_batch(config, data, world, options)
    if settings.config.pipeline.nb_part == AUTO:
        world = world.divided(config.pipeline.nb_part, config.world.devices)
    options = replace(
        options,
        pipeline=replace(
            options.pipeline, chunks=config.pipeline.chunks, schedule=config.pipeline.schedule
        ),
        loader=replace(options.loader, collate=data.collate),
    )
    _set_numerics(config.trainer.deterministic, config.trainer.tf32)
    torch.manual_seed(config.seed)
    share = -(-config.data["batch_size"] // world.replicas)  # of the same samples on every replica
    if share < config.pipeline.chunks:
        _log.warning(
            "pipeline.chunks=%d, but a replica's batch has %d samples: it is cut into %d "
            "micro-batches",
            config.pipeline.chunks,
            share,
            share,
        )
    draws = default_generators()
    example = _example(data, share)
    rewind(draws)  # transforms may draw, and the model draws its values first

    return Setup(
        settings,
        config,
        directory,
        store,
        world,
        data,
        partial(build_model, config, data),
        example[0],
        example[1],
        options,
    )


def _example(data: DataSplits, samples: int) -> Any:
    """Returns a batch of training samples, or of those to predict if there are no others."""
    if data.predict is None or length_of(data.train) != 0:
        return example_batch(data.train, samples, data.collate)
    inputs: Any = data.predict
    collate = WithoutTargets(data.predict_collate or data.collate or already_batched)
    if length := length_of(inputs):
        inputs = Subset(inputs, [number % length for number in range(samples)])
    return example_batch(inputs, samples, collate)


def checked_options(config: Config) -> RunOptions:
    """Makes what needs neither processes nor data, and so finds what is wrong there."""
    check(config)
    parse_init_from(config.init_from)
    check_choice("world.engine", config.world.engine, ENGINES)
    check_choice("world.inner", config.world.inner, ("pp", "dp"))
    loss_fn = build_loss(config)
    metrics = build_metrics(config, loss_fn)
    build_callbacks(config, RunDirectory(config))  # refuses what does not fit
    pipeline_options = PipelineOptions(
        **arguments_of(config, PipelineOptions),
        seed=config.seed,
        optimizer_tensors_per_param=optimizer_tensors_per_param(config.optim, config.allow_targets),
    )
    arguments = arguments_of(config, TrainerOptions)
    arguments["checkpoint_every_steps"] = config.checkpoint.every_steps or None  # 0: no store
    trainer_options = TrainerOptions(**arguments)
    with errors_with_config_keys({name: f"data.{name}" for name in LOADER_OPTIONS}):
        settings = {name: config.data[name] for name in LOADER_OPTIONS if name in config.data}
        loader_options = LoaderOptions(**settings)
    return RunOptions(pipeline_options, trainer_options, loader_options, loss_fn, metrics)


def build_files(directory: RunDirectory) -> Monitor:
    """Returns the monitors of rank 0 that every run has, as one."""
    return Monitors(
        [
            MetricsFile(directory.path / "metrics.jsonl"),
            TimelineFiles(directory.path),
            Progress(LogLines()),  # type: ignore[arg-type]
        ]
    )


def _split_or_plan(settings: Settings, directory: RunDirectory, store: CheckpointStore) -> Any:
    """Returns the path of a resumed run's plan if it still fits, or the config's split."""
    split = settings.config.pipeline.split
    if split not in ("time", "memory", "balanced") or not directory.plan.exists():
        return split
    if settings.config.resume is None or not store.steps():
        return split
    for change in settings.changes:
        if change.key.startswith(("model.", "pipeline.")):
            _log.info("measured again: %s has changed since the plan was made", change.key)
            return split
    _log.info("cut as in %s", directory.plan)
    return str(directory.plan)
