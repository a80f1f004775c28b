"""Parameters that layers of different stages share, such as tied embeddings.

The first stage that has the parameter owns it. Every other stage computes with an alias: a leaf
that shares the memory on the same device, and is a copy on another one. So two stages' threads
never add to one gradient, and each stage's DDP has parameters that no other has. After the backward
the aliases' gradients are added to the parameter's, in the order of the stages.

An alias is put into the layer's instance dictionary, where Python looks first; the module keeps the
parameter itself registered, under the user's names, counted once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.parameter import Parameter


@dataclass(frozen=True)
class TiedUse:
    """A use, by a later stage, of a parameter that an earlier stage owns."""

    module: nn.Module
    name: str
    parameter: Parameter


@dataclass(frozen=True)
class Alias:
    """The stand-in for a parameter that another stage owns."""

    parameter: Parameter
    alias: Parameter

    def refresh(self) -> None:
        """Copies the parameter's value; nothing to do where they share memory."""
        if self.alias.data_ptr() != self.parameter.data_ptr():
            with torch.no_grad():
                self.alias.copy_(self.parameter, non_blocking=True)

    def accumulate_into_owner(self) -> None:
        """Adds the alias's gradient to the parameter's and drops it."""
        gradient = self.alias.grad
        if gradient is None:
            return
        with torch.no_grad():
            moved = gradient.to(self.parameter.device, non_blocking=True)
            if self.parameter.grad is None:
                self.parameter.grad = moved.clone()
            else:
                self.parameter.grad += moved
        self.alias.grad = None


def tied_uses(stages: Sequence[Sequence[nn.Module]]) -> list[list[TiedUse]]:
    """Returns for each stage its uses of parameters that earlier stages own."""
    owner: dict[int, int] = {}
    uses: list[list[TiedUse]] = [[] for _ in stages]
    for index, layers in enumerate(stages):
        for module in {id(m): m for layer in layers for m in layer.modules()}.values():
            for name, parameter in module._parameters.items():
                if parameter is not None and owner.setdefault(id(parameter), index) != index:
                    uses[index].append(TiedUse(module, name, parameter))
    return uses


def remove_aliases(net: nn.Module) -> None:
    """Removes the aliases that an earlier pipeline has put into the layers of `net`."""
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it never has one
        for name in module._parameters:
            module.__dict__.pop(name, None)


def place_with_aliases(
    module: nn.Module, device: torch.device, uses: Sequence[TiedUse]
) -> list[Alias]:
    """Moves `module` to `device` and gives it aliases for the parameters in `uses`."""
    for use in uses:
        use.module._parameters[use.name] = None
    try:
        module.to(device)
    finally:
        for use in uses:
            use.module._parameters[use.name] = use.parameter
    aliases: dict[int, Alias] = {}
    for use in uses:
        if id(use.parameter) not in aliases:
            value = use.parameter.detach().to(device)
            alias = Parameter(value, requires_grad=use.parameter.requires_grad)
            # a copy of the module has no pipeline: its parameters are tied as the user's are
            alias.__deepcopy__ = partial(copy.deepcopy, use.parameter)  # type: ignore[method-assign]
            aliases[id(use.parameter)] = Alias(use.parameter, alias)
        use.module.__dict__[use.name] = aliases[id(use.parameter)].alias
    found = list(aliases.values())
    for number, one in enumerate(found):
        module.register_parameter(f"alias_{number}", one.alias)
    return found
