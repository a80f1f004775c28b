"""Values that skip layers: one layer stashes a value and a later layer pops it.

    class Down(nn.Module):
        stashes = ("features",)
        def forward(self, x):
            stash("features", x)
            return self.pool(x)

    class Up(nn.Module):
        pops = ("features",)
        def forward(self, x):
            return torch.cat([x, pop("features")], dim=1)

A module declares the names that it stashes and pops on its class or instance, so that the pipeline
knows in advance which values each stage needs. A value is sent from its stage to the first stage
that pops it, and from there to the next one; its gradient takes the same route back. Stages in
between pass it on. Both functions also work in a plain `nn.Sequential` without a pipeline. (The
idea is from torchgpipe's `skippable`: Kim et al., arXiv:2004.09910.)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from torch import nn


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"pop({name!r}): no earlier layer has stashed it; declare {name!r} in `stashes` of "
            "the layer that stashes it, and in `pops` of the layer that pops it"
        )


class _NoValues(_Values):
    """Rejects `stash` in layers without declared names, where micro-batches would share values."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise KeyError(
            f"stash({name!r}): not declared; add {name!r} to `stashes` of the layer that stashes "
            "it, and to `pops` of the layer that pops it"
        )


class _Scope(threading.local):
    """The values that the layers running in this thread have stashed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = _Values()


_scope = _Scope()


def stash(name: str, value: Any) -> None:
    """Stores `value` (a tensor or a pytree) for a later layer of the same micro-batch."""
    _scope.values[name] = value


def pop(name: str) -> Any:
    """Returns the value stashed as `name`; every layer that declares it may pop it.

    Raises:
        KeyError: no earlier layer has stashed it.
    """
    return _scope.values[name]


class skip_scope:  # noqa: N801  # is called like the functions here
    """A context in which layers of this thread pop `values` and stash into a separate dict.

    Entering it returns this dict, which holds `values` and the stashed values. With None, no layer
    declares a name and stashing is an error. A context can be entered once.
    """

    __slots__ = ("_before", "_values")

    def __init__(self, values: Mapping[str, Any] | None) -> None:
        self._values = _NoValues() if values is None else _Values(values)

    def __enter__(self) -> dict[str, Any]:
        self._before = _scope.values
        _scope.values = self._values
        return self._values

    def __exit__(self, *error: object) -> None:
        _scope.values = self._before


def stashed_by(module: nn.Module) -> tuple[str, ...]:
    """Returns the names that `module` and the modules in it declare to stash."""
    return tuple(name for part in module.modules() for name in getattr(part, "stashes", ()))


def popped_by(module: nn.Module) -> tuple[str, ...]:
    """Returns the names that `module` and the modules in it declare to pop."""
    return tuple(name for part in module.modules() for name in getattr(part, "pops", ()))
