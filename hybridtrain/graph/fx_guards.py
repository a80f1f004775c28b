"""Stops torch.fx at code that its graph would not repeat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from hybridtrain._torch_private import GRAD_MODE_SETTER, TorchDispatchMode
from hybridtrain.graph.untraceable import (
    Untraceable,
    is_user_code,
    no_random_choices,
    replaced,
)

# Factories take no tensor, so that torch.fx does not see them: it would run them once, while
# tracing, and keep the result.
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip

# Functions that change the meaning of operations, or whose answer may differ at another call.
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (*GRAD_MODE_SETTER, "a change of the grad mode"),
    (torch.inference_mode, "__enter__", "torch.inference_mode"),
    (torch.autocast, "__enter__", "torch.autocast"),
    (torch, "is_grad_enabled", "torch.is_grad_enabled"),
    (torch, "is_inference_mode_enabled", "torch.is_inference_mode_enabled"),
    (torch, "is_autocast_enabled", "torch.is_autocast_enabled"),
    (torch, "is_tensor", "torch.is_tensor"),
)


@contextmanager
def fx_guards(tracer: fx.Tracer) -> Iterator[None]:
    """A context in which `tracer` may run a forward.

    `Untraceable` is raised where the forward does what a graph would not do again.
    """

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", function, args, kwargs)

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise Untraceable(f"uses {what}, which a graph would lose")

        return refused

    def set_attribute(original: Callable[..., None], module: Any, name: str, value: Any) -> None:
        if not name.startswith("_tensor_constant"):  # torch.fx's own
            raise Untraceable(f"sets its attribute {name!r}, which a graph would not")
        original(module, name, value)

    with ExitStack() as guards:
        for name in _FACTORIES:
            guards.enter_context(replaced(torch, name, record))
        for holder, name, what in _REFUSED:
            guards.enter_context(replaced(holder, name, refuse(what)))
        guards.enter_context(replaced(nn.Module, "__setattr__", set_attribute))
        guards.enter_context(_ForbidEagerOps())
        guards.enter_context(no_random_choices())
        yield


class GuardedProxy(fx.Proxy):
    """A proxy that does not reveal its type, and has the flags that all tensors here have."""

    is_nested = False
    is_sparse = False
    is_quantized = False
    is_mkldnn = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks for
        if is_user_code(sys._getframe(1)):
            raise Untraceable("asks for the type of a value, which is not known while tracing")
        return GuardedProxy


class _ForbidEagerOps(TorchDispatchMode):
    """A context in which no tensor is computed: the graph would keep the result."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise Untraceable(f"computes a tensor ({func}) from no input, which a graph would do once")
