"""Parameters that layers of different stages share, such as tied embeddings.

The parameter itself lives in the first stage that has it. Every other stage computes with an alias
of its own: a leaf that shares the memory on the same device, and is a copy on another. So two
stages' threads never add to one gradient, and each stage's DDP has parameters of its own. After
the backward the aliases' gradients are added to the parameter's, in the order of the stages.

An alias is put into the layer's instance dictionary, where Python looks first; the module keeps
the parameter itself registered, under the user's names, counted once.
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
    """Where a stage uses a parameter whose home is an earlier stage."""

    module: nn.Module
    name: str
    parameter: Parameter


@dataclass(frozen=True)
class Alias:
    """What the stage uses in its place."""

    parameter: Parameter
    alias: Parameter

    def refresh(self) -> None:
        """Takes over the parameter's value; nothing to do where they share memory."""
        if self.alias.data_ptr() != self.parameter.data_ptr():
            with torch.no_grad():
                self.alias.copy_(self.parameter, non_blocking=True)

    def accumulate_into_owner(self) -> None:
        """Moves the alias's gradient into the parameter's."""
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
    """For each stage, where it uses parameters whose home is an earlier one."""
    home: dict[int, int] = {}
    slots: list[list[TiedUse]] = [[] for _ in stages]
    for index, layers in enumerate(stages):
        for module in {id(m): m for layer in layers for m in layer.modules()}.values():
            for name, parameter in module._parameters.items():
                if parameter is not None and home.setdefault(id(parameter), index) != index:
                    slots[index].append(TiedUse(module, name, parameter))
    return slots


def remove_aliases(net: nn.Module) -> None:
    """Removes the aliases that an earlier pipeline has put into the layers of `net`."""
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it never has one
        for name in module._parameters:
            module.__dict__.pop(name, None)


def place(module: nn.Module, device: torch.device, slots: Sequence[TiedUse]) -> list[Alias]:
    """Brings `module` to `device`, but for the parameters in `slots`, which get aliases there."""
    for slot in slots:
        slot.module._parameters[slot.name] = None
    try:
        module.to(device)
    finally:
        for slot in slots:
            slot.module._parameters[slot.name] = slot.parameter
    aliases: dict[int, Alias] = {}
    for slot in slots:
        if id(slot.parameter) not in aliases:
            value = slot.parameter.detach().to(device)
            alias = Parameter(value, requires_grad=slot.parameter.requires_grad)
            # a copy of the module has no pipeline: its parameters are tied as the user's are
            alias.__deepcopy__ = partial(copy.deepcopy, slot.parameter)  # type: ignore[method-assign]
            aliases[id(slot.parameter)] = Alias(slot.parameter, alias)
        slot.module.__dict__[slot.name] = aliases[id(slot.parameter)].alias
    return list(aliases.values())
