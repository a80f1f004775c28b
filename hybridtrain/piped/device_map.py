"""A model with a `device_map`: accelerate's hooks are removed, and the map is the split.

The hooks move values from device to device, which the pipeline does too. The layers stay where the
map has put them: a stage begins at the first module of each further device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain._base.tensors import is_quantized_parameter, packed_weight
from hybridtrain.errors import ConfigError, argument

# What a map calls memory that is not a device's own: weights come to a device for each forward.
_OFFLOADED = ("cpu", "disk", "meta")


class Placement(NamedTuple):
    """Where accelerate has put a model.

    Attributes:
        owner: the module with the map.
        devices: its devices.
        first_modules: the first module of each device but the first.
    """

    owner: nn.Module
    devices: list[str]
    first_modules: list[str]

    def release(self) -> None:
        """Removes the map, and accelerate's hooks."""
        if "accelerate" in sys.modules:  # or nothing has set any
            hooks: Any = import_module("accelerate.hooks")
            hooks.remove_hook_from_module(self.owner, recurse=True)
        del vars(self.owner)["hf_device_map"]


def placement_of(net: nn.Module) -> Placement | None:
    """Returns where accelerate has put a model; None if it has no map.

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
    offloaded = {name: str(d) for name, d in device_map.items() if str(d) in _OFFLOADED}
    if offloaded and not (set(offloaded.values()) == {"cpu"} and len(offloaded) == len(device_map)):
        name, place = next(iter(offloaded.items()))
        raise ConfigError(
            f"the device_map of {type(owner).__name__} offloads {name or 'the model'} to {place}, "
            "but offloaded weights cannot be trained here: load the model on devices that hold "
            "all of it (more of them, a smaller dtype, or without device_map, and set "
            f"{argument('recompute')} to save memory)"
        )
    placed: dict[str, str] = {}  # the first module of each device
    for name, device in device_map.items():
        placed.setdefault(str(_device(device)), ".".join(filter(None, (prefix, name))))
    return Placement(owner, list(placed), list(placed.values())[1:])


def refuse_to_move_quantized(net: nn.Module) -> None:
    """Refuses a model with quantized weights on a GPU, whose scales would stay behind in a move.

    Raises:
        ConfigError: a weight is quantized, and on a GPU.
    """
    for name, weight, kind in _quantized_weights(net):
        if weight.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"{name} is quantized ({kind}) and on {weight.device}, from "
                'where it cannot be moved: load the model with device_map="balanced" (max_memory= '
                f"sets the parts), which is then the split, and leave out {argument('split')} and "
                f"{argument('nb_part')}"
            )


def _quantized_weights(net: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Yields the name and the tensor of each quantized weight, and the class that keeps it."""
    for name, parameter in net.named_parameters():
        if is_quantized_parameter(parameter) and not parameter.requires_grad:
            yield name, parameter, type(parameter).__name__
    for prefix, layer in net.named_modules():
        if (packed := packed_weight(layer)) is not None:
            name, weight = packed
            yield f"{prefix}.{name}", weight, type(layer).__name__


def _device(value: Any) -> torch.device:
    return torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
