"""Values that skip layers: one layer stashes, a later one pops, wherever the model is cut.

    class Down(nn.Module):
        stashes = ("features",)
        def forward(self, x):
            stash("features", x)
            return self.pool(x)

    class Up(nn.Module):
        pops = ("features",)
        def forward(self, x):
            return torch.cat([x, pop("features")], dim=1)

The names that a module stashes and pops are declared on its class or on the instance, so that the
pipeline knows, before anything runs, which stage needs what from which. A value goes straight from
its stage's device to that of the first stage that pops it, from there to the next that does, and
its gradient the same way back. In the plain
`nn.Sequential` the two functions work as well, so that the model runs without this project.
(The idea is torchgpipe's `skippable`: Kim et al., arXiv:2004.09910.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"pop({name!r}): no earlier layer has stashed it; is {name!r} in `stashes` of the one "
            f"and in `pops` of the other?"
        )


class _NoValues(_Values):
    """For layers that declare nothing: what they stash would be there for every micro-batch."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise KeyError(
            f"stash({name!r}): not declared; put {name!r} into `stashes` of the layer that stashes "
            f"it and into `pops` of the one that pops it"
        )


class _Shelf(threading.local):
    """What the layers running in this thread have stashed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = _Values()


_shelf = _Shelf()


def stash(name: str, value: Any) -> None:
    """Keeps `value` (a tensor or a pytree) for a later layer of the same micro-batch."""
    _shelf.values[name] = value


def pop(name: str) -> Any:
    """What an earlier layer stashed as `name`; every layer that declares it may pop it.

    Raises:
        KeyError: nothing of that name was stashed before.
    """
    return _shelf.values[name]


def take(name: str) -> Any:
    """`pop` by the last layer that needs the value, so that it need not be kept any longer."""
    value = _shelf.values[name]
    _shelf.values[name] = None
    return value


@contextmanager
def skip_scope(values: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Gives this thread a skip_scope with `values` on it; the layers inside add to it.

    With None they may not: nothing is declared.
    """
    before = _shelf.values
    _shelf.values = _NoValues() if values is None else _Values(values)
    try:
        yield _shelf.values
    finally:
        _shelf.values = before


def stashed_by(module: nn.Module) -> tuple[str, ...]:
    """The names that `module` and the modules in it declare to stash."""
    return tuple(name for part in module.modules() for name in getattr(part, "stashes", ()))


def popped_by(module: nn.Module) -> tuple[str, ...]:
    """The names that `module` and the modules in it declare to pop."""
    return tuple(name for part in module.modules() for name in getattr(part, "pops", ()))
