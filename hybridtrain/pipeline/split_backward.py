"""A backward in two parts: to the input of a stage now, to its weights later.

    output --- layer --- layer --- input        the part that the stage before waits for
                 |         |
               weight    weight                 what nobody waits for

A node on the way to the input that also has a way to weights, such as that of a linear layer, runs
twice: once for its input, and then, with the same gradient, for its weights. Each time PyTorch
computes what is asked for, so that no product is computed twice (norms take their sums twice). Each
weight gets its gradient from one node as in the whole backward, so the results are the same to the
bit. The tensors that PyTorch's other nodes on the way have saved are given up after the first part;
the gradients of the nodes that run twice are kept instead.

A graph is not divided where that would not hold, or where a node would compute everything twice:

- a weight with ways to several such nodes, whose gradients the whole backward adds up first;
- an LSTM or a GRU, a Python `autograd.Function` with weights, or one that was compiled;
- a reentrant checkpoint, which runs a backward inside this one;
- saved tensors with hooks, as of a checkpoint: it would recompute for each node again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hybridtrain._torch_private import free_saved, has_saved_hooks, run_backward
from hybridtrain.errors import UserError
from hybridtrain.pipeline.boundary import Root
from hybridtrain.pipeline.layer_rng import BackwardDraws

# Custom functions that need their whole backward in one go, or free what they have saved in it.
_WHOLE_ONLY = ("CompiledFunction", "CheckpointFunction")

# PyTorch's nodes that compute all of their gradients even if some are asked for: of LSTMs and GRUs.
_COMPUTES_ALL = ("CudnnRnn", "MiopenRnn", "MkldnnRnn")


class SplitBackward:
    """The backward of one micro-batch, in two parts.

    Args:
        branches: the nodes with ways to the input and to weights, and the weights of each.
        others: the other nodes on the way to the input.
        starts: where the backward begins, with the gradients there.
        to_input: which of these have a way to the input.
        inputs: the leaves whose gradients are the first part.
    """

    def __init__(
        self,
        branches: Sequence[tuple[Node, list[Tensor]]],
        others: Sequence[Node],
        starts: Sequence[tuple[Root, Tensor]],
        to_input: Sequence[bool],
        inputs: Sequence[Tensor],
    ) -> None:
        self._weights_of = {id(node): (node, weights) for node, weights in branches}
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
        branches = [node for node, _ in self._weights_of.values()]
        hooks = [node.register_prehook(_Keep(node, self._seen)) for node in branches]
        try:
            run_from(self._first, self._inputs, retain_graph=True)
        finally:
            for hook in hooks:
                hook.remove()
        for node in self._others:
            free_saved(node)
        self._first, self._inputs, self._others = [], [], []

    def to_weights(self) -> None:
        """Adds to the gradients of the weights.

        Raises:
            UserError: gradients are changed by a hook on a tensor, or in place.
        """
        seen, later = self._seen, self._later
        self._seen, self._later = [], []
        run_from(later)
        for node, gradients, versions in seen:
            _, weights = self._weights_of.pop(id(node))
            again: list[_Kept] = []
            hook = node.register_prehook(_Keep(node, again))
            starts: list[tuple[Root, Tensor]] = [
                (GradientEdge(node, number), gradient)
                for number, gradient in enumerate(gradients)
                if gradient is not None
            ]
            try:
                run_from(starts, weights)
            finally:
                hook.remove()
            for kept in again:
                same = all(a is b for a, b in zip(gradients, kept.gradients, strict=True))
                if not same or kept.versions != versions:
                    raise UserError(
                        f"a gradient inside the model ({type(node).__name__}) is changed by a hook "
                        f"on a tensor, or in place. That goes wrong where the backward is in two "
                        f"parts: use schedule=1f1b, or take the hook off"
                    )
        self._weights_of.clear()


class _Kept(NamedTuple):
    """The gradients that a node has used, and how often they had been changed in place."""

    node: Node
    gradients: tuple[Tensor | None, ...]
    versions: list[int]


class _Keep:
    """A hook that notes the gradients which a node is about to use."""

    def __init__(self, node: Node, notes: list[_Kept]) -> None:
        self._node = node
        self._notes = notes

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        versions = [g._version for g in gradients if g is not None]
        self._notes.append(_Kept(self._node, gradients, versions))


def run_from(
    starts: Sequence[tuple[Root, Tensor]],
    inputs: Sequence[Tensor] = (),
    *,
    retain_graph: bool = False,
) -> None:
    """Runs a backward, which adds to the gradients of all leaves, or of `inputs` alone."""
    if not starts:
        return
    roots, gradients = zip(*starts, strict=True)
    with BackwardDraws():
        run_backward(
            roots, gradients, retain_graph, False, tuple(inputs), allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip


def split_backward(
    starts: Sequence[tuple[Root, Tensor]], inputs: Sequence[Tensor], looks_for_hooks: bool = True
) -> SplitBackward | None:
    """Returns the backward from `starts` in two parts; None where it must run as a whole.

    Args:
        starts: tensors, or edges of the graph, and their gradients.
        inputs: leaves whose gradients are wanted first.
        looks_for_hooks: whether saved tensors may have hooks, which takes longer than the rest.
    """
    roots = [_node_of(root) for root, _ in starts]
    graph = _Graph(roots, [get_gradient_edge(tensor).node for tensor in inputs])
    branches = graph.branches(roots)
    if branches is None or (looks_for_hooks and graph.has_saved_hooks()):
        return None
    others = graph.on_the_way({id(node) for node, _ in branches})
    leads = list(map(graph.leads_to_input, roots))
    return SplitBackward(branches, others, starts, leads, inputs)


def _node_of(root: Root) -> Node:
    edge = root if isinstance(root, GradientEdge) else get_gradient_edge(root)
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

    def has_saved_hooks(self) -> bool:
        """Returns whether hooks give the nodes what they have saved."""
        return any(map(has_saved_hooks, self._nodes))

    def branches(self, roots: Sequence[Node]) -> list[tuple[Node, list[Tensor]]] | None:
        """Returns the nodes with ways to the inputs and to weights, and the weights of each.

        None where the graph cannot be divided.
        """
        owner: dict[int, Node | None] = {}  # of the nodes that lead to weights alone
        for root in roots:
            if not self.leads_to_input(root):
                self._weights(root, None, owner)  # all of these run together
        found: list[tuple[Node, list[Tensor]]] = []
        for node in filter(self.leads_to_input, self._nodes):
            is_function = isinstance(node, BackwardCFunction)
            if is_function and type(node).__name__.startswith(_WHOLE_ONLY):
                return None
            weights: list[Tensor] = []
            for one in self._next[id(node)]:
                if not self.leads_to_input(one):
                    own = self._weights(one, node, owner)
                    if own is None or is_function:
                        return None
                    weights += own
            if weights and type(node).__name__.startswith(_COMPUTES_ALL):
                return None
            if weights:
                found.append((node, weights))
        return found

    def _weights(
        self, start: Node, by: Node | None, owner: dict[int, Node | None]
    ) -> list[Tensor] | None:
        """Returns the weights that `start` leads to; None if another node leads there too."""
        weights: list[Tensor] = []
        stack = [start]
        while stack:
            node = stack.pop()
            if id(node) in owner:
                if owner[id(node)] is not by:
                    return None
                continue
            owner[id(node)] = by
            if not self._next[id(node)]:
                weights.append(node.variable)  # type: ignore[attr-defined]
            stack += self._next[id(node)]
        return weights


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
