"""What a recorded forward must not lose: it is stopped at whatever a graph would not do again."""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Factories take no tensor, so that torch.fx does not see them: it would run them once, while
# tracing, and keep the result.
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip

# What changes the meaning of operations, or asks for what may be otherwise at another call.
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (torch._C, "_set_grad_enabled", "a change of the grad mode"),
    (torch.inference_mode, "__enter__", "torch.inference_mode"),
    (torch.autocast, "__enter__", "torch.autocast"),
    (torch, "is_grad_enabled", "torch.is_grad_enabled"),
    (torch, "is_inference_mode_enabled", "torch.is_inference_mode_enabled"),
    (torch, "is_autocast_enabled", "torch.is_autocast_enabled"),
    (torch, "is_tensor", "torch.is_tensor"),
)


class Untraceable(Exception):
    """The forward does something that a graph would not do again."""


@contextmanager
def fx_trace_guards(record: Callable[..., Any]) -> Iterator[None]:
    """A context in which torch.fx may run a forward.

    Args:
        record: `record(function, args, kwargs)` puts a call into the graph.

    Raises:
        Untraceable: the forward does what a graph would not do again.
    """
    state = random.getstate()

    def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return record(function, args, kwargs)

    def guarded(set_attribute: Callable[..., None], module: Any, name: str, value: Any) -> None:
        if not name.startswith("_tensor_constant"):  # torch.fx's own
            raise Untraceable(f"sets its attribute {name!r}, which a graph would not")
        set_attribute(module, name, value)

    with ExitStack() as patches:
        for name in _FACTORIES:
            patches.enter_context(_in_this_thread(torch, name, recorded))
        for holder, name, what in _REFUSED:
            patches.enter_context(_in_this_thread(holder, name, _refuse(what)))
        patches.enter_context(_in_this_thread(nn.Module, "__setattr__", guarded))
        patches.enter_context(_NothingComputed())
        try:
            yield
            check_draws(state)
        finally:
            random.setstate(state)


def check_draws(state: object) -> None:
    """Makes sure that Python's `random` is still in `state`.

    Raises:
        Untraceable: the forward has drawn from it.
    """
    if random.getstate() != state:
        raise Untraceable("draws from Python's random, which a graph would do once")


@contextmanager
def export_guards(module: nn.Module) -> Iterator[None]:
    """A context in which torch.export may run the forward of `module`.

    Raises:
        Untraceable: the forward does what the graph would not do again.
    """
    state = random.getstate()
    parts = {id(part) for part in module.modules()}

    def guarded(set_attribute: Callable[..., None], part: Any, name: str, value: Any) -> None:
        if id(part) in parts and not _asked_by_torch(sys._getframe(2)):
            raise Untraceable(f"sets its attribute {name!r}, which a graph would not")
        set_attribute(part, name, value)

    def asked(plain: Callable[[], bool]) -> bool:
        if not _asked_by_torch(sys._getframe(2)):
            raise Untraceable("uses torch.is_grad_enabled, which a graph would ask once")
        return plain()

    with (
        _in_this_thread(nn.Module, "__setattr__", guarded),
        _in_this_thread(torch, "is_grad_enabled", asked),
        _ExportGuard(),
    ):
        try:
            yield
            check_draws(state)
        finally:
            random.setstate(state)


class _ExportGuard(TorchFunctionMode):
    """Stops at hooks of tensors and at functions with a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = Functions()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`."""
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise Untraceable("registers a hook on a tensor, which a graph would lose")
        self._functions.check_not_inside(sys._getframe(1))
        return func(*args, **(kwargs or {}))


class Functions:
    """The classes derived from `autograd.Function` so far.

    Their `apply` cannot be watched: it is not written in Python, and `f = MyFunction.apply` may
    have been taken before. So it is looked who calls.
    """

    def __init__(self) -> None:
        self._forwards = _forwards(Function)

    def check_not_inside(self, frame: FrameType | None) -> None:
        """Makes sure that `frame` was not called by one of their forwards.

        Raises:
            Untraceable: it was.
        """
        while frame is not None:
            if frame.f_code in self._forwards:
                raise Untraceable("uses an autograd.Function, whose backward would be lost")
            frame = frame.f_back


def _forwards(function: type[Function]) -> set[CodeType]:
    """The code of the forwards of all classes derived from `function`."""
    found = set()
    for derived in function.__subclasses__():
        code = getattr(derived.forward, "__code__", None)
        if code is not None and derived.forward is not Function.forward:
            found.add(code)
        found |= _forwards(derived)
    return found


class Proxy(fx.Proxy):
    """A proxy that says at once what is so for every tensor that a pipeline passes on."""

    is_nested = False
    is_sparse = False
    is_quantized = False
    is_mkldnn = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks for
        if _asked_by_torch(sys._getframe(1)):
            return Proxy
        raise Untraceable("asks for the type of a value, which is not known while tracing")


def _asked_by_torch(frame: FrameType) -> bool:
    """Whether `frame` is PyTorch's, Python's own or this project's, and not the model's."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package in ("torch", "hybridtrain") or package in sys.stdlib_module_names


class _NothingComputed(TorchDispatchMode):
    """A context in which no tensor is computed: it would be once and for all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise Untraceable(f"computes a tensor ({func}) from no input, which a graph would do once")


def _in_this_thread(
    holder: Any, name: str, instead: Callable[..., Any]
) -> AbstractContextManager[object]:
    """A context in which `instead(plain, ...)` stands for `holder.name`; other threads see none."""
    plain, thread = getattr(holder, name), threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain(*args, **kwargs)
        return instead(plain, *args, **kwargs)

    return mock.patch.object(holder, name, called)


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Untraceable(f"uses {what}, which a graph would lose")

    return refuse


def where(error: BaseException) -> str:
    """The line of the user's that `error` comes from, and what it says."""
    not_the_users = Path(torch.__file__).parent, Path(__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(folder in Path(frame.filename).parents for folder in not_the_users)
        and not frame.filename.startswith("<")
    ]
    said = (str(error) or type(error).__name__).splitlines()[0]
    if not frames:
        return said
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno}: `{frame.line}`: {said}"
