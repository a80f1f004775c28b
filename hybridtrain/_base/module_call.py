"""A replacement of what calling a module does, which neither copies nor pickles of it contain."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybridtrain._base.torch_private import compiled_call, replace_call


class ModuleCall:
    """What calling a module does instead of running its hooks and forward; see `replace_call`.

    Does not hold the module, which holds this: a deleted model is freed at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module."""
        module = self._module()
        assert module is not None
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leaves a copy of the module without this; parametrized modules copy all they hold."""

    def __reduce__(self) -> Any:
        """Leaves a pickle of the module without this, for the same reason."""
        return type(None), ()


def watch_calls(
    module: nn.Module,
    before: Callable[[nn.Module, Any, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> Callable[[], None]:
    """Calls `before` and `after` at each call of `module`, until the returned function is called.

    Args:
        module: the module; a `torch.jit.ScriptModule`, which takes no hooks, may be one.
        before: called with the module, its positional and its keyword arguments.
        after: called with the module, its arguments and its output; None if it has failed.
    """
    if isinstance(module, torch.jit.ScriptModule):
        outer = compiled_call(module)
        replace_call(module, _ScriptCall(module, before, after, outer))
        return lambda: replace_call(module, outer)
    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _ScriptCall(ModuleCall):
    def __init__(self, module: nn.Module, before: Any, after: Any, outer: Any) -> None:
        super().__init__(module)
        self._before, self._after, self._outer = before, after, outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        self._before(self.module, args, kwargs)
        try:
            output = (self._outer or self.module._call_impl)(*args, **kwargs)
            return output
        finally:
            self._after(self.module, args, output)
