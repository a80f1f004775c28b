"""A trained model on whatever devices are there: what it computes does not depend on its stages."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from hybridtrain.app.compose import given_keys
from hybridtrain.app.config import AUTO, PipelineConfig, WorldConfig
from hybridtrain.app.settings import Settings
from hybridtrain.launch.environment import detect


def fit_to_devices(settings: Settings) -> None:
    """Changes how a run's model is spread to what the devices and processes that are there can do.

    What the command line says stays. A line of the log says what the run had and what it gets.

    Args:
        settings: of a command that evaluates; their config may be changed.
    """
    if settings.of_run is None or settings.config.pipeline.nb_part == AUTO:
        return
    config, given = settings.config, set(given_keys(settings.overrides))
    launch = detect(os.environ)
    world, pipeline = replace(config.world), replace(config.pipeline)
    gpus = torch.cuda.device_count()
    if "world.devices" not in given and world.devices not in (None, "auto", "cpu"):
        world.devices = None  # the GPUs that there are, or the CPU
    on_gpus = gpus > 0 and world.devices != "cpu"
    if world.backend == "nccl" and not on_gpus and "world.backend" not in given:
        world.backend = None
    if "world.engine" not in given and launch.size % pipeline.nb_part:
        world.engine = "local"
    missing = on_gpus and launch.local_size * pipeline.nb_part > gpus
    if world.engine == "local" and missing and "pipeline.nb_part" not in given:
        pipeline.nb_part = max(1, gpus // launch.local_size)
        # what goes with another number of stages
        pipeline.split, pipeline.schedule, pipeline.stages_per_device = "uniform", "1f1b", 1
    pipeline.sync_batch_norm = False  # of training
    if (spread := _spread(world, pipeline)) != _spread(config.world, config.pipeline):
        of_run = _spread(settings.of_run.world, settings.of_run.pipeline)
        settings.notes.append(f"the run has {of_run}; here it is {spread}")
    settings.config = replace(config, world=world, pipeline=pipeline)


def _spread(world: WorldConfig, pipeline: PipelineConfig) -> str:
    devices = world.devices or ("cuda" if torch.cuda.device_count() else "cpu")
    stages = f"{pipeline.nb_part} stage{'s' * (pipeline.nb_part > 1)}"
    return f"{stages} (world.engine={world.engine}, world.devices={devices})"
