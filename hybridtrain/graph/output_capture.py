"""The hooks by which models of `transformers` gather router logits, hidden states and attentions.

A forward that is asked for them puts a collector into a context variable, and a hook of each layer
appends that layer's values to it. The hooks do nothing else. So they may be on a module that is
traced, and an exported graph has the values; but a module that is called as one node would gather
nothing while it is traced.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hybridtrain._base.torch_private import hooks_of

_CAPTURING = "transformers.utils.output_capturing"

# What marks a model of transformers whose hooks are there; its first forward sets it.
INSTALLED = "_output_capturing_hooks_installed"


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has hooks around its forward or backward that do something else."""
    return any(not _captures(hook) for table in hooks_of(module) for hook in table.values())


def gathers(module: nn.Module) -> bool:
    """Returns whether a forward of `module` or of a module in it was asked to gather something."""
    tables = [table for part in module.modules() for table in hooks_of(part)]
    return any(_captures(hook) for table in tables for hook in table.values())


def gathered(module: nn.Module) -> list[Any]:
    """Returns the hooks of `module` that gather something in the forward that runs now."""
    keys = _collected()
    if not keys:
        return []
    hooks = [hook for table in hooks_of(module) for hook in table.values()]
    return [hook for hook in hooks if _captures(hook) and _key(hook) in keys]


def is_collector(value: Any) -> bool:
    """Returns whether the forward that runs now gathers values in this dict or list."""
    collected = _collected()
    if not collected:
        return False
    return value is collected or any(value is values for values in collected.values())


def _collected() -> dict[str, Any] | None:
    capturing = sys.modules.get(_CAPTURING)
    collector = getattr(capturing, "_active_collector", None)
    return collector.get() if collector is not None else None


def gathers_inside(module: nn.Module) -> bool:
    """Returns whether the forward that runs now gathers values of modules in `module`."""
    return any(part is not module and gathered(part) for part in module.modules())


def _captures(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _CAPTURING


def _key(hook: Any) -> Any:
    """Returns under which key a hook gathers, a variable of the function that has made it."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return cells["key"].cell_contents if "key" in cells else None
