"""Notices that a model has other modules or parameters than those that its stages were made of.

Buffers and all else that a traced forward reads are compared by `graph.reads`, where they matter.
Looked at before each step, so it must be quick: objects by identity, `requires_grad`, and where the
memory of a parameter is, which a change of its dtype or its device moves. 200 modules with as many
parameters take about 50 us.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridtrain.errors import ConfigError, phrase

_requires_grad = attrgetter("requires_grad")
_Place = tuple[str, str]  # the name of a module, and of what it holds


class ModelWatch:
    """Compares `net` with what it was at the last `look`.

    Attributes:
        objects: the modules and parameters that there were; another list after each look.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._forwards_own: frozenset[_Place] = frozenset()
        self.look()

    def changed_by_forward(self) -> None:
        """Leaves out, from now on, what a first step has replaced itself."""
        if not self._is_as_before():
            before = self._held
            self.look()
            places = before.keys() | self._held.keys()
            self._forwards_own = frozenset(
                place for place in places if before.get(place) is not self._held.get(place)
            )

    def frozen_or_freed(self) -> list[str]:
        """Returns the parameters whose `requires_grad` is another than at the last look.

        Raises:
            ConfigError: modules or parameters are other ones, or were converted or moved; names the
                first.
        """
        if self._is_as_before():
            return []
        held = self._held_by(self._plain_modules())
        for place in [*self._held, *held]:
            old, new = self._held.get(place), held.get(place)
            if old is not new and place not in self._forwards_own:
                raise _changed(_difference(".".join(filter(None, place)), old, new))
        names = {id(p): name for name, p in self._net.named_parameters()}
        flipped = []
        for parameter, was in zip(self._parameters, self._traits, strict=True):
            now, name = _traits(parameter), names.get(id(parameter), "a parameter")
            if was[1:] != now[1:]:
                raise _changed(f"{name} is now {_described(now)}, not {_described(was)}")
            if was != now:
                flipped.append(name)
        if not flipped:
            self.look()  # other memory of the same kind: nothing depends on it
        return flipped

    def look(self) -> None:
        """Takes the model as it is now for the one to compare with."""
        modules = self._plain_modules()
        self._held = self._held_by(modules)
        tables = [table for m in modules.values() for table in (m._modules, m._parameters)]
        self._values = [table.values() for table in tables]
        self.objects = list(chain.from_iterable(self._values))
        self._parameters = [p for p in self._net.parameters() if _has_memory(p)]
        self._flags = list(map(_requires_grad, self._parameters))
        self._memory = list(map(Tensor.data_ptr, self._parameters))
        self._traits = [_traits(parameter) for parameter in self._parameters]

    def _plain_modules(self) -> dict[str, nn.Module]:
        modules = dict(self._net.named_modules())
        # TorchScript's modules and parameters cannot be replaced
        return {k: m for k, m in modules.items() if not isinstance(m, torch.jit.ScriptModule)}

    def _held_by(self, modules: dict[str, nn.Module]) -> dict[_Place, Any]:
        return {
            (name, child): value
            for name, module in modules.items()
            for table in (module._modules, module._parameters)
            for child, value in table.items()
        }

    def _is_as_before(self) -> bool:
        return (
            list(map(_requires_grad, self._parameters)) == self._flags
            and list(map(Tensor.data_ptr, self._parameters)) == self._memory
            and self.has_same_objects()
        )

    def has_same_objects(self) -> bool:
        """Returns whether the modules and parameters are those of the last look."""
        return _identical(self.objects, list(chain.from_iterable(self._values)))


def _has_memory(parameter: Tensor) -> bool:
    """Returns whether it is known where `parameter` is: not of wrappers of other tensors."""
    try:
        return not is_lazy(parameter) and parameter.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def _identical(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _changed(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, after {phrase('HybridModel')} was made, whose stages hold what was there "
        f"before: make a new {phrase('HybridModel')}, and a new optimizer over its parameters"
    )


def _traits(parameter: Tensor) -> tuple[bool, torch.dtype, torch.device]:
    return parameter.requires_grad, parameter.dtype, parameter.device


def _described(traits: tuple[bool, torch.dtype, torch.device]) -> str:
    return f"{str(traits[1]).removeprefix('torch.')} on {traits[2]}"


def _difference(name: str, old: Any, new: Any) -> str:
    if old is None:
        return f"{name} is new ({_named(new)})"
    if new is None:
        return f"{name} is gone ({_named(old)})"
    return f"{name} was replaced ({_named(old)} by {_named(new)})"


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a parameter of shape {list(value.shape)}"
    return str(value) if not list(value.children()) else type(value).__name__
