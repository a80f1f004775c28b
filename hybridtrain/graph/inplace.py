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
    "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "float",
    "getitem", "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze", "swapaxes",
    "t", "tensor_split", "to", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as",
}  # fmt: skip


# Modules of these give a new tensor; any other without parameters may return its input.
_MAKING_NEW = {
    f"torch.nn.modules.{name}" for name in ("activation", "padding", "pooling", "upsampling")
}


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
    viewed = _viewed(graph, find)
    return any(
        works_in_place(node, find) and viewed[node].op == "placeholder"
        for node in graph.nodes
        if node.all_input_nodes
    )


def segments_without_cut(
    graph: fx.Graph, home: Mapping[fx.Node, int], find: Callable[[str], Any]
) -> set[int]:
    """The segments, by number, before which there may be no cut.

    Args:
        graph: the whole forward.
        home: the segment of each node.
        find: the module or tensor that a target of the graph means.
    """
    no_cut_before: set[int] = set()
    changed: set[str] = set()
    has_views: set[fx.Node] = set()
    viewed = _viewed(graph, find)
    for node in graph.nodes:
        if not node.all_input_nodes:
            continue
        whole = viewed[node]
        if not works_in_place(node, find):
            if whole is not node:
                has_views.add(whole)
        elif whole.op == "get_attr":
            changed.add(str(whole.target))
        elif whole in has_views:
            no_cut_before.update(range(home[whole] + 1, home[node] + 1))
    for target in changed:
        readers = [n for n in graph.nodes if n.op == "get_attr" and n.target == target]
        uses = [home[user] for reader in readers for user in reader.users]
        no_cut_before.update(range(min(uses) + 1, max(uses) + 1))
    return no_cut_before


def _viewed(graph: fx.Graph, find: Callable[[str], Any]) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory its tensor may be in: itself, if that is new."""
    viewed: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        shares = node.all_input_nodes and (works_in_place(node, find) or _is_view(node, find))
        viewed[node] = viewed[node.all_input_nodes[0]] if shares else node
    return viewed


def _is_view(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Whether the result of `node` may be in the memory of its first argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        return bool(returns) and returns[0].alias_info is not None
    if node.op == "call_module":
        module = find(str(node.target))
        makes_new = type(module).__module__ in _MAKING_NEW
        return not makes_new and not any(True for _ in module.parameters())
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    name = getattr(node.target, "__name__", "")
    if name == "getattr":
        return node.args[1] in ("T", "mT", "H", "mH", "data", "real", "imag")
    return node.op == "call_function" and name in _VIEWS
