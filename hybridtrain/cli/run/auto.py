"""Chooses values for `auto` keys when a run begins.

`pipeline.nb_part`, `pipeline.chunks` and `pipeline.schedule` get the values with the shortest
predicted step that fit into memory, `data.batch_size` the largest that fits. `schedule=auto` also
chooses the stages per device, recomputation, offloading and micro-batches unless they are set:
saving memory costs time, and the cheapest way depends on the model. A resumed run keeps the values
in its config, so that its steps stay the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from hybridtrain._base.construction import construct_on_meta
from hybridtrain._base.text_table import counted, with_unit
from hybridtrain.cli.config.overrides import given_keys
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.config.schema import (
    AUTO,
    Config,
    PipelineConfig,
    auto_keys,
    with_auto_replaced,
)
from hybridtrain.cli.run.components import build_model
from hybridtrain.cli.run.context import RunOptions
from hybridtrain.cli.run.hardware import arrangement_of_run, hardware_of_run, why_too_large
from hybridtrain.cli.run.prediction import predict_step_of_run, without_errors_of_fake_tensors
from hybridtrain.cli.run.run_model import SAMPLES, model_of_run
from hybridtrain.data import DataSplits, example_batch, length_of
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.launch import detect
from hybridtrain.loss import resolve
from hybridtrain.options import PipelineOptions, is_per_device
from hybridtrain.partitioning import MEASURED_SPLITS, CostTable, Planner, priced_mode
from hybridtrain.price import (
    Choices,
    DoesNotFit,
    Hardware,
    Price,
    StepWork,
    choice_in_words,
    divisors,
    find_layouts,
    model_costs,
    offload_in_words,
    proposed,
    recompute_option,
    why_not_priced,
)
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# Splits that choose the number of stages; a list, a plan or marks define it.
_SPLITS = ("uniform", "size", "time", "memory", "balanced")

# The keys that `schedule=auto` also chooses unless they are set.
_WITH_SCHEDULE = ("stages_per_device", "recompute", "chunks", "offload")


def without_auto(settings: Settings) -> Config:
    """Returns the config with defaults in place of `auto`.

    Raises:
        ConfigError: `pipeline.nb_part` is `auto`, but another key determines it.
    """
    config = settings.config
    defaults = PipelineConfig()
    if config.pipeline.nb_part == AUTO:
        split, devices = config.pipeline.split, config.world.devices
        if split not in _SPLITS:
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of stages, but pipeline.split={split} "
                f"already fixes it: set pipeline.nb_part= to that number, or "
                f"pipeline.split=balanced"
            )
        for key in ("device_speeds", "memory_limit_gib"):
            values = getattr(config.pipeline, key)
            if is_per_device(values):
                raise ConfigError(
                    f"pipeline.nb_part=auto chooses the number of devices, but "
                    f"pipeline.{key}={list(values)} already fixes it: set "
                    f"pipeline.nb_part={len(values)}"
                )
        if config.world.engine == "distributed" and config.world.replica_shares is not None:
            raise ConfigError(
                f"pipeline.nb_part=auto with world.engine=distributed chooses the number of "
                f"replicas, and world.replica_shares={config.world.replica_shares} gives it: set "
                f"pipeline.nb_part= to a number, or world.replica_shares=null"
            )
        if isinstance(devices, list):
            raise ConfigError(
                f"pipeline.nb_part=auto chooses the number of devices, but world.devices={devices} "
                f"already fixes it: set pipeline.nb_part= to that number, or world.devices=cuda"
            )
    if (keys := auto_keys(config.pipeline)) and config.data.get("batch_size") == AUTO:
        raise ConfigError(
            f"data.batch_size=auto and pipeline.{keys[0]}=auto depend on each other: set one of "
            f"them to a fixed value"
        )
    if config.data.get("batch_size") == AUTO:  # until `with_auto_chosen` has chosen
        config = replace(config, data={**config.data, "batch_size": SAMPLES})
    return replace(config, pipeline=with_auto_replaced(config.pipeline, defaults))


def with_auto_chosen(
    settings: Settings, config: Config, data: DataSplits, world: World, options: RunOptions
) -> Config:
    """Returns `config` with the best values for the keys that are `auto`.

    Rank 0 chooses, and logs its choice and the reason in one line; a collective call if a key is
    `auto`. It chooses the fastest values for keys of `pipeline`, and the largest batch that should
    fit for `data.batch_size`.

    Args:
        settings: the command's settings, with `auto` keys.
        config: the config with defaults in their place, see `without_auto`.
        data: the data of the run.
        world: its processes.
        options: the options of `config`.

    Raises:
        ConfigError, SplitError: there is nothing to choose from (see `find_layouts`), or one sample
            per micro-batch does not fit.
    """
    if keys := _chosen_keys(settings):
        sizes = _pipeline_sizes(config, world) if "nb_part" in keys else [world.nb_part]

        def choose() -> dict[str, Any]:
            try:
                return _choose(keys, sizes, config, data, world, options.pipeline)
            except (ConfigError, SplitError) as error:
                auto = [f"pipeline.{key}=auto" for key in auto_keys(settings.config.pipeline)]
                raise type(error)(f"{', '.join(auto)}: {error}") from error

        values = world.from_main(choose)
        return replace(config, pipeline=replace(config.pipeline, **values))
    if settings.config.data.get("batch_size") == AUTO:
        size = world.from_main(lambda: _largest_batch(config, data, world, options))
        return replace(config, data={**config.data, "batch_size": size})
    return config


def _chosen_keys(settings: Settings) -> list[str]:
    """Returns the keys of `pipeline` to choose: the `auto` keys, and those chosen with a schedule.

    With `schedule=auto`, keys keep values from the command line, and values in a recipe other than
    the default. A manual split fixes the number of stages.
    """
    pipeline, defaults = settings.config.pipeline, PipelineConfig()
    keys, set_keys = auto_keys(pipeline), given_keys(settings.overrides)
    for key in _WITH_SCHEDULE if "schedule" in keys else ():
        is_set = f"pipeline.{key}" in set_keys or getattr(pipeline, key) != getattr(defaults, key)
        by_hand = key == "stages_per_device" and pipeline.split not in _SPLITS
        if key not in keys and not is_set and not by_hand:
            keys.append(key)
    return keys


def _largest_batch(config: Config, data: DataSplits, world: World, options: RunOptions) -> int:
    """Returns the number of samples of the largest batch that should fit.

    It doubles the samples of a micro-batch, starting from one, while a step with the run's split
    fits into memory and the training split has enough samples.
    """
    device, pipeline = world.devices[0], options.pipeline
    if world.fixed_replicas is not None:
        raise ConfigError(
            "data.batch_size=auto depends on the number of processes, but world.replicas= keeps "
            "the run the same on any number: set data.batch_size= to a number of samples"
        )
    if (reason := why_not_priced(pipeline)) is not None:
        raise ConfigError(f"data.batch_size=auto: {reason}: set a number of samples")
    hardware = hardware_of_run(config, device, world.nb_part * world.data_parallel_size)
    limits = arrangement_of_run(hardware, world).usable_bytes(hardware, world.nb_part)
    net = construct_on_meta(lambda: build_model(config, data))
    loss_fn = resolve(options.loss_fn, net).function
    least, most = world.logical_replicas * pipeline.chunks, length_of(data.train)
    size, fits, usable, limit = least, 0, "", "the training split has no more samples"
    while size <= (most or size):
        share = max(world.samples_by_replica(size))
        example = example_batch(data.train, share, data.collate)
        planner = Planner(
            net,
            pipeline,
            example[0],
            world.stage_owners,
            costs="estimated",
        )
        planned = planner.layers_of(planner.plan())
        with without_errors_of_fake_tensors():
            prediction = predict_step_of_run(
                config, world, pipeline, data, planned, example, size, loss_fn
            )
        assert prediction.memory_bytes is not None
        needs = zip(prediction.memory_bytes, limits, strict=True)
        nbytes, most_bytes = max(needs, key=lambda need: need[0] / need[1])
        usable = with_unit(round(most_bytes))  # of the most loaded device
        if nbytes > most_bytes:
            limit = f"{size} would need {with_unit(nbytes)}"
            break
        fits, memory, size = size, nbytes, 2 * size
    if not fits:
        raise SplitError(
            f"data.batch_size=auto: {limit} of {usable} usable memory"
            if size <= (most or size)
            else f"data.batch_size=auto: the training split has {most} samples, fewer than the "
            f"{least} micro-batches: lower pipeline.chunks="
        )
    _log.info(
        "data.batch_size=%d: %s per micro-batch, %s of %s predicted per device; %s",
        fits,
        counted(fits // least, "sample"),
        with_unit(memory),
        usable,
        limit,
    )
    return fits


def _pipeline_sizes(config: Config, world: World) -> list[int]:
    """Returns the possible numbers of devices of a pipeline; a collective call.

    With `engine=distributed`, they are spread over the pipeline's processes. Otherwise each process
    may use an equal share of its node's devices, or a divisor of that.
    """
    if world.engine == "distributed":
        return divisors(world.size)
    launch = detect(os.environ)
    if world.devices[0].type == "cuda":
        there = torch.cuda.device_count()
        if launch.local_size * there <= launch.node_gpus:  # Slurm shows each task only its own GPUs
            there *= launch.local_size
    elif config.hardware is not None and config.hardware.device == "cpu":
        there = config.hardware.devices_per_node
    else:
        there = len(os.sched_getaffinity(0))
    return divisors(min(world.gather(max(1, there // launch.local_size))))


def _choose(
    keys: list[str],
    sizes: list[int],
    config: Config,
    data: DataSplits,
    world: World,
    options: PipelineOptions,
) -> dict[str, Any]:
    """Returns the fastest values of `keys` that fit, with pipelines of one of `sizes` devices.

    Args:
        keys: keys of `pipeline`.
        sizes: numbers of devices.
        config: the config of the run.
        data: the data of the run.
        world: its processes.
        options: the options of `config`.
    """
    run = model_of_run(config, data)
    distributed = world.engine == "distributed"
    device = world.devices[0]

    @cache
    def costs(sharing: int) -> CostTable:
        return model_costs(
            run.net,
            run.inputs,
            hardware_of_run(config, device, world.size),
            costs=config.hardware.costs if config.hardware is not None else "measured",
            precision=config.trainer.precision,
            tf32=config.trainer.tf32,
            sharing=sharing,
            loss=run.loss,
            optimizer_tensors_per_param=options.optimizer_tensors_per_param,
        )

    priced: list[Price] = []
    searched: dict[int, tuple[CostTable, Hardware, StepWork, Choices]] = {}
    problems: list[ConfigError | SplitError] = []
    for nb_part in sizes:
        replicas = world.size // nb_part if distributed else world.size
        size, shares = config.data["batch_size"], world.replica_shares
        # each pipeline is priced with as many as the one with the most
        logical = -(-(world.fixed_replicas or replicas) // replicas) * replicas
        share = -(-size // logical)
        tensors = options.optimizer_tensors_per_param
        work = StepWork(
            size if shares else share * logical, config.trainer.accumulate, tensors, run.load_ms
        )
        hardware = hardware_of_run(config, device, nb_part * replicas)
        # CPU stages of a process share its threads
        sharing = 1 if distributed or device.type == "cuda" else nb_part
        try:
            table = costs(sharing)
            # all other arrangements need other keys of `world`, which the run has
            devices = world.devices[:1] * (1 if distributed else nb_part)
            processes = nb_part if distributed else 1
            divided = replace(world, devices=devices, processes_per_replica=processes)
            placed = arrangement_of_run(hardware, divided)
            choices = replace(
                _choices(keys, nb_part, share, config, options),
                arrange=lambda *_, placed=placed: [placed],
                logical_replicas=None if shares else logical,
            )
            searched[nb_part] = table, hardware, work, choices
            priced += find_layouts(*searched[nb_part])
        except (ConfigError, SplitError) as error:
            problems.append(error)
    if not priced:
        raise _without_a_choice(problems, config)
    best = proposed(priced)
    values = {key: getattr(best.layout, key) for key in keys}
    if "recompute" in keys:
        values["recompute"] = recompute_option(best, table)
    prices = [best, *(price for price in priced if price is not best)]
    _log.info("%s", choice_in_words(prices, keys, table.costs_from))
    if (why := offload_in_words(prices, *searched[best.layout.nb_part])) is not None:
        _log.info("%s", why)
    return values


def _without_a_choice(
    problems: Sequence[ConfigError | SplitError], config: Config
) -> ConfigError | SplitError:
    """Returns the error to raise when no size of a pipeline works, from the problem of each size.

    If none fits into memory, it is the error of the size that needs the least.
    """
    too_large = [problem for problem in problems if isinstance(problem, DoesNotFit)]
    if not too_large:
        return problems[0]
    least = min(too_large, key=lambda problem: problem.memory_gib)
    return SplitError(why_too_large(least, config))


def _choices(
    keys: list[str], nb_part: int, share: int, config: Config, options: PipelineOptions
) -> Choices:
    """Returns the search space; `share` is a replica's part of a batch."""
    pipeline, free = config.pipeline, Choices()
    given_mode = priced_mode(pipeline.recompute)
    if given_mode == "layers":  # a search would choose others; whole stages cost about as much
        given_mode = "always"
    cuts_by_rule = options.split in _SPLITS
    modes = [
        mode
        for mode in free.recompute
        # the planner, which limits memory for such a split, does not handle single layers
        if mode != "layers" or options.split not in MEASURED_SPLITS
    ]
    return Choices(
        nb_part=[nb_part],
        engine=[config.world.engine],
        chunks=None if "chunks" in keys else [min(pipeline.chunks, share)],
        schedule=free.schedule if "schedule" in keys else [pipeline.schedule],
        stages_per_device=free.stages_per_device
        if "stages_per_device" in keys
        else [pipeline.stages_per_device],
        recompute=modes if "recompute" in keys else [given_mode],
        shard=[config.world.shard],
        offload=free.offload if "offload" in keys else [pipeline.offload],
        options=options if cuts_by_rule else None,
    )
