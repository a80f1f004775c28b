"""The forward of a module as a graph, by torch.fx, at the level of its own submodules.

torch.fx runs the forward with proxies in place of tensors and records what is done to them. What
it cannot record faithfully must not be recorded at all: a submodule in which it meets control flow
that depends on data, a change of the grad mode or of autocast, or a random choice of Python's stays
one node, which calls the module as it is. The same at the model's own level is an error that names
the line.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from hybridtrain.layers.inputs import Inputs
from hybridtrain.layers.recording import Call, Opens, Recording, Untraceable, attribute

# Factories take no tensor, so that torch.fx does not see them: it would run them once, while
# tracing, and keep the result.
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip

# Inside these, operations mean something else; a graph would run them outside.
_MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.autocast)


def trace(inputs: Inputs, opens: Opens, module: nn.Module) -> Recording:
    """The forward of `module`, in the mode that it is in.

    Args:
        inputs: what the forward is given.
        opens: whether to look into a submodule.
        module: any module.

    Raises:
        Exception: what torch.fx or the forward itself says of what cannot be recorded.
    """
    return _Tracer(inputs, opens).record(module)


class _Tracer(fx.Tracer):
    """Records one forward."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: Inputs, opens: Opens) -> None:
        super().__init__()
        self._entered: dict[fx.Node, list[Call]] = {}
        self._opened: dict[str, nn.Module] = {}
        self._whole: dict[str, str] = {}
        self._inputs = inputs
        self._opens = opens

    def record(self, module: nn.Module) -> Recording:
        """See `trace`."""
        attributes = set(vars(module))
        state = random.getstate()
        try:
            with self._faithfully():
                graph = self.trace(module)
            if random.getstate() != state:
                raise Untraceable("the forward draws from Python's random")
        finally:
            random.setstate(state)
            # tensors that the forward makes from no input
            constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
        return Recording(
            graph=graph,
            entered={node: self._entered[node] for node in graph.nodes if node in self._entered},
            find=lambda name: constants[name] if name in constants else attribute(module, name),
            opened=self._opened,
            whole=self._whole,
        )

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The proxies of the inputs; arguments that are not given keep their defaults."""
        inputs, forward = self._inputs, self.root.forward
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in inputs.names]
        values = [
            inputs.constants.get(name, proxy)
            for name, proxy in zip(inputs.names, proxies, strict=True)
        ]
        return lambda *values: inputs.call(forward, list(values)), values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether the module is called as it is."""
        name = module_qualified_name
        return name in self._whole or not self._opens(name, m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One node for a leaf; else the nodes of what is in it, or one node where that fails."""
        name = self.path_of_module(m)
        call = name, self.num_calls.get(name, 0)
        last = self._last_node()
        if not self.is_leaf_module(m, name):
            stack, calls = OrderedDict(self.module_stack), dict(self.num_calls)
            state = random.getstate()
            try:
                result = super().call_module(m, forward, args, kwargs)
                if random.getstate() != state:
                    raise Untraceable("draws from Python's random")
            except Exception as error:
                random.setstate(state)
                self.module_stack, self.num_calls = stack, calls
                self._erase_after(last)
                self._whole[name] = where(error)
            else:
                self._opened[name] = m
                self._note(last, call)
                return result
        result = super().call_module(m, forward, args, kwargs)
        self._note(last, call)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, unless it is for what a graph would lose."""
        check_not_in_a_function(sys._getframe(1))
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Keeps a dataclass one, also if it is a dict as well (an output of `transformers`)."""
        if not is_dataclass(a) or isinstance(a, type) or not isinstance(a, dict):
            return super().create_arg(a)
        values = {f.name: self.create_arg(getattr(a, f.name)) for f in fields(a) if f.init}
        return self.create_node("call_function", type(a), (), values)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Reads a parameter or buffer anew each time: a node may be erased again."""
        return super().getattr(attr, attr_val, {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Tensors of ordinary layout."""
        return _Proxy(node, self)

    def _note(self, last: fx.Node | None, call: tuple[str, int]) -> None:
        first = last.next if last is not None else next(iter(self.graph.nodes), None)
        if first is not None and first.op != "root":
            self._entered.setdefault(first, []).insert(0, call)

    def _last_node(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self._entered.pop(node, None)
            self.graph.erase_node(node)

    @contextmanager
    def _faithfully(self) -> Iterator[None]:
        """Records the factories; stops at what a graph would lose."""
        with ExitStack() as patches:
            for name in _FACTORIES:
                recorded = self._recorded(getattr(torch, name))
                patches.enter_context(mock.patch.object(torch, name, recorded))
            for mode in _MODES:
                patches.enter_context(mock.patch.object(mode, "__enter__", _refuse(mode.__name__)))
            yield

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.create_proxy("call_function", function, args, kwargs)


class _Proxy(fx.Proxy):
    """A proxy that says at once what is so for every tensor that a pipeline passes on."""

    is_nested = False
    is_sparse = False
    is_quantized = False
    is_mkldnn = False


class NoFunctions(TorchFunctionMode):
    """A context in which no `autograd.Function` may run its forward: its backward would be lost."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs `func`, unless it is called by such a forward."""
        check_not_in_a_function(sys._getframe(1))
        return func(*args, **(kwargs or {}))


def check_not_in_a_function(frame: FrameType | None) -> None:
    """Makes sure that `frame` was not called by the forward of an `autograd.Function`.

    The first argument of such a forward is its node in the autograd graph. `apply` cannot be
    watched: it is not written in Python, and `f = MyFunction.apply` may have been taken before.

    Raises:
        Untraceable: it was.
    """
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, BackwardCFunction):
            raise Untraceable("uses an autograd.Function of its own, whose backward would be lost")
        frame = frame.f_back


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise Untraceable(f"uses {what}, which a graph would lose")

    return refuse


def where(error: BaseException) -> str:
    """The line of the user's that `error` comes from, and what it says."""
    package = Path(torch.__file__).parent
    own = Path(__file__).parent
    frames: Sequence[traceback.FrameSummary] = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if package not in Path(frame.filename).parents
        and own not in Path(frame.filename).parents
        and not frame.filename.startswith("<")
    ]
    said = (str(error) or type(error).__name__).splitlines()[0]
    if not frames:
        return said
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno}: `{frame.line}`: {said}"
