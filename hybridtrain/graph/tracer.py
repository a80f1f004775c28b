"""Traces a module's forward with torch.fx, at the level of its submodules.

Only `engine="distributed"` needs this file.

torch.fx runs the forward with proxies instead of tensors and records their operations. Code that it
cannot record faithfully must be rejected. If a submodule has control flow that depends on data,
changes the grad mode or autocast, or draws from Python's generator, the submodule stays one node
that calls it. The same code in the model's own forward is an error that names the line.

A trace on `Examples` also knows the value of each proxy. It answers Python's queries (a length, a
type, a condition on sizes) and records the answers, and the graph is valid for inputs with the same
answers. Sizes that no code queries stay variable.
"""

from __future__ import annotations

import builtins
import dis
import operator
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute

from hybridtrain._base.torch_private import GRAD_MODE_SETTER, TorchDispatchMode
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.changes import Settled
from hybridtrain.graph.examples import QUESTIONS, UNKNOWN, Examples, SizeGuards
from hybridtrain.graph.output_capture import INSTALLED, gathered, gathers_inside
from hybridtrain.graph.recorder import ASKS_FOR_USER, Recorder
from hybridtrain.graph.segment import IN_PLACE_OPERATORS, viewed_by
from hybridtrain.graph.shadows import Shadows
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
    none_swallowed,
    refused_calls,
    replaced,
    user_line,
)

# Factory functions take no tensor, so torch.fx does not see them: it would run them once while
# tracing and keep the result.
_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "tensor", "zeros",
)  # fmt: skip

# Functions that change the meaning of operations, or that may return another result at another
# call.
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (*GRAD_MODE_SETTER, "a change of the grad mode"),
    (torch.inference_mode, "__enter__", "torch.inference_mode"),
    (torch.autocast, "__enter__", "torch.autocast"),
    (torch, "is_inference_mode_enabled", "torch.is_inference_mode_enabled"),
    (torch, "is_autocast_enabled", "torch.is_autocast_enabled"),
)


_ASKS_TYPE = "asks for the type of a value, which is unknown while tracing"

# Methods that change a list or dict, and that tensors do not have.
_CONTAINER_METHODS = {
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
}  # fmt: skip


def trace(
    signature: CallSignature,
    module: nn.Module,
    should_expand: ShouldExpand,
    make_examples: Callable[[nn.Module], tuple[Examples, list[Any]]] | None = None,
) -> TracedGraph:
    """Returns the forward of `module` as a graph, in the module's current mode.

    With `make_examples`, which returns the examples of a module and the values of its arguments,
    the graph may be valid for such inputs only.

    A query of the grad mode gets the answer for a training step in training mode, and for an
    evaluation in evaluation mode. The forward is traced twice, to find values that change from call
    to call.

    Raises:
        Exception: raised by torch.fx or by the forward itself if it cannot be traced.
    """
    settled = Settled()
    with settled.undone_on_error():
        return _trace(signature, module, should_expand, settled, make_examples)


def _trace(
    signature: CallSignature,
    module: nn.Module,
    should_expand: ShouldExpand,
    settled: Settled,
    make_examples: Callable[[nn.Module], tuple[Examples, list[Any]]] | None,
) -> TracedGraph:
    leaves: dict[str, str] = {}  # modules that would freeze something, with the reason
    generators = Generators(module)

    def run(grad_enabled: bool) -> tuple[_Tracer, TracedGraph]:
        examples = make_examples(module) if make_examples is not None else None
        tracer = _Tracer(
            signature, should_expand, leaves, generators, grad_enabled, module, settled, examples
        )
        return tracer, tracer.traced(module)

    while True:
        tracer, traced = run(module.training)
        fault = tracer.find_read(traced.graph)
        if fault is None:
            leaves |= traced.unexpanded  # avoids failing twice
            repeated, repeated_trace = run(module.training)
            if (node := first_difference(traced, repeated_trace)) is not None:
                why = "a graph would keep a value that changes from call to call"
                fault = (*(repeated if node in repeated.places else tracer).places[node], why)
        if fault is None:
            break
        path, place, reason = fault
        if not path:
            raise Untraceable(reason, place)
        leaves[path] = f"{place}: {reason}"
    if tracer.asked_grad_mode:
        try:
            grad_matters = first_difference(traced, run(not module.training)[1]) is not None
        except Exception:
            grad_matters = True
        traced = replace(traced, grad_matters=grad_matters)
    return traced


class _Tracer(fx.Tracer):
    """Records one forward as a `TracedGraph`."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        signature: CallSignature,
        should_expand: ShouldExpand,
        leaves: Mapping[str, str],
        generators: Generators,
        grad_enabled: bool,
        module: nn.Module,
        settled: Settled,
        examples: tuple[Examples, list[Any]] | None = None,
    ) -> None:
        super().__init__()
        self.values: dict[fx.Node, Any] = {}  # the examples
        self.computing = False  # computing an example value: operations are not recorded
        self._answers: dict[tuple[fx.Node, str], Any] = {}
        self._examples: Examples | None = None
        values: list[Any] = []
        if examples is not None:
            self._examples, values = examples
        self._arguments = dict(zip(signature.names, values, strict=False))
        self.calls: dict[fx.Node, list[Call]] = {}
        self.expanded: dict[str, nn.Module] = {}
        self.unexpanded: dict[str, str] = dict(leaves)
        self.places: dict[fx.Node, tuple[str, str]] = {}  # (expanded module, user's line)
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
        self._refusals: list[Exception] = []
        self._inside = [""]  # stack of the expanded modules being run
        self._autograd_functions = AutogradFunctionDetector()
        self._thread = threading.get_ident()
        self._signature = signature
        self._should_expand = should_expand

    def traced(self, module: nn.Module) -> TracedGraph:
        """Returns the graph of `module`."""
        attributes = set(vars(module))
        self.parts = set(module.modules())
        try:
            with none_swallowed() as self._refusals, _guards(self, module):
                graph = self.trace(module)
        finally:
            # tensors that the forward reads from elsewhere, stored in the module by torch.fx
            constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
        traced = TracedGraph(
            graph=graph,
            calls={node: self.calls[node] for node in graph.nodes if node in self.calls},
            find=lambda name: constants[name] if name in constants else attrgetter(name)(module),
            expanded=self.expanded,
            unexpanded=self.unexpanded,
            size_guards=self._finish_guards(graph),
            reads=self.recorder.reads(),
        )
        _settle_augmented_assignments(traced)
        return traced

    def _finish_guards(self, graph: fx.Graph) -> SizeGuards | None:
        """Returns the answers about sizes, and erases nodes used only to compute them."""
        if self._examples is None:
            return None
        remaining = set(graph.nodes)
        answers = {key: answer for key, answer in self._answers.items() if key[0] in remaining}
        guards = SizeGuards(graph, self.values, answers)
        for node in reversed(list(graph.nodes)):
            if not node.users and _is_question(node, self.values):
                if (calls := self.calls.pop(node, None)) is not None:
                    self.calls[node.next] = calls + self.calls.get(node.next, [])
                graph.erase_node(node)
        return guards

    def find_read(self, graph: fx.Graph) -> tuple[str, str, str] | None:
        """Returns the first read of a tensor that its module may replace later, or None.

        The result has the path of the module, the line, and the reason.
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
        """Returns the forward and proxies for its arguments; other arguments keep defaults."""
        signature, forward = self._signature, self.root.forward
        proxies: dict[str, Any] = {
            n: self.create_proxy("placeholder", n, (), {}) for n in signature.names
        }
        values = list((proxies | dict(signature.constants)).values())

        def call(*values: Any) -> Any:
            args, kwargs = signature.split(values)
            return forward(*args, **kwargs)

        return call, values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns whether calls of the module become one node."""
        name = module_qualified_name
        if name in self.unexpanded:
            return True
        if self._examples is not None and (gathered(m) or gathers_inside(m)):
            return False
        return not self._should_expand(name, m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Records a leaf as one node, and any other module by its operations if possible."""
        # torch.fx intercepts calls of all threads, and of modules created by the forward
        if threading.get_ident() != self._thread or self.computing or m not in self.parts:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        call = name, self.num_calls.get(name, 0)
        last = next(iter(reversed(self.graph.nodes)), None)
        is_leaf = self.is_leaf_module(m, name)
        if not is_leaf:
            stack, calls = OrderedDict(self.module_stack), dict(self.num_calls)
            refused = len(self._refusals)
            mark = self.recorder.mark()
            self.recorder.refuse_changes()  # the line that calls this module
            self._inside.append(name)
            try:
                with self.generators.no_draws(), self.recorder.unchanged():
                    result = super().call_module(m, forward, args, kwargs)
                if self._refusals[refused:]:  # caught by its own `except`
                    raise self._refusals[refused]
                self.expanded[name] = m
            except Exception as error:
                del self._refusals[refused:]
                self.recorder.forget_since(mark)
                self.module_stack, self.num_calls = stack, calls
                self._erase_after(last)
                self.unexpanded[name], is_leaf = user_line(error), True
            self._inside.pop()
        if is_leaf:
            if gathers_inside(m):  # it would collect nothing while it is traced
                raise Untraceable("collects outputs of modules inside it (output_router_logits)")
            result = super().call_module(m, forward, args, kwargs)
            for hook in gathered(m):
                hook(m, args, result)
        first = last.next if last is not None else next(iter(self.graph.nodes), None)
        if first is not None and first.op != "root":
            self.calls.setdefault(first, []).insert(0, call)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a node, unless requested by an `autograd.Function`."""
        self._autograd_functions.check_not_inside(sys._getframe(1))
        node = super().create_node(*args, **kwargs)
        if node.target in TAKES_GRADIENTS:
            raise Untraceable(GRADIENTS_ARE_CUT)
        if node.op == "call_method" and node.target in _CONTAINER_METHODS:
            raise Untraceable("changes a list or dict in place")  # a graph has no copy of it
        self.places[node] = self._inside[-1], current_user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        """Keeps the type of a dataclass that is also a dict, as outputs of `transformers` are."""
        if _is_proxy(a):  # may claim to be a tensor
            return a.node
        if isinstance(a, _Size):
            return tuple(self.create_arg(size) for size in a)
        if not is_dataclass(a) or isinstance(a, type) or not isinstance(a, dict):
            return super().create_arg(a)
        values = {f.name: self.create_arg(getattr(a, f.name)) for f in fields(a) if f.init}
        return self.create_node("call_function", type(a), (), values)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Creates a new node for each read of a parameter or buffer, since a node may be erased."""
        if threading.get_ident() != self._thread or self.computing:
            return attr_val
        return super().getattr(attr, attr_val, {})

    def _has_attribute(self, value: Any, name: str) -> bool:
        if not _is_proxy(value):
            return hasattr(value, name)
        example = self.values.get(value.node, UNKNOWN)
        if example is UNKNOWN and self.check_is_tensor(value):
            return hasattr(torch.Tensor, name)
        return hasattr(torch.Tensor if isinstance(example, Tensor) else example, name)

    def _get_attribute(self, value: Any, name: str, *default: Any) -> Any:
        if default and not self._has_attribute(value, name):
            return default[0]
        return getattr(value, name)

    def _is_callable(self, value: Any) -> bool:
        if not _is_proxy(value):
            return callable(value)
        return callable(self.values.get(value.node))

    def check_is_tensor(self, value: fx.Proxy) -> bool:
        """Returns True for an input that every batch must pass as a tensor.

        Raises:
            Untraceable: the value may be something else.
        """
        if self.is_input_tensor(value):
            return True
        example = self.values.get(value.node, UNKNOWN)
        if example is UNKNOWN:
            raise Untraceable(_ASKS_TYPE)
        return isinstance(example, Tensor)

    def is_input_tensor(self, value: fx.Proxy) -> bool:
        """Returns whether `value` is an input that every batch must pass as a tensor."""
        return value.node.op == "placeholder" and value.node.target in self._signature.tensors

    @property
    def uses_examples(self) -> bool:
        """True if the values of nodes are known."""
        return self._examples is not None

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns a proxy that guards its type."""
        return _GuardedProxy(node, self) if self._examples is None else _ExampleProxy(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        """Records a node; on examples returns the node's value as Python sees it."""
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        if self._examples is None:
            return proxy
        if kind == "placeholder":
            value = self._arguments.get(target, UNKNOWN)
        else:
            example_arguments = _mapped(
                (args, kwargs), lambda operand: self.values.get(operand.node, UNKNOWN)
            )
            refused, mark = len(self._refusals), self.recorder.mark()
            self.computing = True
            try:
                with self.generators.no_draws():
                    value = self._examples.run(kind, target, *example_arguments)
            except Untraceable:
                value = UNKNOWN  # may differ at another call
            finally:
                self.computing = False
                del self._refusals[refused:]
                self.recorder.forget_since(mark)  # for modules called as one node
        self.values[proxy.node] = value
        return self._seen(proxy, value, kind in ("placeholder", "call_module"))

    def _seen(self, proxy: Any, value: Any, opens: bool) -> Any:
        """Returns the value of a node as Python sees it: a container of proxies, or a proxy.

        With `opens`, tuples and lists are unpacked too; otherwise their lengths may depend on
        sizes.
        """
        if value is None:
            return None
        if isinstance(value, torch.Size):
            return _Size(proxy[i] for i in range(len(value)))
        if opens and type(value) in (tuple, list):
            return type(value)(proxy[i] for i in range(len(value)))
        if opens and isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(proxy[i] for i in range(len(value))))
        if type(value) is dict:
            return {key: proxy[key] for key in value}
        if is_dataclass(value) and isinstance(value, dict) and not isinstance(value, type):
            names = [f.name for f in fields(value) if f.init]
            with _computing(self):
                empty = type(value)()
            for name in names:
                if getattr(value, name) is not None:
                    empty[name] = self.create_proxy("call_function", getattr, (proxy, name), {})
            return empty
        return proxy

    def answer(self, proxy: fx.Proxy, question: str) -> Any:
        """Returns and records the answer to a query about a value; None if it depends on data."""
        value = self.values.get(proxy.node, UNKNOWN)
        if value is UNKNOWN or (isinstance(value, Tensor) and question != "len"):
            return None
        answer = QUESTIONS[question](value)
        self._answers[proxy.node, question] = answer
        return answer

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.calls.pop(node, None)
            self.graph.erase_node(node)


ASKS_FOR_USER |= {_Tracer._has_attribute.__code__, _Tracer._get_attribute.__code__}


@contextmanager
def _guards(tracer: _Tracer, module: nn.Module) -> Iterator[None]:
    """Raises `Untraceable` where the forward does something that its graph would not repeat."""

    def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if tracer.computing:
            return function(*args, **kwargs)
        return tracer.create_proxy("call_function", function, args, kwargs)

    def refuse(what: str) -> Callable[..., Any]:
        def refused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if tracer.computing:
                return original(*args, **kwargs)
            raise Untraceable(f"uses {what}, which a graph would lose")

        return refused

    def set_attribute(original: Callable[..., None], module: Any, name: str, value: Any) -> None:
        # modules created by the forward are not parts of the model, and torch.fx sets constants
        is_constant = name.startswith("_tensor_constant") or name == INSTALLED
        if module in tracer.parts and not is_constant and not tracer.computing:
            raise Untraceable(f"sets its attribute {name!r}, which a graph would not repeat")
        original(module, name, value)

    def is_grad_enabled(original: Callable[[], bool]) -> bool:
        if tracer.computing:
            return original()
        tracer.asked_grad_mode = True
        return tracer.grad_enabled

    def is_tensor(original: Callable[[Any], bool], value: Any) -> bool:
        return original(value) if not _is_proxy(value) else tracer.check_is_tensor(value)

    def is_instance(original: Callable[..., bool], value: Any, kind: Any) -> bool:
        # except PyTorch's own code, which checks for proxies
        if issubclass(type(value), fx.Proxy) and is_user_code(sys._getframe(2)):
            value = tracer.values.get(value.node, UNKNOWN)
            if value is UNKNOWN:
                raise Untraceable(_ASKS_TYPE)
        return original(value, kind)

    def has_attribute(original: Callable[[Any, str], bool], value: Any, name: str) -> bool:
        if issubclass(type(value), fx.Proxy) and is_user_code(sys._getframe(2)):
            example = tracer.values.get(value.node, UNKNOWN)
            if example is UNKNOWN:
                raise Untraceable(
                    "asks for an attribute of a value, which is unknown while tracing"
                )
            return original(example, name)
        return original(value, name)

    def length(original: Callable[[Any], int], value: Any) -> Any:
        # the number from Python's own len, which would be the example's
        if not issubclass(type(value), fx.Proxy) or tracer.computing:
            return original(value)
        example = tracer.values.get(value.node, UNKNOWN)
        is_tensor = isinstance(example, Tensor) or tracer.is_input_tensor(value)
        return value.shape[0] if is_tensor else original(value)

    def finfo(original: Any, dtype: Any = None) -> Any:
        return original(tracer.answer(dtype, "value") if _is_proxy(dtype) else dtype)

    with ExitStack() as guards:
        guards.enter_context(replaced(builtins, "len", length))
        if tracer.uses_examples:  # they would slow down a trace without examples
            guards.enter_context(replaced(builtins, "hasattr", has_attribute))
            guards.enter_context(replaced(builtins, "isinstance", is_instance))
            for name in ("finfo", "iinfo"):
                guards.enter_context(replaced(torch, name, finfo))
        for name in _FACTORIES:
            guards.enter_context(replaced(torch, name, record))
        for holder, name, what in _REFUSED:
            guards.enter_context(replaced(holder, name, refuse(what)))
        guards.enter_context(replaced(nn.Module, "__setattr__", set_attribute))
        guards.enter_context(replaced(torch, "is_grad_enabled", is_grad_enabled))
        guards.enter_context(replaced(torch, "is_tensor", is_tensor))
        guards.enter_context(replaced(torch.jit, "isinstance", is_instance))
        guards.enter_context(refused_calls(module))
        guards.enter_context(_ForbidEagerOps(tracer))
        guards.enter_context(tracer.generators.no_draws())
        guards.enter_context(tracer.shadows.removed_at_end())
        guards.enter_context(tracer.recorder.clearing_caches())
        guards.enter_context(tracer.recorder.recording())
        yield


class _GuardedProxy(fx.Proxy):
    """A proxy that hides its type, and has the flags common to all tensors here."""

    tracer: _Tracer
    __getitem__: Callable[..., Any]

    is_nested = is_sparse = is_quantized = is_mkldnn = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # used by `isinstance`
        frame: FrameType | None = sys._getframe(1)
        # abc.py uses it for `isinstance(x, Sequence)`, functools for singledispatch
        while frame is not None and _is_pythons(frame):
            frame = frame.f_back
        if frame is not None and is_user_code(frame):
            raise Untraceable(_ASKS_TYPE)
        return _GuardedProxy

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        if frame.f_lasti in _compared_by_identity(frame.f_code):
            raise Untraceable("compares a value with `is`, which is unknown while tracing")
        if frame.f_lasti in _calls(frame.f_code) and is_user_code(frame):  # hasattr, or getattr
            raise Untraceable("asks for an attribute by name, which is unknown while tracing")
        return super().__getattr__(name)

    # a model may catch PyTorch's error and continue differently

    def __bool__(self) -> bool:
        try:
            return bool(super().__bool__())
        except fx.proxy.TraceError as error:
            raise Untraceable(str(error)) from error

    def __iter__(self) -> Any:
        instruction = _instruction(sys._getframe(1))
        if instruction.opname == "UNPACK_SEQUENCE":
            return iter([self[i] for i in range(instruction.argval)])
        try:
            return super().__iter__()
        except fx.proxy.TraceError as error:
            raise Untraceable(str(error)) from error

    def __len__(self) -> int:
        raise Untraceable("asks for a length, which is unknown while tracing")

    def __float__(self) -> float:
        raise Untraceable("converts a value to a Python number, which is unknown while tracing")

    def __int__(self) -> int:
        raise Untraceable("converts a value to a Python number, which is unknown while tracing")

    def __setattr__(self, name: str, value: Any) -> None:
        if is_user_code(sys._getframe(1)):
            raise Untraceable(f"sets {name!r} of a tensor, which a graph would not repeat")
        super().__setattr__(name, value)


def _is_pythons(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in sys.stdlib_module_names


@cache
def _calls(code: CodeType) -> frozenset[int]:
    """Returns the positions of calls in code."""
    instructions = dis.get_instructions(code)
    return frozenset(call.offset for call in instructions if "CALL" in call.opname)


@cache
def _compared_by_identity(code: CodeType) -> frozenset[int]:
    """Returns the positions at which code reads an attribute and compares it with `is`."""
    instructions = list(dis.get_instructions(code))
    offsets = set()
    for number, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_ATTR":
            following = instructions[number + 1 : number + 5]
            opnames = [later.opname for later in following]
            while opnames and opnames[0].startswith("LOAD_"):
                del opnames[0]
            if opnames and (opnames[0] == "IS_OP" or opnames[0].endswith("_NONE")):
                offsets.add(instruction.offset)
    return frozenset(offsets)


def _no_number(what: str) -> Callable[..., Any]:
    def method(self: fx.Proxy, *args: Any) -> Any:
        raise Untraceable(f"asks for {what} of a value, which is unknown while tracing")

    return method


for _what, _names in {
    "a number": ("__index__", "__complex__", "__round__", "__trunc__"),
    "a change of an item": ("__setitem__", "__delitem__"),
}.items():
    for _name in _names:
        setattr(_GuardedProxy, _name, _no_number(_what))


class _ExampleProxy(_GuardedProxy):
    """A proxy with a known example value, which can answer Python's queries."""

    # `is_instance` above answers Python's `isinstance`; PyTorch's C code must not mistake a proxy
    # for a tensor
    __class__ = property(lambda self: _ExampleProxy)

    def _value(self) -> Any:
        return self.tracer.values.get(self.node, UNKNOWN)

    def __getattr__(self, name: str) -> Any:
        value = self._value()
        if value is UNKNOWN:
            return super().__getattr__(name)
        frame = sys._getframe(1)
        kind = Tensor if isinstance(value, Tensor) else type(value)
        held = getattr(kind, name, None)
        if held is None and name not in getattr(value, "__dict__", {}) and not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if callable(held):
            return Attribute(self, name)
        if name in ("requires_grad", "grad_fn", "is_leaf"):
            self.tracer.asked_grad_mode = True
        result = self.tracer.create_proxy("call_function", getattr, (self, name), {})
        if _is_proxy(result) and frame.f_lasti in _compared_by_identity(frame.f_code):
            answer = self.tracer.answer(result, "value")
            return result if answer is None else answer
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iter__(self) -> Any:
        instruction = _instruction(sys._getframe(1))
        if instruction.opname == "UNPACK_SEQUENCE":
            return iter([self[i] for i in range(instruction.argval)])
        value = self._value()
        if value is UNKNOWN or not isinstance(value, Tensor | tuple | list | str):
            return super().__iter__()
        if isinstance(value, str):
            return iter(self._answered("text"))
        return iter([self[i] for i in range(self._answered("len"))])

    def __bool__(self) -> bool:
        value = self._value()
        if value is UNKNOWN or isinstance(value, Tensor):
            return super().__bool__()  # reports control flow
        return bool(self._answered("len" if isinstance(value, tuple | list) else "bool"))

    def __int__(self) -> int:
        return int(self._answered("int"))

    def __index__(self) -> int:
        return int(self._answered("index"))

    def __float__(self) -> float:
        return float(self._answered("float"))

    def __len__(self) -> int:
        return int(self._answered("len"))

    def __contains__(self, item: Any) -> bool:
        return item in self._answered("value")

    def __repr__(self) -> str:
        return str(self._answered("text")) if self._is_plain() else super().__repr__()

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, form: str) -> str:
        return format(self._answered("value"), form) if self._is_plain() else repr(self)

    def __hash__(self) -> int:
        return hash(self._answered("value")) if self._is_plain() else id(self)

    def _is_plain(self) -> bool:
        """Returns whether the value is a plain Python value."""
        value = self._value()
        return value is not UNKNOWN and not isinstance(value, Tensor)

    def _answered(self, question: str) -> Any:
        answer = self.tracer.answer(self, question)
        if answer is None:
            raise Untraceable("asks for a value that depends on the data of a tensor")
        return answer


class _Size(tuple[Any, ...]):
    """The sizes of a tensor, as numbers or proxies."""

    def numel(self) -> Any:
        """Returns the product of the sizes."""
        product: Any = 1
        for size in self:
            product = product * size
        return product


def _instruction(frame: Any) -> dis.Instruction:
    """Returns the instruction that a frame is running."""
    instructions = dis.get_instructions(frame.f_code)
    return next(running for running in instructions if running.offset == frame.f_lasti)


class _TypeKind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and _is_proxy(args[0]):
            example = args[0].tracer.values.get(args[0].node, UNKNOWN)
            if example is UNKNOWN:
                raise Untraceable(_ASKS_TYPE)
            return Tensor if isinstance(example, Tensor) else type(example)
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_TypeKind):
    """A stand-in for `type`, which returns the type of a proxy's example if there is one."""


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    # a graph's code writes `x += y` for operator.iadd(x, y), which would also change a number `x`
    def called(x: Any, y: Any) -> Any:
        return function(x, y)

    called.__name__ = f"{function.__name__}_"
    return called


# Without these methods, Python evaluates `x += y` as `x = x + y`.
for _function in IN_PLACE_OPERATORS:
    setattr(_GuardedProxy, f"__{_function.__name__}__", _recorded(_function))

_IN_PLACE = {function: _called(function) for function in IN_PLACE_OPERATORS}


def _settle_augmented_assignments(traced: TracedGraph) -> None:
    """Keeps `x += y` in place if `x` is a buffer, or `x` or a view of it is used later.

    Otherwise it becomes `x + y`, which can begin a stage without a copy of `x`.
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


def _is_question(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    """Returns whether a node only computes a number or selects a part of a value."""
    if node.op == "call_method":
        return not isinstance(values.get(node, UNKNOWN), Tensor | _UnknownType | None)
    if node.op != "call_function" or node.target in (operator.setitem, *IN_PLACE_OPERATORS):
        return False
    return node.target in (getattr, len) or getattr(node.target, "__module__", "") == "_operator"


_UnknownType = type(UNKNOWN)


def _mapped(values: Any, function: Callable[[fx.Proxy], Any]) -> Any:
    """Returns the arguments of a call with `function` applied to each proxy."""
    if _is_proxy(values):
        return function(values)
    if isinstance(values, tuple | list):
        parts = [_mapped(value, function) for value in values]
        if isinstance(values, _Size):
            return torch.Size(parts) if all(type(p) is int for p in parts) else tuple(parts)
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    if isinstance(values, slice):
        ends = (values.start, values.stop, values.step)
        return slice(*(_mapped(end, function) for end in ends))
    if type(values) is dict:
        return {key: _mapped(value, function) for key, value in values.items()}
    if is_dataclass(values) and not isinstance(values, type):
        names = [field.name for field in fields(values) if field.init]
        return type(values)(**{name: _mapped(getattr(values, name), function) for name in names})
    return values


@contextmanager
def _computing(tracer: _Tracer) -> Iterator[None]:
    was_computing, tracer.computing = tracer.computing, True
    try:
        yield
    finally:
        tracer.computing = was_computing


def _is_proxy(value: Any) -> bool:
    return issubclass(type(value), fx.Proxy)  # does not query the value's class


class _ForbidEagerOps(TorchDispatchMode):
    """A context that rejects computing a tensor, because the graph would keep the result."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._tracer.computing:
            return func(*args, **(kwargs or {}))
        raise Untraceable(
            f"computes a tensor ({func}) from no input, which a graph would do only once"
        )
