"""The command `plan` for a machine: the price of a run before it is run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from hybridtrain.app.auto import without_auto
from hybridtrain.app.build import checked_options
from hybridtrain.app.compose import given_keys
from hybridtrain.app.load_data import load_data
from hybridtrain.app.run_directory import RunDirectory
from hybridtrain.app.run_lock import RunLock
from hybridtrain.app.run_prices import machine_of, model_of_run
from hybridtrain.app.settings import Settings
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import ConfigError
from hybridtrain.launch.environment import detect
from hybridtrain.planning.layout import Choices, Job, Layout
from hybridtrain.planning.priced import find_plans, in_words
from hybridtrain.world import World

_log = logging.getLogger(__name__)


def plan_for_cluster(settings: Settings) -> dict[str, Any]:
    """Prices the run on the machine of the config, shows the ten best plans and writes the best.

    Keys of `pipeline` and `world` that the command line sets are kept; all others are searched.

    Raises:
        ConfigError: the machine is not described well, or nothing uses all of it.
        SplitError: nothing fits into memory.
    """
    config = without_auto(settings)
    if detect(os.environ).size > 1:
        raise ConfigError("plan with a cluster= needs one process: start it without torchrun")
    assert config.cluster is not None
    machine = machine_of(config.cluster)
    pipeline_options = checked_options(config)[0]
    directory = RunDirectory(config)
    directory.check_writable()
    directory.log_to_files(0)
    data = load_data(config, World())
    tensors = pipeline_options.optimizer_tensors_per_param
    run = model_of_run(config, data)
    plans = find_plans(
        run.net,
        run.inputs,
        machine,
        Job(config.data["batch_size"], config.trainer.accumulate, tensors, run.load_ms),
        choices=_fixed(settings),
        costs=config.cluster.costs,
        precision=config.trainer.precision,
        tf32=config.trainer.tf32,
    )
    best = plans.prices[0]
    _log.info(
        "%s on %d x %d devices, batches of %d samples; times are predicted, from %s costs\n%s",
        plans.table.model,
        machine.nodes,
        machine.devices_per_node,
        plans.job.samples,
        plans.table.costs_from,
        plans,
    )
    _log.info("the best: %s", in_words(best))
    directory.create()
    lock = RunLock(directory.path)
    lock.acquire()
    try:
        begun = CheckpointStore(directory.checkpoints).steps()
        path = directory.plan.with_stem("plan.new" if begun else "plan")
        plans.plan().write(path)
    finally:
        lock.release()
    keys = " ".join([f"pipeline.split={path}", *overrides_of(best.layout)])
    _log.info("wrote %s; to train with it: %s", path, keys)
    return {"step_ms": round(best.step_ms, 3), "memory_bytes": best.peak_bytes}


def overrides_of(layout: Layout) -> list[str]:
    """Returns the overrides that a run of this layout needs, beside the split."""
    values = {
        "pipeline.nb_part": layout.nb_part,
        "pipeline.chunks": layout.chunks,
        "pipeline.schedule": layout.schedule,
        "pipeline.stages_per_device": layout.stages_per_device,
        "pipeline.checkpoint": layout.checkpoint,
        "world.engine": layout.engine,
    }
    if layout.shard != "none":
        values["world.shard"] = layout.shard
    return [f"{key}={value}" for key, value in values.items()]


def _fixed(settings: Settings) -> Choices:
    """Returns what the search may choose from: what the command line sets is fixed."""
    given = {key.partition("=")[0] for key in given_keys(settings.overrides)}
    values: dict[str, Sequence[Any]] = {}
    for key in ("nb_part", "chunks", "schedule", "stages_per_device", "checkpoint"):
        value = getattr(settings.config.pipeline, key)
        if f"pipeline.{key}" in given and value != "auto":
            values[key] = [value]
    for key in ("engine", "shard"):
        if f"world.{key}" in given:
            values[key] = [getattr(settings.config.world, key)]
    if values.get("checkpoint", ["never"])[0] not in ("never", "always", "except_last"):
        raise ConfigError(
            f"pipeline.checkpoint={values['checkpoint'][0]} is not priced: use never, except_last "
            f"or always, or leave it to the search"
        )
    return Choices(**values)
