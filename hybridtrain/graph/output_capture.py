"""The hooks by which `transformers` models collect router logits, hidden states and attentions.

A forward with such outputs puts a collector into a context variable, and a hook on each layer
appends the layer's values to it. The hooks do nothing else, so a module with them may be traced,
and an exported graph contains the values. A module called as one node, however, would collect
nothing during the trace.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hybridtrain._base.torch_private import hooks_of

_CAPTURING = "transformers.utils.output_capturing"

# The attribute that marks a transformers model with installed hooks; set by its first forward.
INSTALLED = "_output_capturing_hooks_installed"


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has other forward or backward hooks."""
    return any(not _captures(hook) for table in hooks_of(module) for hook in table.values())


def gathers(module: nn.Module) -> bool:
    """Returns whether a forward of `module`, or of a module inside it, collects outputs."""
    tables = [table for part in module.modules() for table in hooks_of(part)]
    return any(_captures(hook) for table in tables for hook in table.values())


def gathered(module: nn.Module) -> list[Any]:
    """Returns the hooks of `module` that collect outputs in the current forward."""
    keys = _collected()
    if not keys:
        return []
    hooks = [hook for table in hooks_of(module) for hook in table.values()]
    return [hook for hook in hooks if _captures(hook) and _key(hook) in keys]


def is_collector(value: Any) -> bool:
    """Returns whether the current forward collects values in this dict or list."""
    collected = _collected()
    if not collected:
        return False
    return value is collected or any(value is values for values in collected.values())


def _collected() -> dict[str, Any] | None:
    capturing = sys.modules.get(_CAPTURING)
    collector = getattr(capturing, "_active_collector", None)
    return collector.get() if collector is not None else None


def gathers_inside(module: nn.Module) -> bool:
    """Returns whether the current forward collects values of modules in `module`."""
    return any(part is not module and gathered(part) for part in module.modules())


def _captures(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _CAPTURING


def _key(hook: Any) -> Any:
    """Returns the key under which a hook collects, from the closure of the hook."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
    return cells["key"].cell_contents if "key" in cells else None
