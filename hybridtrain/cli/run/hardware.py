"""The hardware of a run: of the config, as `measure-machine` measured it, or as PyTorch sees it."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
import yaml

from hybridtrain._base.hardware import GIB, Hardware, host_memory
from hybridtrain.cli.config.option_files import measured_file
from hybridtrain.cli.config.schema import Config, HardwareConfig
from hybridtrain.errors import ConfigError
from hybridtrain.price import DoesNotFit


def hardware_of(config: HardwareConfig) -> Hardware:
    """Returns the hardware that a config describes.

    Raises:
        ConfigError: a value is out of its range.
    """
    return Hardware(**{name: value for name, value in vars(config).items() if name != "costs"})


def hardware_of_run(config: Config, device: torch.device, devices: int) -> Hardware:
    """Returns the hardware of a config, or this machine, with as many devices as a run has.

    This machine has the rates that `measure-machine` measured, if it was called here.

    Args:
        config: the run.
        device: one of its devices.
        devices: how many it has, in all pipelines.

    Raises:
        ConfigError: a value is out of its range, or what was measured cannot be read.
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
    if device.type == "cpu" and config.hardware is None:  # all devices share the host's memory
        gib = host_memory() / GIB
        hardware = replace(hardware, memory_gib=gib / devices)
    hardware = with_limit(hardware, config)
    nodes, rest = divmod(devices, hardware.devices_per_node)
    if config.hardware is None or rest:
        return replace(hardware, nodes=1, devices_per_node=devices)
    return replace(hardware, nodes=nodes)


def with_limit(hardware: Hardware, config: Config) -> Hardware:
    """Returns the hardware with devices of `pipeline.memory_limit_gib`, where that is set."""
    limit = config.pipeline.memory_limit_gib
    return hardware if limit is None else replace(hardware, memory_gib=limit, reserved_gib=0.0)


def why_too_large(error: DoesNotFit, config: Config) -> str:
    """Returns why nothing fits, with the key that limits the memory and the least that would do."""
    limit = config.pipeline.memory_limit_gib
    if limit is None:
        return str(error)
    return (
        f"no plan fits: pipeline.memory_limit_gib={limit:g} is too small; the smallest that would "
        f"do is pipeline.memory_limit_gib={error.memory_gib:g} ({error.in_words})"
    )


def this_machine() -> Hardware | None:
    """Returns this machine as `measure-machine` measured it; None: it was not called here.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = measured_file()
    try:
        rates = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    names = {field.name for field in fields(Hardware)}
    return Hardware(**{name: value for name, value in dict(rates).items() if name in names})
