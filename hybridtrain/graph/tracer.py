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
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import fx, nn

from hybridtrain.graph.call_signature import Inputs
from hybridtrain.graph.guards import (
    Functions,
    Proxy,
    Untraceable,
    check_draws,
    fx_trace_guards,
    where,
)
from hybridtrain.graph.mode_graphs import Call, ShouldExpand, TracedGraph, attribute


def trace(inputs: Inputs, should_expand: ShouldExpand, module: nn.Module) -> TracedGraph:
    """The forward of `module`, in the mode that it is in.

    Args:
        inputs: what the forward is given.
        should_expand: whether to look into a submodule.
        module: any module.

    Raises:
        Exception: what torch.fx or the forward itself says of what cannot be recorded.
    """
    return _Tracer(inputs, should_expand).record(module)


class _Tracer(fx.Tracer):
    """Records one forward."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: Inputs, should_expand: ShouldExpand) -> None:
        super().__init__()
        self._entered: dict[fx.Node, list[Call]] = {}
        self._expanded: dict[str, nn.Module] = {}
        self._unexpanded: dict[str, str] = {}
        self._functions = Functions()
        self._thread = threading.get_ident()
        self._inputs = inputs
        self._should_expand = should_expand

    def record(self, module: nn.Module) -> TracedGraph:
        """See `trace`."""
        attributes = set(vars(module))

        def recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> fx.Proxy:
            return self.create_proxy("call_function", function, args, kwargs)

        try:
            with fx_trace_guards(recorded):
                graph = self.trace(module)
        finally:
            # tensors that the forward makes from no input
            constants = {name: vars(module).pop(name) for name in set(vars(module)) - attributes}
        self._check_reads(graph)
        return TracedGraph(
            graph=graph,
            entered={node: self._entered[node] for node in graph.nodes if node in self._entered},
            find=lambda name: constants[name] if name in constants else attribute(module, name),
            expanded=self._expanded,
            unexpanded=self._unexpanded,
        )

    def _check_reads(self, graph: fx.Graph) -> None:
        """Makes sure that no tensor is read from a module that may put another in its place."""
        for node in graph.nodes:
            if node.op == "get_attr":
                holder, _, name = str(node.target).rpartition(".")
                if holder and holder not in self._expanded:
                    tensor = attribute(self.root, str(node.target))
                    if not isinstance(tensor, nn.Parameter):
                        raise Untraceable(f"reads {name!r} of {holder!r}, which may change it")

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
        return name in self._unexpanded or not self._should_expand(name, m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One node for a leaf; else the nodes of what is in it, or one node where that fails."""
        if threading.get_ident() != self._thread:  # torch.fx watches the calls of all threads
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        call = name, self.num_calls.get(name, 0)
        last = self._last_node()
        if not self.is_leaf_module(m, name):
            stack, calls = OrderedDict(self.module_stack), dict(self.num_calls)
            state = random.getstate()
            try:
                result = super().call_module(m, forward, args, kwargs)
                check_draws(state)
            except Exception as error:
                random.setstate(state)
                self.module_stack, self.num_calls = stack, calls
                self._erase_after(last)
                self._unexpanded[name] = where(error)
            else:
                self._expanded[name] = m
                self._note(last, call)
                return result
        result = super().call_module(m, forward, args, kwargs)
        self._note(last, call)
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node, unless it is for what a graph would lose."""
        self._functions.check_not_inside(sys._getframe(1))
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Keeps a dataclass one, also if it is a dict as well (an output of `transformers`)."""
        if not is_dataclass(a) or isinstance(a, type) or not isinstance(a, dict):
            return super().create_arg(a)
        values = {f.name: self.create_arg(getattr(a, f.name)) for f in fields(a) if f.init}
        return self.create_node("call_function", type(a), (), values)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Reads a parameter or buffer anew each time: a node may be erased again."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, {})

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `Proxy`."""
        return Proxy(node, self)

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
