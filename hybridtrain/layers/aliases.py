"""Which segments must stay in one stage because they change each other's tensors in place.

A value that crosses a cut begins a new graph of autograd, and the tensor that it is a view of does
not come along. So a change in place of a view must stay with the tensor that is viewed. A buffer
that is changed by one segment and read by another must not be used by two threads at a time.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift,
}  # fmt: skip

_VIEWS = {
    "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem",
    "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes", "t",
    "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
}  # fmt: skip


def works_in_place(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Whether `node` changes its first argument."""
    target = node.target
    if node.op == "call_module":
        return bool(getattr(find(str(target)), "inplace", False))
    if node.op == "call_method":
        return str(target).endswith("_") and not str(target).endswith("__")
    if node.op != "call_function" or isinstance(target, str):
        return False
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if target in _IN_PLACE or getattr(target, "__name__", "").endswith("_"):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def inputs_are_changed(graph: fx.Graph, find: Callable[[str], Any]) -> bool:
    """Whether `graph` changes its inputs in place, or views of them."""
    return any(
        works_in_place(node, find) and _viewed(node, find)[0].op == "placeholder"
        for node in graph.nodes
        if node.all_input_nodes
    )


def joined_segments(
    graph: fx.Graph, home: Mapping[fx.Node, int], find: Callable[[str], Any]
) -> set[int]:
    """The segments, by number, before which there may be no cut.

    Args:
        graph: the whole forward.
        home: the segment of each node.
        find: the module or tensor that a target of the graph means.
    """
    joined: set[int] = set()
    changed: set[str] = set()
    for node in graph.nodes:
        if not node.all_input_nodes or not works_in_place(node, find):
            continue
        viewed, is_view = _viewed(node, find)
        if viewed.op == "get_attr":
            changed.add(str(viewed.target))
        elif is_view:
            joined.update(range(home[viewed] + 1, home[node] + 1))
    for target in changed:
        readers = [n for n in graph.nodes if n.op == "get_attr" and n.target == target]
        uses = [home[user] for reader in readers for user in reader.users]
        joined.update(range(min(uses) + 1, max(uses) + 1))
    return joined


def _viewed(node: fx.Node, find: Callable[[str], Any]) -> tuple[fx.Node, bool]:
    """The node whose tensor `node` changes in place, and whether it does so through a view."""
    viewed, is_view = node.all_input_nodes[0], False
    while viewed.all_input_nodes:
        view = _is_view(viewed)
        if not view and not works_in_place(viewed, find):
            break
        viewed, is_view = viewed.all_input_nodes[0], is_view or view
    return viewed, is_view


def _is_view(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        return bool(returns) and returns[0].alias_info is not None
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _VIEWS
