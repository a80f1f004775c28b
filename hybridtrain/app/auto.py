"""The keys that may be `auto`: `pipeline.nb_part`, `pipeline.chunks` and `pipeline.schedule`.

They are chosen at the start of a run, by the predicted time of a step. A run that goes on keeps
what was chosen when it began, so that its steps stay the same: its config has these values.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from hybridtrain.app.config import AUTO, Config, PipelineConfig, auto_keys, with_auto_replaced
from hybridtrain.app.run_prices import machine_of_run, model_of_run
from hybridtrain.app.settings import Settings
from hybridtrain.data.splits import DataSplits
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.launch.environment import detect
from hybridtrain.machine import GIB
from hybridtrain.planning.cost_table import CostTable
from hybridtrain.planning.layout import Choices, Job, divisors
from hybridtrain.planning.layout_search import find_layouts
from hybridtrain.planning.price import Price
from hybridtrain.planning.priced import model_costs
from hybridtrain.schedule import SCHEDULES
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# What chooses the number of stages by itself; a list, a plan or marks give it.
_SPLITS = ("uniform", "size", "time", "memory", "balanced")


def without_auto(settings: Settings) -> Config:
    """Returns the config with defaults in the place of `auto`.

    Raises:
        ConfigError: `pipeline.nb_part` is `auto`, and another key decides it.
    """
    config = settings.config
    defaults = PipelineConfig()
    if config.pipeline.nb_part == AUTO:
        split, devices = config.pipeline.split, config.world.devices
        if split not in _SPLITS:
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of stages, and pipeline.split={split} "
                f"gives it: set pipeline.nb_part= to that number, or pipeline.split=balanced"
            )
        if isinstance(devices, list):
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of devices, and world.devices={devices} "
                f"gives it: set pipeline.nb_part= to that number, or world.devices=cuda"
            )
    return replace(config, pipeline=with_auto_replaced(config.pipeline, defaults))


def chosen(
    settings: Settings, config: Config, data: DataSplits, world: World, tensors: int
) -> Config:
    """Returns `config` with the fastest values for the keys that are `auto`.

    Rank 0 chooses, and says what and why in one line; a collective call if a key is `auto`.

    Args:
        settings: of the command, where keys are `auto`.
        config: with values in their place.
        data: of the run.
        world: its processes.
        tensors: as `Job.optimizer_tensors_per_param`.

    Raises:
        ConfigError, SplitError: there is nothing to choose from; see `find_layouts`.
    """
    keys = auto_keys(settings.config.pipeline)
    if not keys:
        return config
    sizes = _pipeline_sizes(config, world) if "nb_part" in keys else [world.nb_part]
    values = world.broadcast(
        world.on_main(lambda: _choose(keys, sizes, config, data, world, tensors))
    )
    assert values is not None
    return replace(config, pipeline=replace(config.pipeline, **values))


def _pipeline_sizes(config: Config, world: World) -> list[int]:
    """Returns the numbers of devices that a pipeline may have; a collective call.

    All processes of a pipeline share them with `engine=distributed`; otherwise each process may
    use an equal share of its node's, and a divisor of that.
    """
    if world.engine == "distributed":
        return divisors(world.size)
    launch = detect(os.environ)
    if world.devices[0].type == "cuda":
        there = torch.cuda.device_count()
        if launch.local_size * there <= launch.node_gpus:  # Slurm shows each task its own alone
            there *= launch.local_size
    elif config.cluster is not None and config.cluster.device == "cpu":
        there = config.cluster.devices_per_node
    else:
        there = len(os.sched_getaffinity(0))
    return divisors(min(world.gather(max(1, there // launch.local_size))))


def _choose(
    keys: list[str],
    sizes: list[int],
    config: Config,
    data: DataSplits,
    world: World,
    tensors: int,
) -> dict[str, Any]:
    """Returns the fastest values of `keys`, with pipelines of one of `sizes` devices."""
    run = model_of_run(config, data)
    distributed = world.engine == "distributed"
    device = world.devices[0]

    @cache
    def costs(sharing: int) -> CostTable:
        return model_costs(
            run.net,
            run.inputs,
            machine_of_run(config, device, world.size),
            costs=config.cluster.costs if config.cluster is not None else "measured",
            precision=config.trainer.precision,
            tf32=config.trainer.tf32,
            sharing=sharing,
        )

    found: list[tuple[Price, str]] = []
    problems: list[ConfigError | SplitError] = []
    for nb_part in sizes:
        replicas = world.size // nb_part if distributed else world.size
        share = -(-config.data["batch_size"] // replicas)
        job = Job(share * replicas, config.trainer.accumulate, tensors, run.load_ms)
        machine = machine_of_run(config, device, nb_part * replicas)
        # CPU stages of a process share its threads
        sharing = 1 if distributed or device.type == "cuda" else nb_part
        choices = _choices(keys, nb_part, share, config)
        try:
            table = costs(sharing)
            prices = find_layouts(table, machine, job, choices)
            found += [(one, table.costs_from) for one in prices]
        except (ConfigError, SplitError) as error:
            problems.append(error)
    if not found:
        auto = ", ".join(f"pipeline.{key}=auto" for key in keys)
        raise type(problems[0])(f"{auto}: {problems[0]}") from problems[0]
    found.sort(key=lambda one: one[0].step_ms)
    best, costs_from = found[0]
    values = {key: getattr(best.layout, key) for key in keys}
    others = [one for one, _ in found if one.step_ms > best.step_ms]
    _log.info("%s", _why(values, best, others, costs_from))
    return values


def _choices(keys: list[str], nb_part: int, share: int, config: Config) -> Choices:
    """Returns what a search may choose from; `share` is a replica's part of a batch."""
    pipeline = config.pipeline
    return Choices(
        nb_part=[nb_part],
        engine=[config.world.engine],
        chunks=None if "chunks" in keys else [min(pipeline.chunks, share)],
        schedule=SCHEDULES if "schedule" in keys else [pipeline.schedule],
        stages_per_device=[pipeline.stages_per_device],
        checkpoint=[_priced_mode(pipeline.checkpoint)],
        shard=[config.world.shard],
    )


def _why(values: dict[str, Any], best: Price, others: list[Price], costs_from: str) -> str:
    """Returns what was chosen, and what it is better than, in one line."""
    told = ", ".join(f"pipeline.{key}={value}" for key, value in values.items())
    why = (
        f"{told}: {best.step_ms:.1f} ms per step, predicted from {costs_from} costs; "
        f"bubble {best.bubble:.0%}, {best.peak_bytes / GIB:.2f} GiB per device"
    )
    if others:
        other = ", ".join(f"{key}={getattr(others[0].layout, key)}" for key in values)
        why += f"; the next best has {others[0].step_ms:.1f} ms ({other})"
    return why


def _priced_mode(checkpoint: object) -> str:
    """Returns the mode of activation checkpointing, of single layers about that of whole stages."""
    return checkpoint if isinstance(checkpoint, str) else "always"
