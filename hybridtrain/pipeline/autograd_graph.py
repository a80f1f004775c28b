"""Walks through autograd's graph, and the backwards that start in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten

from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import run_backward, without_torch_function
from hybridtrain.errors import SplitError

# The start point of a backward. An edge of the graph does not hold the tensor's memory, so that a
# tensor that was copied to another device is freed here once this stage's graph does not need it.
Root = Tensor | GradientEdge


def edge_of(tensor: Tensor) -> GradientEdge:
    """Returns the start of the backward of `tensor`: for a leaf, the node that adds its gradient.

    PyTorch gets this node from a view of the leaf. With a subclass's `__torch_function__` or a
    mode, that view may be the result of further operations, and its node not the leaf's.
    """
    with without_torch_function():
        if tensor.grad_fn is None and (tensor.layout != torch.strided or tensor.is_nested):
            with torch.enable_grad():  # such tensors have copies instead of views
                copy = tensor.clone().grad_fn
            assert copy is not None
            node, index = copy.next_functions[0]
            assert node is not None
            return GradientEdge(node, index)
        return get_gradient_edge(tensor)


def _leaf_of(node: Node) -> Tensor | None:
    """Returns the leaf to whose gradient a node adds; None for any other node."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None  # type: ignore[attr-defined]


def parameters_of(roots: Sequence[Root]) -> list[nn.Parameter]:
    """Returns the parameters to whose gradients a backward from `roots` would add."""
    leaves = map(_leaf_of, nodes_from(roots))
    return [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]


def nodes_from(roots: Sequence[Root], through_python: bool = True) -> Iterator[Node]:
    """Yields the nodes of the graph that a backward from `roots` reaches, each once.

    `through_python=False` does not enter Python functions.
    """
    stack = [root.node if isinstance(root, GradientEdge) else edge_of(root).node for root in roots]
    seen: dict[int, Node] = {}  # holds the nodes: PyTorch may give a freed one's id to another
    while stack:
        node = stack.pop()
        if id(node) in seen or (isinstance(node, BackwardCFunction) and not through_python):
            continue
        seen[id(node)] = node
        yield node
        # In any order: callers only collect.
        stack += [following for following, _ in node.next_functions if following is not None]


def run_from(
    starts: Sequence[tuple[Root, Tensor]],
    inputs: Sequence[Root] = (),
    *,
    retain_graph: bool = False,
) -> None:
    """Runs a backward, which adds to the gradients of all leaves, or of `inputs` alone.

    The caller has entered `BackwardDraws`.
    """
    if not starts:
        return
    roots, gradients = zip(*starts, strict=True)
    run_backward(
        roots, gradients, retain_graph, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


def refuse_overlaps(values: Sequence[Any], changer: str | None) -> None:
    """Checks that no two tensors share memory if a boundary would separate them.

    Otherwise a change of one would no longer affect the other's values or gradient.

    Args:
        values: pytrees of values that cross a cut, or that a recomputation copies.
        changer: the layer that may change them in place, if any.

    Raises:
        SplitError: two tensors share memory.
    """
    if changer is None or (len(values) == 1 and type(values[0]) is Tensor):
        return
    by_memory: dict[int, Tensor] = {}
    for leaf in tree_flatten(values)[0]:
        if not isinstance(leaf, Tensor):
            continue
        # By address and not by view base: `detach` and `.data` share memory without being views.
        other = by_memory.setdefault(_memory_of(leaf), leaf)
        if other is not leaf:
            raise SplitError(
                f"tensors of shapes {tuple(other.shape)} and {tuple(leaf.shape)} share memory "
                f"and are inputs of layer {changer!r}, which works in place. A cut or a "
                f"recomputation gives each its own memory: return a copy of one of them "
                f"(.clone()), set inplace=False, or cut elsewhere"
            )


def _memory_of(tensor: Tensor) -> int:
    """Returns the memory address that a tensor shares with its views."""
    try:
        # An empty storage has the address 0, which all would share.
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of others
        return storage_id(tensor)
