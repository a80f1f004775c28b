"""A backward in two parts: to the input of a stage now, to its weights later.

    output --- layer --- layer --- input        the part that the stage before waits for
                 |         |
               weight    weight                 what nobody waits for

A node on the way to the input that also has a way to weights, such as that of a linear layer, is
computed twice: once for its input, and then, with the same gradient, for its weights. Each time
PyTorch computes what is asked for, so that no product is computed twice (norms take their sums
twice). Each weight gets its gradient from one node as in the whole backward, so the results are the
same to the bit. The first part runs the nodes and all of their hooks. The second calls them, which
runs no hooks again, and runs what leads from them to the weights. The tensors that PyTorch's other
nodes on the way have saved are given up after the first part; the gradients of the nodes that are
computed twice are kept instead.

A graph is not divided where that would not hold, or where a node would compute everything twice:

- a weight with ways to several such nodes, whose gradients the whole backward adds up first;
- an LSTM or a GRU, a Python `autograd.Function` with weights, or one that was compiled;
- a reentrant checkpoint, which runs a backward inside this one;
- saved tensors with hooks, as of a checkpoint, in nodes of the second part: it would recompute for
  each node again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from hybridtrain._base.torch_private import free_saved, has_saved_hooks
from hybridtrain.errors import UserError, setting
from hybridtrain.pipeline.boundary import Root, edge_of, run_from
from hybridtrain.pipeline.layer_rng import BackwardDraws

# Custom functions that need their whole backward in one go, or free what they have saved in it.
_WHOLE_ONLY = ("CompiledFunction", "CheckpointFunction")

# PyTorch's nodes that compute all of their gradients even if some are asked for: of LSTMs and GRUs.
_COMPUTES_ALL = ("CudnnRnn", "MiopenRnn", "MkldnnRnn")

# A node with ways to the input and to weights, and its edges to weights by their number.
Branch = tuple[Node, dict[int, GradientEdge]]


class SplitBackward:
    """The backward of one micro-batch, in two parts.

    Args:
        branches: the nodes with ways to the input and to weights.
        others: the other nodes on the way to the input.
        starts: where the backward begins, with the gradients there.
        to_input: which of these have a way to the input.
        inputs: the leaves whose gradients are the first part.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        others: Sequence[Node],
        starts: Sequence[tuple[Root, Tensor]],
        to_input: Sequence[bool],
        inputs: Sequence[Tensor],
    ) -> None:
        self._branches = branches
        self._others = others
        self._inputs: Sequence[Tensor] = inputs
        self._first = [start for start, leads in zip(starts, to_input, strict=True) if leads]
        self._later = [start for start, leads in zip(starts, to_input, strict=True) if not leads]
        # in the order of the first part, in which the whole backward would come to the weights
        self._seen: list[_Kept] = []

    def to_input(self) -> None:
        """Computes the gradients of the inputs, which are then in their `grad`."""
        if not self._first:
            return
        # a hook of the node itself runs after those of tensors: it sees what the node is given
        hooks = [
            node.register_prehook(partial(self._see, node, edges)) for node, edges in self._branches
        ]
        try:
            with BackwardDraws():
                run_from(self._first, self._inputs, retain_graph=True)
        finally:
            for hook in hooks:
                hook.remove()
        for node in self._others:
            free_saved(node)
        self._first, self._inputs, self._others, self._branches = [], [], [], []

    def _see(
        self, node: Node, edges: dict[int, GradientEdge], gradients: tuple[Tensor | None, ...]
    ) -> None:
        self._seen.append(_Kept(node, edges, gradients, _versions(gradients)))

    def to_weights(self) -> None:
        """Adds to the gradients of the weights.

        Raises:
            UserError: a gradient has been changed in place since the first part.
        """
        seen, later = self._seen, self._later
        self._seen, self._later = [], []
        with BackwardDraws():
            run_from(later)
            # A backward that began at a node would run its hooks again, and those of the tensor
            # that it has made. A call runs none. Inside a backward, a node that is called computes
            # what that backward asks for: here the edges to weights, one product of two.
            kept: _Kept
            found: list[Tensor | None] = []
            inside = torch.zeros((), requires_grad=True, device="cpu")
            inside.register_hook(lambda _: found.extend(kept.node(*kept.gradients)))  # type: ignore[operator]
            start = (inside, torch.ones((), device="cpu"))
            for kept in seen:
                if _versions(kept.gradients) != kept.versions:
                    raise UserError(
                        f"a gradient inside the model ({type(kept.node).__name__}) is changed in "
                        "place after its use, as by a hook on a tensor. That goes wrong where "
                        f"the backward is in two parts: use {setting('schedule', '1f1b')}, or "
                        "return a new tensor"
                    )
                found.clear()
                run_from([start], (inside, *kept.edges.values()))
                free_saved(kept.node)
                run_from(
                    [(edge, g) for i, edge in kept.edges.items() if (g := found[i]) is not None]
                )


class _Kept(NamedTuple):
    """A node of the first part, and what the second part needs of it.

    Attributes:
        node: the node.
        edges: from it to weights.
        gradients: what it was given.
        versions: how often these had been changed in place.
    """

    node: Node
    edges: dict[int, GradientEdge]
    gradients: tuple[Tensor | None, ...]
    versions: list[int]


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [gradient._version for gradient in gradients if gradient is not None]


def split_backward(
    starts: Sequence[tuple[Root, Tensor]], inputs: Sequence[Tensor]
) -> SplitBackward | None:
    """Returns the backward from `starts` in two parts; None where it must run as a whole.

    Args:
        starts: tensors, or edges of the graph, and their gradients.
        inputs: leaves whose gradients are wanted first.
    """
    roots = [_node_of(root) for root, _ in starts]
    graph = _Graph(roots, [edge_of(tensor).node for tensor in inputs])
    leads = list(map(graph.leads_to_input, roots))
    if inputs and not any(leads):
        return None  # the stage before waits for nothing that a first part would compute
    branches = graph.branches(roots)
    if branches is None:
        return None
    others = graph.on_the_way({id(node) for node, _ in branches})
    return SplitBackward(branches, others, starts, leads, inputs)


def _node_of(root: Root) -> Node:
    edge = root if isinstance(root, GradientEdge) else edge_of(root)
    return edge.node


class _Graph:
    """The nodes of an autograd graph, and which of them lead to the inputs.

    Args:
        roots: where it begins.
        leaves: the nodes that add to the gradients of the inputs.
    """

    def __init__(self, roots: Sequence[Node], leaves: Sequence[Node]) -> None:
        # held, since an id is that of another node once this one is gone
        self._nodes = _after_their_next(roots)
        self._next = {
            id(node): [one for one, _ in node.next_functions if one is not None]
            for node in self._nodes
        }
        self._to_input = {id(node) for node in leaves}
        for node in self._nodes:
            if any(map(self.leads_to_input, self._next[id(node)])):
                self._to_input.add(id(node))

    def leads_to_input(self, node: Node) -> bool:
        """Returns whether `node` is on the way to an input."""
        return id(node) in self._to_input

    def on_the_way(self, but: Collection[int]) -> list[Node]:
        """Returns the nodes that lead to an input, without those of these ids."""
        return [one for one in self._nodes if self.leads_to_input(one) and id(one) not in but]

    def branches(self, roots: Sequence[Node]) -> list[Branch] | None:
        """Returns the nodes with ways to the inputs and to weights, and their edges to weights.

        None where the graph cannot be divided.
        """
        owner: dict[int, Node | None] = {}  # of the nodes that lead to weights alone
        for root in roots:  # all that lead to weights alone run together
            if not self.leads_to_input(root) and not self._owns(None, root, owner):
                return None
        found: list[Branch] = []
        for node in filter(self.leads_to_input, self._nodes):
            is_function = isinstance(node, BackwardCFunction)
            if is_function and type(node).__name__.startswith(_WHOLE_ONLY):
                return None
            edges: dict[int, GradientEdge] = {}
            for number, (one, index) in enumerate(node.next_functions):
                if one is not None and not self.leads_to_input(one):
                    if is_function or not self._owns(node, one, owner):
                        return None
                    edges[number] = GradientEdge(one, index)
            if not edges:
                continue
            if type(node).__name__.startswith(_COMPUTES_ALL) or has_saved_hooks(node):
                return None
            found.append((node, edges))
        return found

    def _owns(self, node: Node | None, start: Node, owner: dict[int, Node | None]) -> bool:
        """Notes that `node` leads to `start` and on; False if another one does so too.

        False also where hooks give what a node on this way has saved.
        """
        stack = [start]
        while stack:
            one = stack.pop()
            if id(one) in owner:
                if owner[id(one)] is not node:
                    return False
                continue
            owner[id(one)] = node
            if has_saved_hooks(one):
                return False
            stack += self._next[id(one)]
        return True


def _after_their_next(roots: Sequence[Node]) -> list[Node]:
    """Returns all nodes that `roots` lead to, each after those that it leads to."""
    order: list[Node] = []
    seen: dict[int, Node] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif id(node) not in seen:
            seen[id(node)] = node
            stack.append((node, True))
            stack += [(one, False) for one, _ in node.next_functions if one is not None]
    return order
