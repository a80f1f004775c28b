"""The objects of a trained run, with the weights of one of its checkpoints."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from hybridtrain.checkpoint import restore_checkpoint
from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import AUTO, PipelineConfig, WorldConfig
from hybridtrain.cli.run.build import build_run
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.moved_base import load_moved_base
from hybridtrain.cli.run.run_data import check_same_classes, say_other_data
from hybridtrain.data import EvalLoader, length_of
from hybridtrain.errors import ConfigError
from hybridtrain.launch import detect

_log = logging.getLogger(__name__)

AVERAGED = (
    "using the moving average of the weights, as in the run's evaluations (ema=false uses the "
    "weights themselves)"
)


class TrainedRun(NamedTuple):
    """A run with the weights of one of its checkpoints.

    Attributes:
        context: the objects of the run.
        loader: the loader of the data that the command reads.
        checkpoint: the path of the checkpoint.
        step: the step of the checkpoint.
    """

    context: RunContext
    loader: EvalLoader
    checkpoint: Path
    step: int


def load_trained_run(
    settings: Settings,
    loader_of: Callable[[RunContext], EvalLoader | None],
) -> TrainedRun:
    """Builds a run on the available devices, and loads a checkpoint into its model.

    Args:
        settings: the settings of a command that reads a run; `resume` names the checkpoint.
        loader_of: returns the loader of the data that the command reads.

    Raises:
        ConfigError: the data does not have these samples.
        CheckpointError: the checkpoint does not exist.
    """
    fit_to_devices(settings)
    context = build_run(settings, trained=True)
    config = context.config
    loader = loader_of(context)
    if loader is None:
        raise ConfigError(f"data._target_={config.data['_target_']} has no evaluation split")
    checkpoint = context.checkpoint
    assert checkpoint is not None
    context.world.on_main(lambda: check_same_classes(checkpoint, context.data))
    if length_of(context.data.train) != 0:  # 0: it was not loaded
        context.world.on_main(lambda: say_other_data(checkpoint, context.data))
    load_moved_base(context, checkpoint)
    saved = restore_checkpoint(checkpoint, context.model, evaluated=config.ema)
    if saved.get("averaged"):
        _log.info(AVERAGED)
    return TrainedRun(context, loader, checkpoint, saved["step"])


def fit_to_devices(settings: Settings) -> None:
    """Adapts a run's layout to the available devices and processes.

    It keeps settings from the command line, and logs the run's layout and the new one.

    Args:
        settings: the settings of a command that evaluates; this may change their config.
    """
    if settings.of_run is None:
        return
    config, set_keys = settings.config, set(given_keys(settings.overrides))
    launch = detect(os.environ)
    if "world.replica_shares" not in set_keys:  # of the replicas that it was trained on
        config = replace(config, world=replace(config.world, replica_shares=None))
        settings.config = config
    if config.pipeline.nb_part == AUTO:
        return
    world, pipeline = replace(config.world), replace(config.pipeline)
    gpus = torch.cuda.device_count()
    if "world.devices" not in set_keys and world.devices not in (None, "auto", "cpu"):
        world.devices = None  # all GPUs, or the CPU
    on_gpus = gpus > 0 and world.devices != "cpu"
    if world.backend == "nccl" and not on_gpus and "world.backend" not in set_keys:
        world.backend = None
    is_distributed = world.engine == "distributed"
    if is_distributed and "world.engine" not in set_keys and launch.size % pipeline.nb_part:
        world.engine = "local"
    missing = on_gpus and launch.local_size * pipeline.nb_part > gpus
    if world.engine != "distributed" and missing and "pipeline.nb_part" not in set_keys:
        pipeline.nb_part = max(1, gpus // launch.local_size)
        # keys that depend on the number of stages
        pipeline.split, pipeline.schedule, pipeline.stages_per_device = "uniform", "1f1b", 1
    pipeline.sync_batch_norm = False  # only for training
    if (spread := _spread(world, pipeline)) != _spread(config.world, config.pipeline):
        of_run = _spread(settings.of_run.world, settings.of_run.pipeline)
        settings.notes.append(f"the run has {of_run}; this command uses {spread}")
    settings.config = replace(config, world=world, pipeline=pipeline)


def _spread(world: WorldConfig, pipeline: PipelineConfig) -> str:
    devices = world.devices or ("cuda" if torch.cuda.device_count() else "cpu")
    stages = f"{pipeline.nb_part} stage{'s' * (pipeline.nb_part > 1)}"
    return f"{stages} (world.engine={world.engine}, world.devices={devices})"
