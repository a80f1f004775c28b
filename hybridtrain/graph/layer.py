"""A model as an ordered list of layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hybridtrain.errors import SplitError


@dataclass(frozen=True)
class Layer:
    """One element of the chain: where it stands in the user's model, and the module itself."""

    name: str
    module: nn.Module


def layers_of(net: nn.Module) -> list[Layer]:
    """The layers of a chain, nested `nn.Sequential`s flattened, under the names that `net` gives.

    A `Sequential` with hooks stays whole, because flattened its hooks would not run.

    Raises:
        SplitError: `net` has no layers.
    """
    layers = _flatten("", net)
    if not layers:
        raise SplitError("the model has no layers")
    return layers


def is_chain(module: nn.Module) -> bool:
    """Whether `module` only runs its children one after the other."""
    if not isinstance(module, nn.Sequential) or has_hooks(module):
        return False
    return type(module).forward is nn.Sequential.forward


def has_hooks(module: nn.Module) -> bool:
    """Whether something of the user's runs before or after the forward or backward of `module`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def works_in_place(module: nn.Module) -> bool:
    """Returns whether a module in `module` says that it may change its input: `ReLU(inplace=True)`."""
    return any(getattr(part, "inplace", False) for part in module.modules())


def _flatten(name: str, module: nn.Module) -> list[Layer]:
    if not is_chain(module):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    # not named_children(), which drops a module's second appearance
    return [
        layer
        for child_name, child in module._modules.items()
        if child is not None
        for layer in _flatten(prefix + child_name, child)
    ]
