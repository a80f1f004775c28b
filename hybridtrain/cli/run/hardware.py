"""The hardware of a run: from the config, from `measure-machine`, or as PyTorch reports it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
import yaml

from hybridtrain._base.hardware import GIB, Hardware, host_memory
from hybridtrain.cli.config.option_files import measured_file
from hybridtrain.cli.config.schema import Config, HardwareConfig
from hybridtrain.errors import ConfigError
from hybridtrain.options import is_per_device
from hybridtrain.price import EQUAL, Arrangement, DoesNotFit, arranged
from hybridtrain.world import World


def hardware_of(config: HardwareConfig) -> Hardware:
    """Returns the hardware that a config describes.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Hardware(**{name: value for name, value in vars(config).items() if name != "costs"})


def hardware_of_run(config: Config, device: torch.device, devices: int) -> Hardware:
    """Returns the hardware of a config, or of this machine, with as many devices as a run has.

    The rates of this machine come from `measure-machine` if it has run here.

    Args:
        config: the run.
        device: one of its devices.
        devices: the number of devices in all pipelines.

    Raises:
        ConfigError: a value is out of its range, or the measurements cannot be read.
    """
    if config.hardware is not None:
        hardware = hardware_of(config.hardware)
    elif (measured := this_machine()) is not None and measured.device == device.type:
        hardware = measured
    elif device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / GIB
        hardware = Hardware(memory_gib=gib)
    else:
        hardware = Hardware(device="cpu", reserved_gib=0.0)
    hardware = in_order_of(config.world.devices, hardware, devices)
    if device.type == "cpu" and config.hardware is None:  # all devices share the host's memory
        gib = host_memory() / GIB
        hardware = replace(hardware, memory_gib=gib / devices)
    nodes, rest = divmod(devices, hardware.devices_per_node)
    if config.hardware is None or rest:
        hardware = hardware.with_devices(devices)
    else:
        hardware = replace(hardware, nodes=nodes)
    # with `inner=dp`, the devices of the same place have consecutive ranks
    by_place = config.world.engine == "distributed" and config.world.inner == "dp"
    return with_limit(hardware, config, by_place)


def in_order_of(devices: Any, hardware: Hardware, number: int) -> Hardware:
    """Returns the hardware with the unequal devices of a node in the order of `world.devices`.

    Args:
        devices: the value of `world.devices`. Only a list of GPUs of a node changes the order.
        hardware: the devices of a node by their index.
        number: the devices of the run. A shorter list that begins with the first GPU may be for
            processes that see only their own GPUs, and changes nothing.
    """
    if not hardware.is_unequal or devices in (None, "auto", "cpu", "cuda"):
        return hardware
    listed = [devices] if isinstance(devices, str) else devices
    chosen = [
        torch.device("cuda", it) if isinstance(it, int) else torch.device(it) for it in listed
    ]
    indices = [device.index or 0 for device in chosen]
    is_of_process = max(indices) < len(indices) < min(number, hardware.devices_per_node)
    if chosen[0].type != "cuda" or is_of_process or max(indices) >= hardware.devices_per_node:
        return hardware
    lists: dict[str, Any] = {
        name: [values[index] for index in indices]
        for name in ("device_speeds", "device_memory_gib")
        if (values := getattr(hardware, name)) is not None
    }
    return replace(hardware, devices_per_node=len(indices), **lists)


def arrangement_of_run(hardware: Hardware, world: World) -> Arrangement:
    """Returns the positions of a run's devices; `hardware` lists them in the order of ranks."""
    if not hardware.is_unequal and world.replica_shares is None:
        return EQUAL
    width, copies = len(world.devices), range(world.data_parallel_size)
    devices = [
        [
            (world.rank_of(copy, place // width) * width + place % width)
            % hardware.devices_per_node
            for place in range(world.nb_part)
        ]
        for copy in copies
    ]
    return arranged(hardware, devices, world.replica_shares or [1] * len(copies))


def with_limit(hardware: Hardware, config: Config, by_place: bool = False) -> Hardware:
    """Returns the hardware with `pipeline.memory_limit_gib` and `pipeline.device_speeds` applied.

    Args:
        hardware: the devices.
        config: the run; a list applies to each of its pipelines.
        by_place: list the devices of each place of all pipelines, not of each pipeline, in a row.
    """
    limit = config.pipeline.memory_limit_gib
    if isinstance(limit, int | float):
        hardware = replace(hardware, memory_gib=limit, reserved_gib=0.0, device_memory_gib=None)
    per_device = {"device_memory_gib": limit, "device_speeds": config.pipeline.device_speeds}
    for name, values in per_device.items():
        # the planner rejects a list with a different length than the pipeline
        if not is_per_device(values) or hardware.devices % len(values):
            continue
        # a pipeline over several nodes
        if hardware.devices_per_node % len(values) or (by_place and hardware.nodes > 1):
            hardware = hardware.with_devices(hardware.devices)
        copies = range(hardware.devices_per_node // len(values))
        repeated = (
            [value for value in values for _ in copies] if by_place else [*values] * len(copies)
        )
        changes: dict[str, Any] = {name: repeated}
        if name == "device_memory_gib":
            changes["reserved_gib"] = 0.0
        else:  # costs refer to the first device
            changes[name] = [speed / values[0] for speed in repeated]
        hardware = replace(hardware, **changes)
    return hardware


def why_too_large(error: DoesNotFit, config: Config) -> str:
    """Returns why nothing fits, with the key that limits memory and the least sufficient value."""
    limit = config.pipeline.memory_limit_gib
    if not isinstance(limit, int | float):
        return str(error)
    return (
        f"no plan fits: pipeline.memory_limit_gib={limit:g} is too small; it needs at least "
        f"pipeline.memory_limit_gib={error.memory_gib:g} ({error.in_words})"
    )


def this_machine() -> Hardware | None:
    """Returns this machine as `measure-machine` measured it; None: it has not run here.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = measured_file()
    try:
        rates = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    names = {field.name for field in fields(Hardware)}
    return Hardware(**{name: value for name, value in dict(rates).items() if name in names})
