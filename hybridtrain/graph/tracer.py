"""Traces a module's forward with torch.fx, at the level of its submodules.

torch.fx runs the forward with proxies in place of tensors and records what is done to them. Code
that it cannot record faithfully must not be recorded at all. Where a submodule has control flow
that depends on data, a change of the grad mode or of autocast, or a random choice of Python's, the
submodule stays one node, which calls it. The same in the model's own forward is an error that names
the line.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from hybridtrain._torch_private import GRAD_MODE_SETTER, TorchDispatchMode
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.reads import ASKS_FOR_USER, Recorder, Settled, Shadows
from hybridtrain.graph.segment import IN_PLACE_OPERATORS, viewed_by
from hybridtrain.graph.traced_graph import (
    GRADIENTS_ARE_CUT,
    TAKES_GRADIENTS,
    AutogradFunctionDetector,
    Call,
    Generators,
    ShouldExpand,
    TracedGraph,
    Untraceable,
    current_user_line,
    first_difference,
    is_user_code,
    no_swallowed_refusals,
    refused_calls,
    replaced,
    user_line,
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
    (torch, "is_inference_mode_enabled", "torch.is_inference_mode_enabled"),
    (torch, "is_autocast_enabled", "torch.is_autocast_enabled"),
)


# Methods that change a list or dict, and that tensors do not have.
_CONTAINER_METHODS = {
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
}  # fmt: skip


def trace(
    signature: CallSignature,
    module: nn.Module,
    should_expand: ShouldExpand,
) -> TracedGraph:
    """Returns the forward of `module` as a graph, in the mode that the module is in.

    A question for the grad mode gets the answer of a training step in training mode, and of an
    evaluation in the other. The forward is traced twice, to find what changes by itself.

    Raises:
        Exception: raised by torch.fx or by the forward itself, where it cannot be traced.
    """
    settled = Settled()
    with settled.undone_on_error():
        return _trace(signature, module, should_expand, settled)


def _trace(
    signature: CallSignature, module: nn.Module, should_expand: ShouldExpand, settled: Settled
) -> TracedGraph:
    kept: dict[str, str] = {}  # modules that would freeze something, with the reason
    generators = Generators(module)

    def run(grad_enabled: bool) -> tuple[_Tracer, TracedGraph]:
        tracer = _Tracer(signature, should_expand, kept, generators, grad_enabled, module, settled)
        return tracer, tracer.traced(module)

    while True:
        tracer, traced = run(module.training)
        fault = tracer.find_read(traced.graph)
        if fault is None:
            kept |= traced.unexpanded  # they need not fail twice
            again, other = run(module.training)
            if (node := first_difference(traced, other)) is not None:
                why = "a graph would keep a value that changes from call to call"
                fault = (*(again if node in again.places else tracer).places[node], why)
        if fault is None:
            break
        path, place, reason = fault
        if not path:
            raise Untraceable(reason, place)
        kept[path] = f"{place}: {reason}"
    if tracer.asked_grad_mode:
        try:
            grad_matters = first_difference(traced, run(not module.training)[1]) is not None
        except Exception:
            grad_matters = True
        traced = replace(traced, grad_matters=grad_matters)
    return traced


class _Tracer(fx.Tracer):
    """Records one forward; see `TracedGraph` for what it finds."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        signature: CallSignature,
        should_expand: ShouldExpand,
        kept: Mapping[str, str],
        generators: Generators,
        grad_enabled: bool,
        module: nn.Module,
        settled: Settled,
    ) -> None:
        super().__init__()
        self.calls: dict[fx.Node, list[Call]] = {}
        self.expanded: dict[str, nn.Module] = {}
        self.unexpanded: dict[str, str] = dict(kept)
        self.places: dict[fx.Node, tuple[str, str]] = {}  # the expanded module, the user's line
        self.parts: set[nn.Module] = set()
        self.generators = generators
        self.shadows = Shadows(
            {
                "type": _Type,
                "hasattr": self._has_attribute,
                "getattr": self._get_attribute,
                "callable": self._is_callable,
            },
            matches=True,
        )
        self.recorder = Recorder(module, settled, self.shadows)
        self.grad_enabled = grad_enabled
        self.asked_grad_mode = False
        self._inside = [""]  # the expanded modules that are being run
        self._autograd_functions = AutogradFunctionDetector()
        self._thread = threading.get_ident()
        self._signature = signature
        self._should_expand = should_expand

    def traced(self, module: nn.Module) -> TracedGraph:
        """Returns the graph of `module`."""
        attributes = set(vars(module))
        self.parts = set(module.modules())
        try:
            with _guards(self, module):
                graph = self.trace(module)
        finally:
            # tensors that the forward reads from elsewhere, which torch.fx has put into the module
            constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
        traced = TracedGraph(
            graph=graph,
            calls={node: self.calls[node] for node in graph.nodes if node in self.calls},
            find=lambda name: constants[name] if name in constants else attrgetter(name)(module),
            expanded=self.expanded,
            unexpanded=self.unexpanded,
            reads=self.recorder.reads(),
        )
        _settle_augmented_assignments(traced)
        return traced

    def find_read(self, graph: fx.Graph) -> tuple[str, str, str] | None:
        """Returns where a tensor is read from a module that may replace it: module, line, reason.

        None if nowhere.
        """
        for node in graph.find_nodes(op="get_attr"):
            holder, _, name = str(node.target).rpartition(".")
            tensor = attrgetter(str(node.target))(self.root) if holder else None
            if holder and holder not in self.expanded and not isinstance(tensor, nn.Parameter):
                return *self.places[node], f"reads {name!r} of {holder!r}, which may change it"
        return None

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Returns the forward and the proxies of its arguments; the others keep their defaults."""
        signature, forward = self._signature, self.root.forward
        proxies = {n: self.create_proxy("placeholder", n, (), {}) for n in signature.names}
        values = list((proxies | dict(signature.constants)).values())

        def call(*values: Any) -> Any:
            args, kwargs = signature.split(values)
            return forward(*args, **kwargs)

        return call, values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns whether calls of the module become one node."""
        name = module_qualified_name
        return name in self.unexpanded or not self._should_expand(name, m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Records a leaf as one node, and any other module by its operations where it can."""
        # torch.fx sees the calls of all threads, and of modules that the forward has just made
        if threading.get_ident() != self._thread or m not in self.parts:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        call = name, self.num_calls.get(name, 0)
        last = next(iter(reversed(self.graph.nodes)), None)
        is_leaf = self.is_leaf_module(m, name)
        if not is_leaf:
            stack, calls = OrderedDict(self.module_stack), dict(self.num_calls)
            mark = self.recorder.mark()
            self.recorder.refuse_changes()  # of the code that calls this module
            self._inside.append(name)
            try:
                with self.generators.no_draws(), no_swallowed_refusals(), self.recorder.unchanged():
                    result = super().call_module(m, forward, args, kwargs)
                self.expanded[name] = m
            except Exception as error:
                self.recorder.forget_since(mark)
                self.module_stack, self.num_calls = stack, calls
                self._erase_after(last)
                self.unexpanded[name], is_leaf = user_line(error), True
            self._inside.pop()
        if is_leaf:
            result = super().call_module(m, forward, args, kwargs)
        first = last.next if last is not None else next(iter(self.graph.nodes), None)
        if first is not None and first.op != "root":
            self.calls.setdefault(first, []).insert(0, call)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a node, unless an `autograd.Function` asks for it."""
        self._autograd_functions.check_not_inside(sys._getframe(1))
        node = super().create_node(*args, **kwargs)
        if node.target in TAKES_GRADIENTS:
            raise Untraceable(GRADIENTS_ARE_CUT)
        if node.op == "call_method" and node.target in _CONTAINER_METHODS:
            raise Untraceable("changes a list or dict in place")  # of which a graph has no copy
        self.places[node] = self._inside[-1], current_user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        """Keeps the type of a dataclass that is also a dict, as outputs of `transformers` are."""
        if not is_dataclass(a) or isinstance(a, type) or not isinstance(a, dict):
            return super().create_arg(a)
        values = {f.name: self.create_arg(getattr(a, f.name)) for f in fields(a) if f.init}
        return self.create_node("call_function", type(a), (), values)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Reads a parameter or buffer anew each time: its node may be erased again."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, {})

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuses a condition on a value, so that the model's own `except` cannot hide it."""
        return bool(_refused(super().to_bool, obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Refuses a loop over a value of unknown length; unpacking is recorded."""
        iterator: Iterator[Any] = _refused(super().iter, obj)
        return iterator

    def _has_attribute(self, value: Any, name: str) -> bool:
        if _is_proxy(value) and self.check_is_tensor(value):
            return hasattr(torch.Tensor, name)
        return hasattr(value, name)

    def _get_attribute(self, value: Any, name: str, *default: Any) -> Any:
        if default and not self._has_attribute(value, name):
            return default[0]
        return getattr(value, name)

    def _is_callable(self, value: Any) -> bool:
        return not _is_proxy(value) and callable(value)

    def check_is_tensor(self, value: fx.Proxy) -> bool:
        """Returns True for an input that every batch must give as a tensor.

        Raises:
            Untraceable: the value may be something else.
        """
        if value.node.op == "placeholder" and value.node.target in self._signature.tensors:
            return True
        raise Untraceable("asks for the type of a value, which is not known while tracing")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns a `_GuardedProxy`."""
        return _GuardedProxy(node, self)

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.calls.pop(node, None)
            self.graph.erase_node(node)


ASKS_FOR_USER |= {_Tracer._has_attribute.__code__, _Tracer._get_attribute.__code__}


@contextmanager
def _guards(tracer: _Tracer, module: nn.Module) -> Iterator[None]:
    """Raises `Untraceable` where the forward does what a graph would not do again."""

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return tracer.create_proxy("call_function", function, args, kwargs)

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise Untraceable(f"uses {what}, which a graph would lose")

        return refused

    def set_attribute(original: Callable[..., None], module: Any, name: str, value: Any) -> None:
        # modules that the forward has made are not parts, and torch.fx sets constants
        if module in tracer.parts and not name.startswith("_tensor_constant"):
            raise Untraceable(f"sets its attribute {name!r}, which a graph would not")
        original(module, name, value)

    def is_grad_enabled(original: Callable[[], bool]) -> bool:
        tracer.asked_grad_mode = True
        return tracer.grad_enabled

    def is_tensor(original: Callable[[Any], bool], value: Any) -> bool:
        return original(value) if not _is_proxy(value) else tracer.check_is_tensor(value)

    def is_instance(original: Callable[..., bool], value: Any, kind: Any) -> bool:
        if _is_proxy(value):
            raise Untraceable("asks for the type of a value, which is not known while tracing")
        return original(value, kind)

    with ExitStack() as guards:
        for name in _FACTORIES:
            guards.enter_context(replaced(torch, name, record))
        for holder, name, what in _REFUSED:
            guards.enter_context(replaced(holder, name, refuse(what)))
        guards.enter_context(replaced(nn.Module, "__setattr__", set_attribute))
        guards.enter_context(replaced(torch, "is_grad_enabled", is_grad_enabled))
        guards.enter_context(replaced(torch, "is_tensor", is_tensor))
        guards.enter_context(replaced(torch.jit, "isinstance", is_instance))
        guards.enter_context(refused_calls(module))
        guards.enter_context(_ForbidEagerOps())
        guards.enter_context(tracer.generators.no_draws())
        guards.enter_context(no_swallowed_refusals())
        guards.enter_context(tracer.shadows.removed_at_end())
        guards.enter_context(tracer.recorder.clearing_caches())
        guards.enter_context(tracer.recorder.recording())
        yield


class _GuardedProxy(fx.Proxy):
    """A proxy that does not reveal its type, and has the flags that all tensors here have."""

    is_nested = is_sparse = is_quantized = is_mkldnn = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # what `isinstance` asks for
        frame: FrameType | None = sys._getframe(1)
        # abc.py asks for `isinstance(x, Sequence)`, functools for a singledispatch
        while frame is not None and _is_pythons(frame):
            frame = frame.f_back
        if frame is not None and is_user_code(frame):
            raise Untraceable("asks for the type of a value, which is not known while tracing")
        return _GuardedProxy

    def __setattr__(self, name: str, value: Any) -> None:
        if is_user_code(sys._getframe(1)):
            raise Untraceable(f"sets {name!r} of a tensor, which a graph would not")
        super().__setattr__(name, value)


def _is_pythons(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names


def _refused(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except fx.proxy.TraceError as error:
        raise Untraceable(str(error)) from error


def _no_number(what: str) -> Callable[..., Any]:
    def method(self: fx.Proxy, *args: Any) -> Any:
        raise Untraceable(f"asks for {what} of a value, which is not known while tracing")

    return method


for _what, _names in {
    "the length": ("__len__",),
    "a number": ("__int__", "__float__", "__index__", "__complex__", "__round__", "__trunc__"),
    "a change of an item": ("__setitem__", "__delitem__"),
}.items():
    for _name in _names:
        setattr(_GuardedProxy, _name, _no_number(_what))


class _TypeKind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and _is_proxy(args[0]):
            raise Untraceable("asks for the type of a value, which is not known while tracing")
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_TypeKind):
    """`type`, but it does not answer for a stand-in."""


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    # the code of a graph has `x += y` for operator.iadd(x, y), which would change a number `x` too
    def called(x: Any, y: Any) -> Any:
        return function(x, y)

    called.__name__ = f"{function.__name__}_"
    return called


# Without these methods, Python takes `x += y` for `x = x + y`.
for _function in IN_PLACE_OPERATORS:
    setattr(_GuardedProxy, f"__{_function.__name__}__", _recorded(_function))

_IN_PLACE = {function: _called(function) for function in IN_PLACE_OPERATORS}


def _settle_augmented_assignments(traced: TracedGraph) -> None:
    """Lets `x += y` work in place where the old `x` or a view of it is used later, or is a buffer.

    Elsewhere it becomes `x + y`, which may stand at the beginning of a stage without a copy of `x`.
    """
    viewed = viewed_by(traced)
    order = {node: number for number, node in enumerate(traced.graph.nodes)}
    for node in traced.graph.nodes:
        if node.target in IN_PLACE_OPERATORS:
            olds = [
                n for n, base in viewed.items() if base is viewed[node] and order[n] < order[node]
            ]
            last_use = max(order[user] for old in olds for user in old.users)
            in_place = viewed[node].op == "get_attr" or last_use > order[node]
            name = f"__{node.target.__name__[1:]}__"
            node.target = _IN_PLACE[node.target] if in_place else getattr(operator, name)


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)  # which does not ask the value for its class


class _ForbidEagerOps(TorchDispatchMode):
    """A context in which no tensor is computed: the graph would keep the result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Untraceable(f"computes a tensor ({func}) from no input, which a graph would do once")
