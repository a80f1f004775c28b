"""Prices the layouts of the run that a config describes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields, replace
from typing import Any

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

# Samples of a micro-batch that layers are looked at with, and that are loaded to time the data.
_SAMPLES = 16


def machine_of(config: ClusterConfig) -> Machine:
    """Returns the machine of a config.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Machine(**{name: value for name, value in vars(config).items() if name != "costs"})


def machine_of_run(config: Config, device: torch.device, devices: int) -> Machine:
    """Returns the machine of a config, or this one, with as many devices as a run has.

    This one has the rates that `measure-machine` found, if it has been called here.

    Args:
        config: the run.
        device: one of its devices.
        devices: how many it has, in all pipelines.

    Raises:
        ConfigError: a value is out of its range, or what was measured cannot be read.
    """
    if config.cluster is not None:
        machine = machine_of(config.cluster)
    elif (known := this_machine()) is not None and known.device == device.type:
        machine = known
    elif device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / GIB
        machine = Machine(memory_gib=gib)
    else:
        machine = Machine(device="cpu", reserved_gib=0.0)
    if device.type == "cpu" and config.cluster is None:  # all devices share the host's memory
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        machine = replace(machine, memory_gib=gib / devices)
    machine = with_limit(machine, config)
    nodes, rest = divmod(devices, machine.devices_per_node)
    if config.cluster is None or rest:
        return replace(machine, nodes=1, devices_per_node=devices)
    return replace(machine, nodes=nodes)


def with_limit(machine: Machine, config: Config) -> Machine:
    """Returns the machine with devices of `pipeline.memory_limit_gib`, where that is set."""
    limit = config.pipeline.memory_limit_gib
    return machine if limit is None else replace(machine, memory_gib=limit, reserved_gib=0.0)


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


@dataclass(frozen=True)
class RunModel:
    """The parts of a run that a price needs.

    Attributes:
        net: the model without values.
        inputs: of a micro-batch that layers are looked at with.
        load_ms: of a sample.
    """

    net: nn.Module
    inputs: Any
    load_ms: float


def model_of_run(config: Config, data: DataSplits) -> RunModel:
    """Returns the model of a run, without values, and a batch of its data.

    Raises:
        ConfigError: a batch has one sample.
    """
    count = min(_SAMPLES, config.data["batch_size"])
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

    return RunModel(construct_on_meta(build), inputs, load_ms)
