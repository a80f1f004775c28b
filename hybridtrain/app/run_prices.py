"""Prices the layouts of the run that a config describes."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace

import torch
import yaml
from torch import nn

from hybridtrain.app import instantiate
from hybridtrain.app.cluster_files import measured_file
from hybridtrain.app.config import ClusterConfig, Config
from hybridtrain.construction import construct_on_meta
from hybridtrain.data.splits import DataSplits
from hybridtrain.data.stream import example_batch
from hybridtrain.errors import ConfigError
from hybridtrain.machine import GIB, Machine
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.priced import PricedPlans, find_plans
from hybridtrain.world import World

# Samples of a micro-batch that layers are looked at with, and that are loaded to time the data.
_SAMPLES = 16


def machine_of(config: ClusterConfig) -> Machine:
    """Returns the machine of a config.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Machine(**{name: value for name, value in vars(config).items() if name != "costs"})


def machine_of_run(config: Config, world: World) -> Machine:
    """Returns the machine of a config, or this one, with the devices of the run.

    This one has the rates that `measure-machine` found, if it has been called here.

    Raises:
        ConfigError: a value is out of its range, or what was measured cannot be read.
    """
    first = world.devices[0]
    if config.cluster is not None:
        machine = machine_of(config.cluster)
    elif (known := this_machine()) is not None and known.device == first.type:
        machine = known
    elif first.type == "cuda":
        gib = torch.cuda.get_device_properties(first).total_memory / GIB
        machine = Machine(memory_gib=gib)
    else:
        machine = Machine(device="cpu", reserved_gib=0.0)
    if first.type == "cpu" and config.cluster is None:  # all devices share the host's memory
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        machine = replace(machine, memory_gib=gib / (world.size * len(world.devices)))
    if (limit := config.pipeline.memory_limit_gib) is not None:
        machine = replace(machine, memory_gib=limit, reserved_gib=0.0)
    devices = world.cluster.nb_part * world.replicas
    nodes, rest = divmod(devices, machine.devices_per_node)
    if config.cluster is None or rest:
        return replace(machine, nodes=1, devices_per_node=devices)
    return replace(machine, nodes=nodes)


def this_machine() -> Machine | None:
    """Returns this machine as `measure-machine` found it; None: it was not called here.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = measured_file()
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    names = {each.name for each in fields(Machine)}
    return Machine(**{name: value for name, value in dict(found).items() if name in names})


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
