"""A backward in two parts: for the input of a stage now, for its weights later.

    output --- layer --- layer --- input        the previous stage waits for this part
                 |         |
               weight    weight                 no stage waits for this part

A node on the path to the input that also leads to weights, such as the node of a linear layer, is
computed twice: once for its input and then, with the same gradient, for its weights. Each time
PyTorch computes only the requested gradients, so no product is computed twice (norms compute their
sums twice). Each weight gets its gradient from one node as in a whole backward, so the results are
bitwise equal. The first part runs the nodes and all of their hooks. The second part calls the
nodes, which does not run hooks again, and runs the nodes between them and the weights. After the
first part, the other nodes on the path free their saved tensors; the gradients of the nodes that
are computed twice are kept.

A graph is not divided if this does not hold, or if a node would compute everything twice:

- a weight that several such nodes lead to: a whole backward adds up their gradients first;
- an LSTM or a GRU, a Python `autograd.Function` with weights, or a compiled one;
- a reentrant checkpoint, which runs a backward inside this one;
- saved tensors with hooks, as of a checkpoint, in nodes of the second part: each node would
  recompute again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from hybridtrain._base.torch_private import free_saved, has_node_hooks, has_saved_hooks
from hybridtrain.errors import UserError, setting
from hybridtrain.pipeline.autograd_graph import Root, edge_of, run_from
from hybridtrain.pipeline.layer_rng import BackwardDraws

# Custom functions that need a whole backward in one call, or free their saved tensors in it.
_WHOLE_ONLY = ("CompiledFunction", "CheckpointFunction")

# PyTorch nodes that always compute all of their gradients: LSTMs and GRUs.
_COMPUTES_ALL = ("CudnnRnn", "MiopenRnn", "MkldnnRnn")

# A node with paths to the input and to weights, and its edges to weights by their index.
Branch = tuple[Node, dict[int, GradientEdge]]


class Division(NamedTuple):
    """The graph of a micro-batch's backward, divided for its two parts.

    Attributes:
        branches: the nodes with paths to the input and to weights.
        others: the other nodes on the paths to the input.
        to_input: which start points have a path to the input.
    """

    branches: Sequence[Branch]
    others: Sequence[Node]
    to_input: Sequence[bool]


class SplitBackward:
    """The backward of one micro-batch, in two parts.

    Args:
        division: the divided graph.
        starts: the start points of the backward, with their gradients.
        inputs: the leaves that get gradients in the first part.
    """

    def __init__(
        self,
        division: Division,
        starts: Sequence[tuple[Root, Tensor]],
        inputs: Sequence[Tensor],
    ) -> None:
        self._branches, self._others, to_input = division
        self._inputs: Sequence[Tensor] = inputs
        # Start points without a path to the input would compute weights only, for which nobody
        # waits.
        self._first = [start for start, leads in zip(starts, to_input, strict=True) if leads]
        self._later = [start for start, leads in zip(starts, to_input, strict=True) if not leads]
        # in the order of the first part, in which a whole backward would reach the weights
        self._seen: list[_Kept] = []

    def to_input(self) -> None:
        """Computes the gradients of the inputs into their `grad`."""
        if not self._first:
            return
        # a node's hook runs after tensor hooks, so it sees the gradients that the node gets
        hooks = [
            node.register_prehook(partial(self._see, node, edges)) for node, edges in self._branches
        ]
        try:
            with BackwardDraws():
                # The second part calls nodes of this graph again, with their saved tensors.
                run_from(self._first, self._inputs, retain_graph=True)
        finally:
            for hook in hooks:
                # The second part calls these nodes again, and must not be seen.
                hook.remove()
        # `retain_graph` keeps the saved tensors of all nodes, also of those that no one runs again.
        for node in self._others:
            free_saved(node)
        # References to the graph: it must be gone with the second part.
        self._first, self._inputs, self._others, self._branches = [], [], [], []

    def _see(
        self, node: Node, edges: dict[int, GradientEdge], gradients: tuple[Tensor | None, ...]
    ) -> None:
        # By reference, not copied; the versions show a change in place.
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
            for branch in seen:
                if _versions(branch.gradients) != branch.versions:
                    raise UserError(
                        f"a gradient inside the model ({type(branch.node).__name__}) is changed in "
                        "place after its use, for example by a tensor hook, which breaks a "
                        f"backward in two parts: use {setting('schedule', '1f1b')}, or return a "
                        "new tensor"
                    )
                gradients = _node_call().run(branch)
                # Right after its use, so that memory falls while the part runs.
                free_saved(branch.node)
                run_from(
                    [
                        (edge, g)
                        for i, edge in branch.edges.items()
                        if (g := gradients[i]) is not None
                    ]
                )


class _NodeCall:
    """Calls a node inside a backward.

    A backward that started at the node would run its hooks again, and the hooks of its output
    tensor. A call runs no hooks. A node called inside a backward computes the gradients that the
    backward requests: here the edges to weights, one product of two.
    """

    def __init__(self) -> None:
        self._branch: _Kept | None = None
        self._gradients: Sequence[Tensor | None] = ()
        # On the CPU: this backward then runs in the calling thread, not in a thread of the device.
        self._inside = torch.zeros((), requires_grad=True, device="cpu")
        self._inside.register_hook(self._call)
        self._start = [(self._inside, torch.ones((), device="cpu"))]

    def run(self, branch: _Kept) -> Sequence[Tensor | None]:
        """Returns the gradients that the node sends over its edges, None where not requested."""
        self._branch = branch
        try:
            # The edges are inputs of this backward, so the engine marks them as needed, although
            # the graph of `_inside` does not lead to them.
            run_from(self._start, (self._inside, *branch.edges.values()))
            return self._gradients
        finally:
            self._branch, self._gradients, self._inside.grad = None, (), None

    def _call(self, _: Tensor) -> None:
        assert self._branch is not None
        self._gradients = self._branch.node(*self._branch.gradients)  # type: ignore[operator]


_of_thread = threading.local()


def _node_call() -> _NodeCall:
    """Returns the thread's `_NodeCall`: its tensors take as long to create as a small node."""
    if not hasattr(_of_thread, "call"):
        # The first call may come from a thread with other modes, and the tensors are kept.
        with torch.inference_mode(False), torch.enable_grad():
            _of_thread.call = _NodeCall()
    call: _NodeCall = _of_thread.call
    return call


class _Kept(NamedTuple):
    """A node of the first part, with the data that the second part needs.

    Attributes:
        node: the node.
        edges: its edges to weights.
        gradients: the gradients that it received.
        versions: the version counters of these gradients.
    """

    node: Node
    edges: dict[int, GradientEdge]
    gradients: tuple[Tensor | None, ...]
    versions: list[int]


def _versions(gradients: Sequence[Tensor | None]) -> list[int]:
    return [gradient._version for gradient in gradients if gradient is not None]


def divide(roots: Sequence[Root], inputs: Sequence[Tensor]) -> Division | None:
    """Divides the graph of a backward from `roots`; None if it must run as a whole.

    Args:
        roots: tensors, or edges of the graph.
        inputs: leaves to compute gradients for in the first part.
    """
    nodes = list(map(_node_of, roots))
    graph = _Graph(nodes, [edge_of(tensor).node for tensor in inputs])
    leads = list(map(graph.leads_to_input, nodes))
    if inputs and not any(leads):
        return None  # a first part would compute nothing for the previous stage
    branches = graph.branches(nodes)
    if branches is None:
        return None
    return Division(branches, graph.on_the_way({id(node) for node, _ in branches}), leads)


def _node_of(root: Root) -> Node:
    edge = root if isinstance(root, GradientEdge) else edge_of(root)
    return edge.node


class _Graph:
    """The nodes of an autograd graph, and which of them lead to the inputs.

    Args:
        roots: the start points of the backward.
        leaves: the nodes that add to the gradients of the inputs.
    """

    def __init__(self, roots: Sequence[Node], leaves: Sequence[Node]) -> None:
        # kept alive, because ids of freed nodes are reused
        self._nodes = _after_their_next(roots)
        self._next = {
            id(node): [reached for reached, _ in node.next_functions if reached is not None]
            for node in self._nodes
        }
        self._to_input = {id(node) for node in leaves}
        # Successors come first, so one pass finds all paths.
        for node in self._nodes:
            if any(map(self.leads_to_input, self._next[id(node)])):
                self._to_input.add(id(node))

    def leads_to_input(self, node: Node) -> bool:
        """Returns whether `node` is on a path to an input."""
        return id(node) in self._to_input

    def on_the_way(self, but: Collection[int]) -> list[Node]:
        """Returns the nodes that lead to an input, except the nodes with these ids."""
        return [node for node in self._nodes if self.leads_to_input(node) and id(node) not in but]

    def branches(self, roots: Sequence[Node]) -> list[Branch] | None:
        """Returns the nodes with paths to the inputs and to weights, and their edges to weights.

        None if the graph cannot be divided.
        """
        # A second owner means that the gradients of two nodes meet there: a whole backward adds
        # them before it goes on.
        owner: dict[int, Node | None] = {}  # of the nodes that lead only to weights
        for root in roots:  # all nodes that lead only to weights run together
            if not self.leads_to_input(root) and not self._owns(None, root, owner):
                return None
        branches: list[Branch] = []
        for node in filter(self.leads_to_input, self._nodes):
            is_function = isinstance(node, BackwardCFunction)
            # Compiled and checkpointed functions run all of their backward at once, whatever is
            # requested.
            if is_function and type(node).__name__.startswith(_WHOLE_ONLY):
                return None
            edges: dict[int, GradientEdge] = {}
            for number, (successor, index) in enumerate(node.next_functions):
                if successor is not None and not self.leads_to_input(successor):
                    # A Python function computes the gradients of all its inputs in each call.
                    if is_function or not self._owns(node, successor, owner):
                        return None
                    edges[number] = GradientEdge(successor, index)
            if not edges:
                continue
            if type(node).__name__.startswith(_COMPUTES_ALL) or has_saved_hooks(node):
                return None
            if has_node_hooks(node):  # the second part calls the node without them
                return None
            branches.append((node, edges))
        return branches

    def _owns(self, node: Node | None, start: Node, owner: dict[int, Node | None]) -> bool:
        """Makes `node` the owner of `start` and later nodes; False if one has another owner.

        False also if a node on this path has saved tensors with hooks.
        """
        stack = [start]
        while stack:
            reached = stack.pop()
            if id(reached) in owner:
                if owner[id(reached)] is not node:
                    return False
                continue
            owner[id(reached)] = node
            if has_saved_hooks(reached):
                return False
            stack += self._next[id(reached)]
        return True


def _after_their_next(roots: Sequence[Node]) -> list[Node]:
    """Returns all nodes that `roots` lead to, each after those that it leads to."""
    # Without recursion: a graph may be deeper than Python's stack.
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
            stack += [
                (successor, False) for successor, _ in node.next_functions if successor is not None
            ]
    return order
