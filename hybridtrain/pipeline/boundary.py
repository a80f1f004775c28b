"""The two boundaries of a stage: values that come in as leaves, and values that leave detached.

    messages -> InputBoundary -> leaves -> layers -> output -> OutputBoundary -> detached messages
    gradients <- InputBoundary <- leaf.grad   ...   roots <- OutputBoundary <- gradients

Values arrive as another stage sent them: detached, with the sender's `requires_grad`. They start a
graph of the stage's own, so that its backward is a separate call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.tensors import have_same_layout, storage_id
from hybridtrain._base.torch_private import run_backward, without_torch_function
from hybridtrain._base.values import as_base, find_unknown
from hybridtrain.errors import SplitError
from hybridtrain.pipeline.links import PRIMARY_OUTPUT, Link
from hybridtrain.pipeline.transfer import move

# The values sent over one link for one micro-batch, and their gradients.
Message = tuple[Any, ...]
Gradients = list[Tensor | None]

_OUTPUT_ALONE = (PRIMARY_OUTPUT,)

# The start point of a backward. An edge of the graph does not hold the tensor's memory, so that a
# tensor that was copied to another device is freed here once this stage's graph does not need it.
Root = Tensor | GradientEdge


class StageInputs(NamedTuple):
    """The tensors that came into a stage for a micro-batch and get a gradient.

    PyTorch converts a leaf's gradient to the leaf's memory layout, and a layer that sums such a
    gradient may then do so in a different order than in the unsplit model. A hook of the node that
    adds to the leaf's gradient sees it before the conversion, at the cost of a Python call per
    tensor. The hook runs after hooks that a layer registers on the tensor, so it sees their
    results, and only in a backward: an `autograd.grad` of the tensor inside the forward does not
    run that node.

    Attributes:
        leaves: the tensors, for each incoming link.
        raw: the gradients that the hooks have seen, by the `id` of their leaf.
        nodes: the nodes with the hooks; PyTorch drops a leaf's node without references.
        hooks: the hooks to remove after the backward, because a tensor may belong to the caller.
    """

    leaves: list[list[Tensor]]
    raw: dict[int, list[Tensor | None]]
    nodes: list[Node]
    hooks: list[RemovableHandle]


class InputBoundary:
    """Turns the values that a stage receives into leaves.

    Args:
        links: the stage's incoming links; none for the first stage.
        device: the stage's device.
        mutates_inputs: the layers may change their input in place, so it must not be a leaf.
    """

    def __init__(self, links: Sequence[Link], device: torch.device, mutates_inputs: bool) -> None:
        self._links = links
        self._names = [link.names for link in links] or [(PRIMARY_OUTPUT,)]
        self._device = device
        self._mutates_inputs = mutates_inputs
        # None until a backward has shown whether a gradient's layout differs from its tensor's
        self._captures_raw: bool | None = None

    def enter(self, messages: Sequence[Message]) -> tuple[dict[str, Any], StageInputs]:
        """Returns the values by name, and the tensors among them that will get a gradient."""
        values: dict[str, Any] = {}
        inputs = StageInputs([], {}, [], [])
        for names, message in zip(self._names, messages, strict=True):
            leaves: list[Tensor] = []
            as_leaf = partial(self._as_leaf, inputs, leaves)
            if len(message) == 1 and type(message[0]) is Tensor:  # the most frequent message
                values[names[0]] = as_leaf(message[0])
            else:
                values.update(zip(names, map_tensors(as_leaf, message), strict=True))
            inputs.leaves.append(leaves)
        return values, inputs

    def _as_leaf(self, inputs: StageInputs, leaves: list[Tensor], tensor: Tensor) -> Tensor:
        if not self._links and tensor.device != self._device:  # a tensor of the batch
            tensor = move(tensor, self._device)
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor)
        if self._captures_raw is not False:
            node, seen = edge_of(tensor).node, inputs.raw.setdefault(id(tensor), [])
            inputs.nodes.append(node)
            inputs.hooks.append(node.register_prehook(partial(_note, seen)))
        return _NonLeafIdentity.apply(tensor) if self._mutates_inputs else tensor

    def gradients(self, inputs: StageInputs) -> list[Gradients]:
        """Returns, after the backward, the gradients to send back over each incoming link."""
        if not inputs.hooks:  # by far the most frequent case
            leaves = inputs.leaves[: len(self._links)]
            return [[leaf.grad for leaf in link_leaves] for link_leaves in leaves]
        for hook in inputs.hooks:
            hook.remove()
        # a layer may run its own backwards, which also add to the leaf's gradient
        raw = {
            number: seen[0]
            for number, seen in inputs.raw.items()
            if len(seen) == 1 and seen[0] is not None
        }
        if self._captures_raw is None:
            self._captures_raw = any(
                number in raw and not have_same_layout(raw[number], leaf)
                for link_leaves in inputs.leaves
                for leaf in link_leaves
                if (number := id(leaf))
            )
        return [
            [raw.get(id(leaf), leaf.grad) for leaf in link_leaves]
            for link_leaves in inputs.leaves[: len(self._links)]
        ]


def _note(seen: list[Tensor | None], gradients: tuple[Tensor | None, ...]) -> None:
    seen.append(gradients[0])


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


def leads_to(roots: Sequence[Root], leaves: Sequence[Tensor]) -> bool:
    """Returns whether PyTorch's own operations lead from `roots` to one of `leaves`.

    Does not follow Python functions, because their backwards may return None.
    """
    numbers = set(map(id, leaves))
    nodes = nodes_from(roots, through_python=False)
    return any(id(_leaf_of(node)) in numbers for node in nodes)


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
        stack += [following for following, _ in node.next_functions if following is not None]


class OutputBoundary:
    """Detaches the values that a stage sends and keeps the start points of their backward.

    Args:
        links: the stage's outgoing links.
        last_layer: the name of the stage's last layer, for errors.
        module: the stage's layers. Their buffers are sent as copies, because the next micro-batch
            may change a buffer in place before the receiver uses it.
        clone: send copies, because a later stage may change values in place and this stage
            recomputes.
        hold_edges: keep edges of the graph instead of tensors that other devices have.
        changers: the changer of each link, see `refuse_overlaps`.
    """

    def __init__(
        self,
        links: Sequence[Link],
        last_layer: str,
        module: nn.Module,
        *,
        clone: bool,
        hold_edges: bool,
        changers: Sequence[str | None],
    ) -> None:
        self._links = links
        self._changers = changers
        self._last_layer = last_layer
        self._module = module
        self._clone = clone
        self._hold_edges = hold_edges

    def leave(self, output: Any, skipped: dict[str, Any]) -> tuple[list[Message], list[list[Root]]]:
        """Returns the message of each link, and the start points of its tensors' backward.

        Raises:
            SplitError: a value may contain tensors that cannot be found.
        """
        messages: list[Message] = []
        roots: list[list[Root]] = []
        for link, changer in zip(self._links, self._changers, strict=True):
            alone = type(output) is Tensor and link.names == _OUTPUT_ALONE
            if alone and output.requires_grad and torch.is_grad_enabled():
                # by far the most frequent message, which needs nothing else
                roots.append([edge_of(output) if self._hold_edges else output])
                messages.append((self._detached(output),))
                continue
            message = tuple(
                [output if name == PRIMARY_OUTPUT else skipped[name] for name in link.names]
            )
            check_sendable(message, link, self._last_layer)
            refuse_overlaps(message, changer)
            message = self._with_copies_of_buffers(message)
            if not torch.is_grad_enabled():
                message = map_tensors(_same, message)  # a layer may change its list later
            else:
                tensors: list[Any] = requiring_grad(message)
                roots.append([edge_of(t) for t in tensors] if self._hold_edges else tensors)
                message = map_tensors(self._detached, message)
            messages.append(message)
        return messages, roots

    def _detached(self, tensor: Tensor) -> Tensor:
        value = tensor.detach().clone() if self._clone else tensor.detach()
        return value.requires_grad_() if tensor.requires_grad else value

    def _with_copies_of_buffers(self, message: Message) -> Message:
        memory = {_memory_of(buffer) for buffer in self._module.buffers()}
        if not memory:
            return message

        def unshared(tensor: Tensor) -> Tensor:
            is_buffer = not tensor.requires_grad and _memory_of(tensor) in memory
            return tensor.clone() if is_buffer else tensor

        return map_tensors(unshared, message)  # type: ignore[no-any-return]


def check_sendable(message: Message, link: Link, last_layer: str) -> None:
    """Raises a SplitError if a message contains anything but tensors and constants."""
    if all(type(part) is Tensor for part in message):
        return
    for name, part in zip(link.names, message, strict=True):
        if location := find_unknown(part, repr(name) if name else "its output"):
            place, leaf = location
            kind = type(leaf)
            raise SplitError(
                f"layer {last_layer!r} passes a {kind.__name__} to a later stage "
                f"({place}), but stages can only send tensors, constants, and tuples, lists, "
                f"dicts or dataclasses of them: {as_base(kind)}, or cut elsewhere (for "
                f"transformers models, set config.use_cache=False)"
            )


class _NonLeafIdentity(torch.autograd.Function):
    """The same values, but not a leaf: a layer may change them in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def requiring_grad(value: Any) -> list[Tensor]:
    """Returns the tensors in a pytree that require a gradient, each once."""
    if type(value) is tuple and len(value) == 1 and type(value[0]) is Tensor:
        return [value[0]] if value[0].requires_grad else []
    tensors = {id(leaf): leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)}
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


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
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of others
        return storage_id(tensor)
