"""The keys that may be `auto`: `pipeline.chunks` and `pipeline.schedule`.

They are chosen at the start of a run, by the predicted time of a step. A run that goes on keeps
what was chosen when it began, so that its steps stay the same.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from hybridtrain.app.config import Config, PipelineConfig
from hybridtrain.app.run_prices import machine_of_run, price_run
from hybridtrain.app.settings import Settings
from hybridtrain.data.splits import DataSplits
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.machine import GIB
from hybridtrain.planning.layout import Choices
from hybridtrain.world import World

_log = logging.getLogger(__name__)

AUTO = "auto"
_KEYS = ("chunks", "schedule")


def auto_keys(config: Config) -> list[str]:
    """Returns the keys of `pipeline` that are `auto`."""
    return [key for key in _KEYS if getattr(config.pipeline, key) == AUTO]


def without_auto(settings: Settings) -> Config:
    """Returns the config with the values of the run, or defaults, in the place of `auto`."""
    keys = auto_keys(settings.config)
    if not keys:
        return settings.config
    known = settings.of_run.pipeline if settings.of_run is not None else PipelineConfig()
    values = {key: getattr(known, key) for key in keys}
    defaults = {key: getattr(PipelineConfig, key) for key in keys}
    values = {key: defaults[key] if v == AUTO else v for key, v in values.items()}
    return replace(settings.config, pipeline=replace(settings.config.pipeline, **values))


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
    keys = auto_keys(settings.config)
    if not keys or settings.of_run is not None:
        return config
    values = world.broadcast(world.on_main(lambda: _choose(keys, config, data, world, tensors)))
    assert values is not None
    return replace(config, pipeline=replace(config.pipeline, **values))


def _choose(
    keys: list[str], config: Config, data: DataSplits, world: World, tensors: int
) -> dict[str, Any]:
    pipeline = config.pipeline
    share = -(-config.data["batch_size"] // world.replicas)
    choices = Choices(
        nb_part=[world.cluster.nb_part],
        engine=[config.world.engine],
        chunks=None if "chunks" in keys else [min(pipeline.chunks, share)],
        schedule=("1f1b", "gpipe") if "schedule" in keys else [pipeline.schedule],
        stages_per_device=[pipeline.stages_per_device],
        checkpoint=[_priced_mode(pipeline.checkpoint)],
        shard=[config.world.shard],
    )
    costs = config.cluster.costs if config.cluster is not None else "measured"
    try:
        plans = price_run(
            config,
            data,
            machine_of_run(config, world),
            choices,
            tensors,
            costs,
            samples=share * world.replicas,
        )
    except (ConfigError, SplitError) as error:
        auto = ", ".join(f"pipeline.{key}=auto" for key in keys)
        raise type(error)(f"{auto}: {error}") from error
    best = plans.prices[0]
    values = {key: getattr(best.layout, key) for key in keys}
    others = [one for one in plans.prices[1:] if one.step_ms > best.step_ms]
    _log.info(
        "%s: %.1f ms per step, predicted from %s costs; bubble %.0f%%, %.2f GiB per device%s",
        ", ".join(f"pipeline.{key}={value}" for key, value in values.items()),
        best.step_ms,
        plans.table.costs_from,
        100 * best.bubble,
        best.peak_bytes / GIB,
        f"; the next best has {others[0].step_ms:.1f} ms ({others[0].layout.chunks} chunks, "
        f"{others[0].layout.schedule})"
        if others
        else "",
    )
    return values


def _priced_mode(checkpoint: object) -> str:
    """Returns the mode of activation checkpointing, of single layers about that of whole stages."""
    return checkpoint if isinstance(checkpoint, str) else "always"
