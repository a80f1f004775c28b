"""Finds where a traced graph cannot be cut because a tensor is changed in place.

A value that crosses a cut begins a new autograd graph, and the tensor that it is a view of does not
come along. So a change in place of a view must stay with the tensor that is viewed. A buffer that
is changed by one segment and read by another must not be used by two threads at a time.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from hybridtrain._torch_private import operator_schema
from hybridtrain.graph.traced_graph import TracedGraph

# operator.iadd for operator.add, and so on
_IN_PLACE_OPERATORS = {
    vars(operator)[f"i{name.strip('_')}"]
    for name in vars(operator)
    if hasattr(operator, f"__i{name.strip('_')}__")
}

_VIEW_METHODS = {
    "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "float",
    "getitem", "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes",
    "t", "tensor_split", "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
}  # fmt: skip

_VIEW_PROPERTIES = ("T", "mT", "H", "mH", "data", "real", "imag")

# Modules of these return a new tensor; any other without parameters may return its input.
_RETURN_NEW_TENSORS = {
    f"torch.nn.modules.{name}" for name in ("activation", "padding", "pooling", "upsampling")
}


def node_works_in_place(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Returns whether `node` changes its first argument."""
    target = node.target
    if node.op == "call_module":
        return bool(getattr(find(str(target)), "inplace", False))
    if node.op == "call_method":
        return str(target).endswith("_") and not str(target).endswith("__")
    if node.op != "call_function" or isinstance(target, str):
        return False
    if (schema := operator_schema(target)) is not None:
        return bool(schema.is_mutable)
    if target in _IN_PLACE_OPERATORS or getattr(target, "__name__", "").endswith("_"):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def changes_inputs(traced: TracedGraph) -> bool:
    """Returns whether the graph changes its inputs in place, or views of them."""
    return any(
        base.op == "placeholder" and base is not node and node_works_in_place(node, traced.find)
        for node, base in _viewed(traced).items()
    )


def segments_without_cut(traced: TracedGraph, segment_of: Mapping[fx.Node, int]) -> set[int]:
    """Returns the segments, of those that nodes are in, before which there may be no cut."""
    no_cut_before: set[int] = set()
    changed: set[str] = set()
    has_views: set[fx.Node] = set()
    for node, base in _viewed(traced).items():
        if not node.all_input_nodes:
            continue
        if not node_works_in_place(node, traced.find):
            if base is not node:
                has_views.add(base)
        elif base.op == "get_attr":
            changed.add(str(base.target))
        elif base in has_views:
            no_cut_before.update(range(segment_of[base] + 1, segment_of[node] + 1))
    for target in changed:
        readers = [n for n in traced.graph.nodes if n.op == "get_attr" and n.target == target]
        uses = [segment_of[user] for reader in readers for user in reader.users]
        no_cut_before.update(range(min(uses) + 1, max(uses) + 1))
    return no_cut_before


def _viewed(traced: TracedGraph) -> dict[fx.Node, fx.Node]:
    """Returns, for each node, the one whose memory its tensor may share: itself if it is new."""
    viewed: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        shares = node.all_input_nodes and (
            node_works_in_place(node, traced.find) or _is_view(node, traced.find)
        )
        viewed[node] = viewed[node.all_input_nodes[0]] if shares else node
    return viewed


def _is_view(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Returns whether the result of `node` may share the memory of its first argument."""
    if node.op == "call_module":
        module = find(str(node.target))
        is_new = type(module).__module__ in _RETURN_NEW_TENSORS
        return not is_new and not any(True for _ in module.parameters())
    if node.op == "call_method":
        return str(node.target) in _VIEW_METHODS
    if (schema := operator_schema(node.target)) is not None:
        return bool(schema.returns) and schema.returns[0].alias_info is not None
    name = getattr(node.target, "__name__", "")
    if name == "getattr":
        return node.args[1] in _VIEW_PROPERTIES
    return node.op == "call_function" and name in _VIEW_METHODS
