"""A model as a chain of layers: what a pipeline cuts between.

The *units* of a chain depend on the model alone: the elements of an `nn.Sequential`, or the modules
that the model's own forward calls, where containers and modules with a large share of the
parameters are opened. A unit may be opened further to balance stages; its layers keep the unit's
number, so that random draws do not depend on how finely the model was split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from hybridtrain._base.torch_private import compiled_module, has_hooks
from hybridtrain.errors import ConfigError, SplitError, phrase, setting
from hybridtrain.graph.call_signature import arguments_of

# A module with more than this share of the bytes of a model's parameters is opened.
LARGE_SHARE = 1 / 8


@dataclass(frozen=True)
class Layer:
    """One element of a chain: its name in the user's model, and the module itself."""

    name: str
    module: nn.Module


def layers_of(net: nn.Module) -> list[Layer]:
    """Returns the layers of a chain by their names in `net`, flattening nested `nn.Sequential`s.

    A `Sequential` with hooks stays one layer: flattened, its hooks would not run.

    Raises:
        SplitError: `net` has no layers.
    """
    layers = _flatten("", net)
    if not layers:
        raise SplitError("the model has no layers")
    return layers


def is_chain(module: nn.Module) -> bool:
    """Returns whether `module` only runs its children in sequence."""
    if not isinstance(module, nn.Sequential) or has_hooks(module):
        return False
    return type(module).forward is nn.Sequential.forward


def _flatten(name: str, module: nn.Module) -> list[Layer]:
    if not is_chain(module):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    return [
        layer
        # named_children() would omit a module's second occurrence
        for child_name, child in module.named_modules(remove_duplicate=False)
        if child_name and "." not in child_name
        for layer in _flatten(prefix + child_name, child)
    ]


def works_in_place(module: nn.Module) -> bool:
    """Returns whether `module` contains an in-place module, such as `nn.ReLU(inplace=True)`."""
    return any(getattr(part, "inplace", False) for part in module.modules())


@dataclass(frozen=True)
class Chain:
    """The layers of a model, in the order in which they run.

    Attributes:
        layers: the layers.
        units: for each layer, the number of its unit, and its number among the unit's layers.
        no_cut_before: the positions (before layer i) at which the model cannot be cut, because a
            module is used on both sides.
        first_uses: for parameters, by name, the index of the layer in whose stage they are first
            used: in the layer, or in the code after it.
        opened: for units that are several layers, by their number, the module that the unit calls.
    """

    layers: list[Layer]
    units: list[tuple[int, int]]
    no_cut_before: frozenset[int] = frozenset()
    first_uses: Mapping[str, int] = field(default_factory=dict)
    opened: Mapping[int, str] = field(default_factory=dict)


def check_unwrapped(net: nn.Module) -> None:
    """Checks that `net` is a plain model, not a wrapper that changes how it runs.

    Raises:
        ConfigError: it is a wrapper; says what to pass instead.
    """
    if isinstance(net, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(net).__name__}, but {phrase('HybridModel')} is "
            "already data parallel: pass the wrapped module, net.module"
        )
    if compiled_module(net) is not None:
        raise ConfigError(
            "the model is compiled as a whole and cannot be split: pass the original module, and "
            f"{setting('compile', True)} to compile its stages"
        )


def initialize_lazy(net: nn.Module, example_inputs: Any) -> None:
    """Initializes lazy parameters by a forward in evaluation mode.

    Raises:
        ConfigError: there are lazy parameters but no `example_inputs`, or this forward does not use
            them.
    """
    if not _uninitialized(net):
        return
    if example_inputs is not None:
        args, kwargs = arguments_of(net, example_inputs)
        modes = {part: part.training for part in net.modules()}
        net.eval()
        try:
            with torch.no_grad():
                net(*args, **kwargs)
        finally:
            for part, mode in modes.items():
                part.training = mode
    if names := _uninitialized(net):
        raise ConfigError(
            f"{names[0]} is lazy and has no shape yet: pass example_inputs=<the inputs of a "
            "batch>, or call the model with a batch first"
        )


def _uninitialized(net: nn.Module) -> list[str]:
    tensors = (*net.named_parameters(), *net.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]
