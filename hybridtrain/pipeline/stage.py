"""A stage: some consecutive layers on one device, and what it keeps between F and B."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves

from hybridtrain.errors import SplitError, UserError
from hybridtrain.graph.layer import Layer
from hybridtrain.memory import count_saved
from hybridtrain.pipeline import ties
from hybridtrain.pipeline.activation_checkpoint import recomputed, works_in_place
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.links import PRIMARY_OUTPUT, Link
from hybridtrain.pipeline.reducer import FrozenStageReducer, StageReducer
from hybridtrain.pipeline.transfer import move
from hybridtrain.pytree import hides_tensors, leaves_of, map_tensors
from hybridtrain.skip import pop, popped_by, skip_scope, stash, stashed_by

# What the last stage does with a micro-batch's output: `head(microbatch, output)` returns the
# scalar that the backward starts from or, in a forward-only pass, what the caller wants.
Head = Callable[[int, Any], Any]

# The values, or the gradients, that travel over one link for one micro-batch.
Message = tuple[Any, ...]
Gradients = list[Tensor | None]

# Where a backward begins. An edge of the graph does not hold the tensor's memory, so that what was
# copied to another device is free here as soon as this stage's own graph can do without it.
Root = Tensor | GradientEdge

# What PyTorch says of mistakes that a pipeline makes likely, and what to do about them.
_WAYS_OUT = {
    "leaf Variable that requires grad": (
        "the layer changes its input in place: say so with an attribute inplace = True on its "
        "module, as nn.ReLU has it"
    ),
    "Expected more than 1 value per channel": (
        "a micro-batch is too small for a batch norm: lower pipeline.chunks, or set "
        "data.drop_last=true so that there is no short last batch"
    ),
    "Guard failed": (
        "torch.export has recorded the model for other sizes: its forward decides by them, so give "
        "batches of the sizes of the first one, or of HybridModel(..., example_inputs=...)"
    ),
}

_run_backward = Variable._execution_engine.run_backward


class Stage:
    """Runs its layers on micro-batches and keeps, for each, what its backward needs.

    Values come in as another stage sent them: detached, with `requires_grad` as at the sender.
    They begin a graph of this stage's own, so that its backward is a call of its own too.

    TraceGuards:
        index: its place in the pipeline.
        layers: what it runs.
        device: where.
        incoming: the links to it, the main value's first.
        outgoing: the links from it, the main value's first.
        module: its layers under one root, for what wants a module (placement, DDP).
        aliases: what it uses in place of parameters that live in an earlier stage.
        replica: its part in data parallelism, if there is any.
        saved_bytes: what autograd keeps of one micro-batch; None before the first.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        first: int,
        devices: Sequence[torch.device],
        draws: LayerRNG,
        links: Sequence[Link] = (),
        slots: Sequence[ties.TiedUse] = (),
        recompute: frozenset[int] = frozenset(),
        names: Mapping[int, str] | None = None,
        keeps_apart: bool = False,
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.device = device = devices[index]
        self.incoming = sorted((k for k in links if k.target == index), key=lambda k: -k.source)
        self.outgoing = [link for link in links if link.source == index]
        self.module = nn.ModuleList(layer.module for layer in layers)
        self.aliases = ties.place(self.module, device, slots)
        for number, alias in enumerate(self.aliases):
            self.module.register_parameter(f"alias_{number}", alias.alias)
        self.replica: StageReducer | FrozenStageReducer | None = None
        self.saved_bytes: int | None = None
        self._first = first
        # what is computed once more must not be changed in place by a later layer or stage
        self._keeps_apart = keeps_apart
        self._parameter_names = names or {}
        self._draws = draws
        self._recompute = recompute
        self._skips = any(
            stashed_by(layer.module) or popped_by(layer.module) for layer in self.layers
        )
        self._changes_its_input = works_in_place(self.module)
        # the rows of a batch are views, and copies of them are aligned otherwise, which may change
        # last bits: stage 0 copies them only if its first layer may change them
        first_layer = layers[0].module
        self._copies_to_recompute = works_in_place(self.module if index else first_layer)
        self._received = [link.names for link in self.incoming] or [(PRIMARY_OUTPUT,)]
        self._sends_copies = any(devices[link.target] != device for link in self.outgoing)
        self._held: dict[int, tuple[Sequence[Sequence[Root]], list[list[_Arrival]]]] = {}
        self._other_layouts: bool | None = None

    def __str__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return f"stage {self.index} ({first if first == last else f'{first} to {last}'})"

    def forward(
        self,
        microbatch: int,
        messages: Sequence[Message],
        head: Head | None = None,
        recompute: bool = False,
    ) -> list[Message]:
        """Runs the layers on one micro-batch.

        Args:
            microbatch: which one.
            messages: what came over each incoming link; for stage 0, `[(inputs,)]`.
            head: what the last stage does with the output.
            recompute: the backward computes the activations once more instead of keeping them.

        Returns:
            what goes over each outgoing link.
        """
        arrivals: list[list[_Arrival]] = []
        skipped: dict[str, Any] = {}
        for names, message in zip(self._received, messages, strict=True):
            received, own = self._receive(message)
            skipped.update(zip(names, received, strict=True))
            arrivals.append(own)
        value = skipped.pop(PRIMARY_OUTPUT)
        if self.saved_bytes is None and torch.is_grad_enabled():
            # the rows of a batch are a view: their own bytes count, not the batch's
            given = [x for x in tree_leaves((value, skipped)) if isinstance(x, Tensor)]
            with count_saved(self.module, given) as saved:
                output, skipped = self._compute(microbatch, value, skipped, recompute)
            self.saved_bytes = saved.bytes + sum(tensor.nbytes for tensor in given)
        else:
            output, skipped = self._compute(microbatch, value, skipped, recompute)
        if head is not None:
            output = head(microbatch, output)
        sent_over = [
            tuple(output if name == PRIMARY_OUTPUT else skipped[name] for name in link.names)
            for link in self.outgoing
        ]
        for message in sent_over:
            self._check_sendable(message)
        if not torch.is_grad_enabled():
            return sent_over
        roots = [_requiring_grad(message) for message in sent_over]
        if head is not None:
            roots = [_requiring_grad(output)]
            if not roots[0]:
                raise UserError("the loss depends on no trainable parameter: nothing to train")
        self._held[microbatch] = (self._edges(roots) if self._sends_copies else roots), arrivals
        return [_detach(message, self._keeps_apart) for message in sent_over]

    def backward(
        self, microbatch: int, gradients: Sequence[Gradients], reduce: bool
    ) -> list[Gradients]:
        """Runs the backward of one micro-batch.

        Args:
            microbatch: which one.
            gradients: for each outgoing link, the gradients of the tensors that went over it and
                require one; for the last stage, that of the loss.
            reduce: whether the stage's gradients are complete with this micro-batch, so that
                they are averaged over the replicas as they come.

        Returns:
            for each incoming link, the gradients to send back.
        """
        sent, arrivals = self._held.pop(microbatch)
        roots: list[Root] = []
        grads: list[Tensor] = []
        for tensors, given in zip(sent, gradients, strict=True):
            for root, grad in zip(tensors, given, strict=True):
                if grad is not None:
                    roots.append(root)
                    grads.append(grad)
        replica = self.replica if reduce else None
        if replica is not None:
            replica.arm(roots)
        if roots:
            # torch.autograd.backward without its checks of shapes, which cost as much as the
            # backward of a small layer
            _run_backward(
                tuple(roots), tuple(grads), False, False, (), allow_unreachable=True,
                accumulate_grad=True,
            )  # fmt: skip
        if replica is not None:
            replica.check_reduced()
        if self._other_layouts is None:
            self._other_layouts = any(
                arrival.in_another_layout() for own in arrivals for arrival in own
            )
        return [[arrival.gradient for arrival in own] for own in arrivals[: len(self.incoming)]]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that this stage computes with, under the user's names."""
        aliases = {id(alias.parameter): alias.alias for alias in self.aliases}
        own = {id(p): p for layer in self.layers for p in layer.module.parameters()}
        return [(self._parameter_names[key], aliases.get(key, p)) for key, p in own.items()]

    def count_parameters(self) -> int:
        """The elements of the parameters that live here; shared ones live in their first stage."""
        aliases = {id(alias.alias) for alias in self.aliases}
        own = {id(p): p.numel() for _, p in self.named_parameters() if id(p) not in aliases}
        return sum(own.values())

    def clear(self) -> None:
        """Forgets all micro-batches, after a step that failed."""
        self._held.clear()
        for alias in self.aliases:
            alias.alias.grad = None
        if self.replica is not None:
            self.replica.disarm()

    def _compute(
        self, microbatch: int, value: Any, skipped: dict[str, Any], recompute: bool
    ) -> tuple[Any, dict[str, Any]]:
        if recompute:
            copy = self._copies_to_recompute
            output, skipped = recomputed(self._run, self.module, copy, microbatch, value, skipped)
            return output, skipped
        return self._run(microbatch, value, skipped)

    def _run(
        self, microbatch: int, value: Any, skipped: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """A function of its arguments: skipping values go in and come out."""
        if not self._skips:
            return self._run_layers(microbatch, value), skipped
        with skip_scope(skipped) as values:
            value = self._run_layers(microbatch, value)
        return value, values

    def _run_layers(self, microbatch: int, value: Any) -> Any:
        index = self._first
        try:
            for layer in self.layers:
                if index in self._recompute and torch.is_grad_enabled():
                    value = self._recomputed_layer(microbatch, index, layer, value)
                else:
                    value = self._call(microbatch, index, layer, value)
                index += 1
        except Exception as error:
            name = self.layers[index - self._first].name
            error.add_note(f"in layer {name!r}, which was given {describe(value)}")
            for sign, way_out in _WAYS_OUT.items():
                if sign in str(error):
                    error.add_note(way_out)
            raise
        return value

    def _call(self, microbatch: int, index: int, layer: Layer, value: Any) -> Any:
        if not self._draws.guards(index):
            return layer.module(value)
        with self._draws.guard(index, microbatch):
            return layer.module(value)

    def _recomputed_layer(self, microbatch: int, index: int, layer: Layer, value: Any) -> Any:
        def run(value: Any, popped: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            with skip_scope(popped) as values:
                return self._call(microbatch, index, layer, value), values

        # what a module in the layer stashes for another one in it is not there yet
        names = set(popped_by(layer.module)) - set(stashed_by(layer.module))
        popped = {name: pop(name) for name in sorted(names)}
        if self._keeps_apart and (index or self._copies_to_recompute):
            value, popped = map_tensors(torch.clone, (value, popped))
        value, values = recomputed(run, layer.module, works_in_place(layer.module), value, popped)
        # a layer that works in place has changed a copy of what it popped
        changed = popped if works_in_place(layer.module) else {}
        for name in (*stashed_by(layer.module), *changed):
            stash(name, values[name])
        return value

    def _check_sendable(self, message: Message) -> None:
        """Makes sure that the tensors in `message` can be found, to be sent and to get gradients.

        Raises:
            SplitError: one is in an object that cannot be looked into.
        """
        if all(type(part) is Tensor for part in message):
            return
        for leaf in leaves_of(message):
            if not isinstance(leaf, Tensor) and hides_tensors(leaf):
                raise SplitError(
                    f"layer {self.layers[-1].name!r} hands a {type(leaf).__name__} to a later "
                    f"stage, which hides tensors: cut elsewhere, or let the layer return tensors, "
                    f"or tuples, lists, dicts or dataclasses of them (for models of transformers, "
                    f"set config.use_cache=False)"
                )

    def _edges(self, roots: Sequence[Sequence[Tensor]]) -> list[list[Root]]:
        if self.replica is not None and self.replica.find_unused:
            return [list(tensors) for tensors in roots]  # DDP looks for unused parameters from here
        return [[get_gradient_edge(tensor) for tensor in tensors] for tensors in roots]

    def _receive(self, message: Message) -> tuple[Message, list[_Arrival]]:
        """The values on this device, and those of their tensors that are to get a gradient."""
        arrivals: list[_Arrival] = []

        def enter(tensor: Tensor) -> Tensor:
            tensor = move(tensor, self.device)  # a micro-batch of the user's; others are here
            if tensor.requires_grad:
                arrivals.append(_Arrival(tensor, as_it_comes=self._other_layouts is not False))
                if self._changes_its_input:
                    return _NotALeaf.apply(tensor)  # type: ignore[no-any-return]
            return tensor

        return map_tensors(enter, message), arrivals


class _Arrival:
    """A tensor that came in, and its gradient once the backward has run.

    PyTorch brings a leaf's gradient into the leaf's own layout in memory, and what adds up such a
    gradient may then do so in another order than in the unsplit model. `as_it_comes` it is taken
    before that, at the cost of a call of Python for each tensor, so a stage does so until it has
    seen that there is no difference.
    """

    def __init__(self, leaf: Tensor, as_it_comes: bool) -> None:
        self._leaf = leaf
        self._taken: Tensor | None = None
        if as_it_comes:
            leaf.register_hook(self._take)

    @property
    def gradient(self) -> Tensor | None:
        """The gradient; None if there is none."""
        return self._leaf.grad if self._taken is None else self._taken

    def in_another_layout(self) -> bool:
        """Whether the gradient that was taken has another layout than the tensor."""
        return self._taken is not None and self._taken.stride() != self._leaf.stride()

    def _take(self, gradient: Tensor) -> None:
        self._taken = gradient


class _NotALeaf(torch.autograd.Function):
    """The same values, but no leaf of the graph: a layer may change them in place."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _requiring_grad(value: Any) -> list[Tensor]:
    """The tensors that get a gradient, each once."""
    if type(value) is tuple and len(value) == 1:
        value = value[0]
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    tensors = {id(leaf): leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)}
    return [tensor for tensor in tensors.values() if tensor.requires_grad]


def _detach(message: Message, copied: bool) -> Message:
    def detached(tensor: Tensor) -> Tensor:
        value = tensor.detach().clone() if copied else tensor.detach()
        return value.requires_grad_() if tensor.requires_grad else value

    return map_tensors(detached, message)  # type: ignore[no-any-return]


def describe(value: Any) -> str:
    """The shapes and types in a pytree, for an error message."""
    leaves = tree_flatten(value)[0]
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in leaves
    ]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
