"""Prices the layouts of the run that a config describes."""

from __future__ import annotations

import time

from torch import nn

from hybridtrain.app import instantiate
from hybridtrain.app.config import ClusterConfig, Config
from hybridtrain.construction import construct_on_meta
from hybridtrain.data.splits import DataSplits
from hybridtrain.data.stream import example_batch
from hybridtrain.errors import ConfigError
from hybridtrain.machine import Machine
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.priced import PricedPlans, find_plans

# Samples of a micro-batch that layers are looked at with, and that are loaded to time the data.
_SAMPLES = 16


def machine_of(config: ClusterConfig) -> Machine:
    """Returns the machine of a config.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Machine(**{name: value for name, value in vars(config).items() if name != "costs"})


def price_run(
    config: Config,
    data: DataSplits,
    machine: Machine,
    choices: Choices,
    optimizer_tensors_per_param: int,
    costs: str,
    samples: int | None = None,
) -> PricedPlans:
    """Returns the fastest layouts of a run; the model is made without values.

    Args:
        config: the run.
        data: its data, of which some samples are loaded, and timed.
        machine: the hardware, all of which is used.
        choices: what may be chosen from.
        optimizer_tensors_per_param: as in `Job`.
        costs: `estimated` or `measured`, as for `find_plans`.
        samples: of a batch over all replicas; None: as configured.

    Raises:
        ConfigError: a batch has one sample, or no layout uses all devices.
        SplitError: the model cannot be cut, or nothing fits into memory.
    """
    samples = samples or config.data["batch_size"]
    count = min(_SAMPLES, samples)
    if count < 2:
        raise ConfigError("data.batch_size=1 leaves nothing to plan: it needs at least 2 samples")
    example_batch(data.train, count, data.collate)  # the first time opens files
    begin = time.perf_counter()
    inputs = example_batch(data.train, count, data.collate)[0]
    load_ms = (time.perf_counter() - begin) / count * 1e3

    def build() -> nn.Module:
        return instantiate.build(
            "model", config.model, nn.Module, config.allow_targets, defaults=data.metadata
        )

    return find_plans(
        construct_on_meta(build),
        inputs,
        machine,
        Job(samples, config.trainer.accumulate, optimizer_tensors_per_param, load_ms),
        choices=choices,
        costs=costs,
        precision=config.trainer.precision,
        tf32=config.trainer.tf32,
    )
