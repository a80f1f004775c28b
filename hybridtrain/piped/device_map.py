"""A model with a `device_map`: accelerate's hooks are removed, and the map is the split.

The hooks move values from device to device, which the pipeline does too. The layers stay where the
map has put them: a stage begins at the first module of each further device.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridtrain.errors import ConfigError, argument

# What a map calls memory that is not a device's own: weights come to a device for each forward.
_OFFLOADED = ("cpu", "disk", "meta")


class Placed(NamedTuple):
    """The devices of a map, and the first module of each but the first."""

    devices: list[str]
    first_modules: list[str]


def take_device_map(net: nn.Module) -> Placed | None:
    """Returns the placement of a model on several devices, and removes accelerate's hooks.

    None: the model has no map, or is on one device.

    Raises:
        ConfigError: the map offloads modules.
    """
    found = next(
        ((name, part) for name, part in net.named_modules() if "hf_device_map" in vars(part)), None
    )
    if found is None:
        return None
    prefix, owner = found
    device_map: Mapping[str, Any] = vars(owner)["hf_device_map"]
    offloaded = [name for name, device in device_map.items() if str(device) in _OFFLOADED]
    if offloaded and len(offloaded) < len(device_map):
        raise ConfigError(
            f"the device_map of {type(owner).__name__} offloads {offloaded[0] or 'the model'} to "
            f"{device_map[offloaded[0]]}, and weights that come and go cannot be trained: load the "
            "model on devices that hold all of it (more of them, a smaller dtype, or without "
            f"device_map, and set {argument('recompute')} to save memory)"
        )
    placed: dict[str, str] = {}  # the first module of each device
    for name, device in device_map.items():
        placed.setdefault(str(_device(device)), ".".join(filter(None, (prefix, name))))
    _remove_hooks(owner)
    del vars(owner)["hf_device_map"]
    if len(placed) < 2:
        return None
    return Placed(list(placed), list(placed.values())[1:])


def _device(value: Any) -> torch.device:
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)


def _remove_hooks(module: nn.Module) -> None:
    if "accelerate" in sys.modules:  # or nothing has set any
        import_module("accelerate.hooks").remove_hook_from_module(module, recurse=True)
