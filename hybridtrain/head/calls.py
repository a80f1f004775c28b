"""The calls of a model's head, which return `LazyLogits` where a loss may follow.

`install` makes `module(...)` of a linear layer a `HeadCall`: its hooks and forward run as always,
but inside `lazily()` its product is lazy. Everywhere else the call is the module's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from hybridtrain._base.module_call import ModuleCall
from hybridtrain._base.torch_private import compiled_call, in_backward, replace_call
from hybridtrain.head.lazy_logits import lazy_linear


class _State(threading.local):
    is_lazy = False


_state = _State()


@contextmanager
def lazily() -> Iterator[None]:
    """Makes the products of heads lazy in the block, in this thread."""
    before, _state.is_lazy = _state.is_lazy, True
    try:
        yield
    finally:
        _state.is_lazy = before


class _LazyProducts(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (lazy_linear if func is F.linear else func)(*args, **kwargs or {})


class HeadCall(ModuleCall):
    """What calling a linear layer of the head does; see the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        module = self.module
        # in a backward it runs again, because it is recomputed, and must save the same tensors
        if not (_state.is_lazy or in_backward()):
            return module._call_impl(*args, **kwargs)
        # A mode around the module's own call, so that its hooks see the lazy product.
        with _LazyProducts():
            return module._call_impl(*args, **kwargs)


def install(net: nn.Module, names: Collection[str]) -> None:
    """Makes the calls of these modules of a model, and of no others, those of the head.

    A module that the caller has compiled stays as it is. What else replaces the call of a module
    has an attribute `compiled`, which is the call inside it.
    """
    for name, module in net.named_modules():
        outer: Any = compiled_call(module)
        has_inner = hasattr(outer, "compiled") and not isinstance(outer, HeadCall)
        # Such as a `LayerCall`, which stays outside: the layer may be a stage's.
        inner: Callable[..., Any] | None = outer.compiled if has_inner else outer
        if name in names and inner is None:
            inner = HeadCall(module)
        elif name not in names and isinstance(inner, HeadCall):
            inner = None
        else:
            continue
        if has_inner:
            outer.compiled = inner
        else:
            replace_call(module, inner)
