"""A model as an ordered list of layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hybridtrain._torch_private import has_hooks
from hybridtrain.errors import SplitError


@dataclass(frozen=True)
class Layer:
    """One element of a chain: its name in the user's model, and the module itself."""

    name: str
    module: nn.Module


def layers_of(net: nn.Module) -> list[Layer]:
    """Returns the layers of a chain, nested `nn.Sequential`s flattened, under their names in `net`.

    A `Sequential` with hooks stays one layer: flattened, its hooks would not run.

    Raises:
        SplitError: `net` has no layers.
    """
    layers = _flatten("", net)
    if not layers:
        raise SplitError("the model has no layers")
    return layers


def is_chain(module: nn.Module) -> bool:
    """Returns whether `module` only runs its children one after the other."""
    if not isinstance(module, nn.Sequential) or has_hooks(module):
        return False
    return type(module).forward is nn.Sequential.forward


def _flatten(name: str, module: nn.Module) -> list[Layer]:
    if not is_chain(module):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    return [
        layer
        # named_children() would leave out a module's second appearance
        for child_name, child in module.named_modules(remove_duplicate=False)
        if child_name and "." not in child_name
        for layer in _flatten(prefix + child_name, child)
    ]


def works_in_place(module: nn.Module) -> bool:
    """Returns whether a module in `module` has `inplace = True`, as `nn.ReLU(inplace=True)` has."""
    return any(getattr(part, "inplace", False) for part in module.modules())
