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

    @property
    def parameters(self) -> int:
        """The number of its parameters' elements."""
        return sum(p.numel() for p in self.module.parameters())


def layers_of(net: nn.Module) -> list[Layer]:
    """The layers of `net`, nested `nn.Sequential`s flattened, under the names that `net` gives.

    A `Sequential` with hooks stays whole, because flattened its hooks would not run.

    Raises:
        SplitError: `net` is no chain of layers, has none, or has one twice.
    """
    if not _is_chain(net) and type(net).forward is nn.Sequential.forward:
        raise SplitError(
            "the model itself has hooks, which would not run when its layers run by themselves: "
            "register them on its layers"
        )
    if not _is_chain(net):
        raise SplitError(
            f"{type(net).__name__} is not an nn.Sequential: give the model as an nn.Sequential of "
            f"its layers (nested ones are flattened), so that it can be cut between them"
        )
    layers = _flatten("", net)
    if not layers:
        raise SplitError("the model has no layers")
    first: dict[int, str] = {}
    for layer in layers:
        stateful = any(True for _ in (*layer.module.parameters(), *layer.module.buffers()))
        if first.setdefault(id(layer.module), layer.name) != layer.name and stateful:
            raise SplitError(
                f"layer {layer.name!r} is the same module as {first[id(layer.module)]!r}; a layer "
                f"can stand in the chain once: copy it, or put both uses into one layer"
            )
    return layers


def _is_chain(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _flatten(name: str, module: nn.Module) -> list[Layer]:
    if not _is_chain(module):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    # not named_children(), which drops a module's second appearance
    return [
        layer
        for child_name, child in module._modules.items()
        if child is not None
        for layer in _flatten(prefix + child_name, child)
    ]
