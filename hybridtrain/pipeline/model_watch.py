"""Detects that modules or parameters of a model were changed after its stages were built.

This check runs before each step, so it must be fast: it compares objects by identity,
`requires_grad`, and the memory address of each parameter, which changes with its dtype or device.
200 modules with as many parameters take about 50 us.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridtrain.errors import ConfigError, phrase

_requires_grad = attrgetter("requires_grad")
_training = attrgetter("training")
_hooks, _pre_hooks = attrgetter("_forward_hooks"), attrgetter("_forward_pre_hooks")
_Place = tuple[str, str]  # the names of a module and of its parameter or submodule


class ModelWatch:
    """Compares `net` with its state at the last `look`.

    Attributes:
        objects: the modules and parameters at the last look; a new list after each look.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._forwards_own: frozenset[_Place] = frozenset()
        self.look()

    def changed_by_forward(self) -> None:
        """Ignores from now on the objects that a first step replaces itself."""
        if not self._is_as_before():
            before = self._held
            self.look()
            places = before.keys() | self._held.keys()
            self._forwards_own = frozenset(
                place for place in places if before.get(place) is not self._held.get(place)
            )

    def frozen_or_freed(self) -> list[str]:
        """Returns the parameters with another `requires_grad` than at the last look.

        Raises:
            ConfigError: modules or parameters were replaced, converted or moved; the message names
                the first.
        """
        # The fast path of each step; names are only made for an error.
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
            self.look()  # new memory of the same kind: nothing depends on its address
        return flipped

    @property
    def facts(self) -> Hashable:
        """What decides, besides inputs, which code runs: modes, numbers of hooks, and which
        parameters required a gradient at the last look."""
        modules = self._modules
        hooks = tuple(map(len, map(_hooks, modules))), tuple(map(len, map(_pre_hooks, modules)))
        return tuple(map(_training, modules)), hooks, self._flags

    def look(self) -> None:
        """Stores the present state of the model for later comparisons."""
        modules = self._plain_modules()
        self._modules = list(self._net.modules())
        self._held = self._held_by(modules)
        tables = [table for m in modules.values() for table in (m._modules, m._parameters)]
        # Views of the tables, not copies: they show what the tables hold now.
        self._values = [table.values() for table in tables]
        self.objects = list(chain.from_iterable(self._values))
        self._parameters = [p for p in self._net.parameters() if _has_memory(p)]
        self._flags = tuple(map(_requires_grad, self._parameters))
        # `.to()` and `.data = ` keep the parameter object and give it other memory.
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
            tuple(map(_requires_grad, self._parameters)) == self._flags
            and list(map(Tensor.data_ptr, self._parameters)) == self._memory
            and self.has_same_objects()
        )

    def has_same_objects(self) -> bool:
        """Returns whether modules and parameters are the same objects as at the last look."""
        # By `is`: `==` of parameters compares their values.
        now = list(chain.from_iterable(self._values))
        return len(now) == len(self.objects) and all(map(is_, now, self.objects))


def _has_memory(parameter: Tensor) -> bool:
    """Returns whether `parameter` has a memory address; tensors that wrap others have none."""
    try:
        return not is_lazy(parameter) and parameter.data_ptr() >= 0
    except (RuntimeError, NotImplementedError):
        return False


def _changed(what: str) -> ConfigError:
    return ConfigError(
        f"{what}; the stages of {phrase('HybridModel')} still have the earlier modules and "
        f"parameters: make a new {phrase('HybridModel')} and a new optimizer over its parameters"
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
