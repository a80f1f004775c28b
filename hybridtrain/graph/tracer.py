"""Traces a module's forward with torch.fx, at the level of its submodules.

torch.fx runs the forward with proxies in place of tensors and records what is done to them. Code
that it cannot record faithfully must not be recorded at all. Where a submodule has control flow
that depends on data, a change of the grad mode or of autocast, or a random choice of Python's, the
submodule stays one node, which calls it. The same in the model's own forward is an error that names
the line.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

from torch import fx, nn

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.fx_guards import GuardedProxy, fx_guards
from hybridtrain.graph.traced_graph import Call, ShouldExpand, TracedGraph
from hybridtrain.graph.untraceable import (
    AutogradFunctionDetector,
    Untraceable,
    no_random_choices,
    user_line,
)


def trace(signature: CallSignature, module: nn.Module, should_expand: ShouldExpand) -> TracedGraph:
    """Returns the forward of `module` as a graph, in the mode that the module is in.

    Args:
        signature: the arguments of the forward.
        module: any module.
        should_expand: whether to look inside a submodule.

    Raises:
        Exception: raised by torch.fx or by the forward itself, where it cannot be traced.
    """
    tracer = _Tracer(signature, should_expand)
    attributes = set(vars(module))
    try:
        with fx_guards(tracer):
            graph = tracer.trace(module)
    finally:
        # tensors that the forward reads from elsewhere, which torch.fx has put into the module
        constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
    tracer.check_reads(graph)
    return TracedGraph(
        graph=graph,
        calls={node: tracer.calls[node] for node in graph.nodes if node in tracer.calls},
        find=lambda name: constants[name] if name in constants else attrgetter(name)(module),
        expanded=tracer.expanded,
        unexpanded=tracer.unexpanded,
    )


class _Tracer(fx.Tracer):
    """Records one forward; see `TracedGraph` for what it finds."""

    proxy_buffer_attributes = True

    def __init__(self, signature: CallSignature, should_expand: ShouldExpand) -> None:
        super().__init__()
        self.calls: dict[fx.Node, list[Call]] = {}
        self.expanded: dict[str, nn.Module] = {}
        self.unexpanded: dict[str, str] = {}
        self._autograd_functions = AutogradFunctionDetector()
        self._thread = threading.get_ident()
        self._signature = signature
        self._should_expand = should_expand

    def check_reads(self, graph: fx.Graph) -> None:
        """Raises `Untraceable` if a tensor is read from a module that may replace it."""
        for node in graph.find_nodes(op="get_attr"):
            holder, _, name = str(node.target).rpartition(".")
            tensor = attrgetter(str(node.target))(self.root) if holder else None
            if holder and holder not in self.expanded and not isinstance(tensor, nn.Parameter):
                raise Untraceable(f"reads {name!r} of {holder!r}, which may change it")

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Returns the forward and the proxies of its arguments; the others keep their defaults."""
        signature, forward = self._signature, self.root.forward
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in signature.names]
        values = [
            signature.constants.get(name, proxy)
            for name, proxy in zip(signature.names, proxies, strict=True)
        ]

        def call(*values: Any) -> Any:
            args, kwargs = signature.split(values)
            return forward(*args, **kwargs)

        return call, values

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns whether calls of the module become one node."""
        name = module_qualified_name
        return name in self.unexpanded or not self._should_expand(name, m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records one node for a leaf; else what is in it, or one node where that fails."""
        if threading.get_ident() != self._thread:  # torch.fx sees the calls of all threads
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        call = name, self.num_calls.get(name, 0)
        last = self._last_node()
        if not self.is_leaf_module(m, name):
            stack, calls = OrderedDict(self.module_stack), dict(self.num_calls)
            try:
                with no_random_choices():
                    result = super().call_module(m, forward, args, kwargs)
            except Exception as error:
                self.module_stack, self.num_calls = stack, calls
                self._erase_after(last)
                self.unexpanded[name] = user_line(error)
            else:
                self.expanded[name] = m
                self._note_call(last, call)
                return result
        result = super().call_module(m, forward, args, kwargs)
        self._note_call(last, call)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Creates a node, unless an `autograd.Function` asks for it."""
        self._autograd_functions.check_not_inside(sys._getframe(1))
        return super().create_node(*args, **kwargs)

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

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns a `GuardedProxy`."""
        return GuardedProxy(node, self)

    def _note_call(self, last: fx.Node | None, call: Call) -> None:
        first = last.next if last is not None else next(iter(self.graph.nodes), None)
        if first is not None and first.op != "root":
            self.calls.setdefault(first, []).insert(0, call)

    def _last_node(self) -> fx.Node | None:
        return next(iter(reversed(self.graph.nodes)), None)

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.calls.pop(node, None)
            self.graph.erase_node(node)
