"""A stage: consecutive layers on one device, with its state between forward and backward.

Only `engine="distributed"` needs this file.

        forward                                            backward
    [1] messages -> input boundary -> leaves           [4] gradients of sent values -> roots
    [2] leaves -> layers -> output                     [5] roots -> autograd -> leaf.grad
    [3] messages <- output boundary <- output          [6] gradients of received values <- leaf.grad

`engines/actions` receives and sends the messages: `forward` is step [3] there, and `backward` step
[7].

A backward runs as a whole, or in two parts: `backward_to_input`, which the previous stage waits
for, and `backward_to_weights` later (see `split_backward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain._base.tensors import byte_size, count_saved
from hybridtrain.errors import UserError, argument, setting
from hybridtrain.graph import Layer, works_in_place
from hybridtrain.pipeline.batch_norm import BatchNormCollector
from hybridtrain.pipeline.boundary import (
    Gradients,
    InputBoundary,
    Message,
    OutputBoundary,
    Root,
    StageInputs,
    leads_to,
    parameters_of,
)
from hybridtrain.pipeline.engine import Head
from hybridtrain.pipeline.layer_runner import LayerRunner, changed_before_backward
from hybridtrain.pipeline.links import PRIMARY_OUTPUT, Link
from hybridtrain.pipeline.reducer import LocalReducer, StageReducer
from hybridtrain.pipeline.replicas import ReplicaStates
from hybridtrain.pipeline.stage_backward import StageBackward
from hybridtrain.pipeline.ties import Alias, refuse_foreign_parameters

# The context for code that needs no context.
_NONE: AbstractContextManager[None] = nullcontext()


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward.

    Attributes:
        inputs: the received values that get a gradient.
        roots: the start points of the backward, for each outgoing link; on the last stage, the
            loss.
        gradient: the gradient of the loss, on the last stage.
        whole: its backward cannot run in two parts, because activations are recomputed or counted.
    """

    inputs: StageInputs
    roots: list[list[Root]]
    gradient: Tensor | None
    whole: bool


@dataclass(frozen=True)
class Connection:
    """The runner of a stage's layers, and the links over its borders.

    Attributes:
        runner: runs the layers.
        links: all links of the pipeline.
        clone_outputs: see `OutputBoundary`.
        hold_edges: see `OutputBoundary`.
        changers: the changer of each stage, see `boundary.refuse_overlaps`.
    """

    runner: LayerRunner
    links: Sequence[Link]
    clone_outputs: bool
    hold_edges: bool
    changers: Sequence[str | None]


class Stage:
    """Runs the layers of a stage forward and backward, one micro-batch at a time.

    Attributes:
        index: its place in the pipeline.
        layers: the layers that it runs.
        first: the index of its first layer in the model.
        device: the device of the layers.
        accelerator: the interface of a device that runs asynchronously; None for the CPU.
        incoming: the links to this stage, with the primary output's first.
        outgoing: the links from this stage, with the primary output's first.
        module: its layers under one root.
        aliases: stand-ins for parameters that an earlier stage owns.
        replica_states: gives each logical replica the state before the step; None if this process
            runs only one.
        parameter_count: the number of elements of its own parameters, without aliases.
        saved_bytes: bytes that autograd saves for a micro-batch; None before the first.
        names: the names of the model's parameters in this process, by their `id`; None if a
            backward of this stage may add to gradients of other stages.
        checks_graph: whether the next forward calls `refuse_foreign_parameters`.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        layers: Sequence[Layer],
        connection: Connection,
        aliases: Sequence[Alias],
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.names = names
        self.checks_graph = names is not None
        self.index = index
        self.module = module
        self.device = device
        self.accelerator = accelerator_of(device)
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.first = connection.runner.first
        self.aliases = list(aliases)
        self._backward = StageBackward()
        self.replica_states: ReplicaStates | None = None
        self._collectors: Sequence[BatchNormCollector] | None = None
        self.saved_bytes: int | None = None
        tied = {id(p) for alias in aliases for p in (alias.parameter, alias.alias)}
        self.parameter_count = sum(p.numel() for p in module.parameters() if id(p) not in tied)
        self._shared = tied
        self.connect(connection)
        self._in_flight: dict[int, _InFlight] = {}
        self._needs_no_gradient = False

    def connect(self, connection: Connection) -> None:
        """Sets the runner of the layers and their links, which depend on the graph variant."""
        index, links, changers = self.index, connection.links, connection.changers
        self.incoming = sorted((k for k in links if k.target == index), key=lambda k: -k.source)
        self.outgoing = [link for link in links if link.source == index]
        self._runner = connection.runner
        if self._collectors is not None:
            self.replica_states = ReplicaStates(self._runner.state, self._collectors)
        self._runner.tied |= self._shared
        self._input = InputBoundary(self.incoming, self.device, works_in_place(self.module))
        self._output = OutputBoundary(
            self.outgoing,
            self.layers[-1].name,
            self.module,
            clone=connection.clone_outputs,
            hold_edges=connection.hold_edges,
            changers=[changers[link.target] for link in self.outgoing],
        )

    @property
    def reducer(self) -> StageReducer | LocalReducer | None:
        """Averages the gradients over the replicas; None with one replica."""
        return self._backward.reducer

    @reducer.setter
    def reducer(self, reducer: StageReducer | LocalReducer | None) -> None:
        self._backward.reducer = reducer

    def choose_variants(self, variants: Sequence[int] | None) -> None:
        """Sets the graph variant of each micro-batch of the next step."""
        self._runner.variants = variants

    def __repr__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return f"stage {self.index} ({first if first == last else f'{first} to {last}'})"

    def expect_new_loss(self) -> None:
        """Checks the graph of the next forward, because a loss may read any parameter."""
        self.checks_graph = self.names is not None

    def forward(
        self,
        microbatch: int,
        messages: Sequence[Message],
        head: Head | None = None,
        recompute: bool = False,
    ) -> list[Message]:
        """Runs the layers on one micro-batch.

        Args:
            microbatch: its index.
            messages: the message of each incoming link; for the first stage `[(inputs,)]`.
            head: the callback that ends the forward on the last stage.
            recompute: recompute activations in the backward instead of storing them.

        Returns:
            the message for each outgoing link; on the last stage only the value of `head`.
        """
        if self.replica_states is not None and self._backward.places is not None:
            place = self._backward.places[microbatch]
            self.replica_states.enter(place.replica, place.ahead)
        values, inputs = self._input.enter(messages)  # [1]
        value = values.pop(PRIMARY_OUTPUT)
        run = self._runner.run_recomputed if recompute else self._runner.run
        counts = self.saved_bytes is None and torch.is_grad_enabled()
        with self._counting_saved((value, values)) if counts else _NONE:
            output, skipped = run(microbatch, value, values)  # [2]
            if head is not None:
                result, root, gradient = head(microbatch, output)
        if head is None:
            sent, roots = self._output.leave(output, skipped)  # [3]
            gradient = None
        else:
            sent, roots = [result], [] if root is None else [[root]]
        if torch.is_grad_enabled():
            if head is not None and (root is None or not root.requires_grad):
                raise UserError(
                    "the loss depends on no trainable parameter, so there is nothing to train"
                )
            if self.checks_graph:
                self._refuse_foreign_parameters(inputs, roots)
            whole = recompute or self._runner.recomputes or counts or self._runner.guards_saved
            self._in_flight[microbatch] = _InFlight(inputs, roots, gradient, whole)
        return sent

    def _refuse_foreign_parameters(
        self, inputs: StageInputs, roots: Sequence[Sequence[Root]]
    ) -> None:
        self.checks_graph = False
        allowed = {id(p) for p in self.module.parameters()}
        allowed -= {id(alias.parameter) for alias in self.aliases}
        allowed |= {id(leaf) for leaves in inputs.leaves for leaf in leaves}
        used = parameters_of([root for link_roots in roots for root in link_roots])
        refuse_foreign_parameters(used, allowed, self.names or {}, self)

    @contextmanager
    def _counting_saved(self, values: Any) -> Iterator[None]:
        """Counts the bytes that the forward in the block saves, including the received `values`."""
        # samples are views of the batch: only their bytes count, not the batch's
        received = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        with count_saved(self.module, received) as saved:
            yield
        self.saved_bytes = saved.bytes + sum(map(byte_size, received))

    def backward(
        self, microbatch: int, gradients: Sequence[Gradients], reduce: bool
    ) -> list[Gradients]:
        """Runs the backward of one micro-batch; gradients are added to `parameter.grad`.

        Args:
            microbatch: its index.
            gradients: for each outgoing link, the gradients of sent tensors that require one; empty
                on the last stage, which starts from the loss.
            reduce: whether this micro-batch completes the stage's gradients, so that this backward
                averages them over the replicas.

        Returns:
            the gradients to send back over each incoming link.
        """
        # popped, so that the micro-batch's data is freed after the backward
        begun = self._in_flight.pop(microbatch)
        starts = _starts(begun, gradients)
        self._backward.run(microbatch, starts, reduce, self._explain)  # [4], [5]
        return self._gradients_of_inputs(begun.inputs, starts)  # [6]

    def _gradients_of_inputs(
        self, inputs: StageInputs, starts: Sequence[tuple[Root, Tensor]]
    ) -> list[Gradients]:
        """Returns the gradients to send back over each incoming link.

        Raises:
            UserError: there are none, although the stage's graph leads to the inputs.
        """
        gradients = self._input.gradients(inputs)
        if not gradients or not gradients[0] or gradients[0][0] is not None:
            return gradients
        lost = starts and all(gradient is None for gradient in gradients[0])
        if lost and not self._needs_no_gradient:
            if leads_to([root for root, _ in starts], inputs.leaves[0]):
                raise UserError(
                    f"{self} has computed no gradient of its inputs, although its outputs depend "
                    "on them, so earlier stages would not be trained: set "
                    f"{setting('schedule', '1f1b')}"
                )
            self._needs_no_gradient = True  # the layers detach their inputs
        return gradients

    def divide_backward(self, microbatch: int) -> None:
        """Divides the backward of a micro-batch for `backward_to_input`, which else does it.

        This needs no gradients, so it can run before they arrive.
        """
        begun = self._in_flight[microbatch]
        if not begun.whole:
            self._backward.divide(microbatch, _roots(begun), self._leaves_of_links(begun))

    def backward_to_input(
        self, microbatch: int, gradients: Sequence[Gradients], reduce: bool
    ) -> list[Gradients]:
        """Runs the part of a backward that the previous stage waits for; see `backward`.

        Runs the whole backward if activations are recomputed (both parts would recompute them) or
        if the graph cannot be divided; then `backward_to_weights` does nothing.
        """
        begun = self._in_flight.pop(microbatch)
        starts = _starts(begun, gradients)
        leaves = self._leaves_of_links(begun)
        self._backward.to_input(
            microbatch, _roots(begun), starts, leaves, reduce, begun.whole, self._explain
        )
        return self._gradients_of_inputs(begun.inputs, starts)

    def _leaves_of_links(self, begun: _InFlight) -> list[Tensor]:
        """Returns the tensors of the incoming links that get a gradient.

        The first stage has no links. If the batch itself gets a gradient, the backward to the
        weights computes it: its micro-batches can be views of one tensor, and share a node.
        """
        links = begun.inputs.leaves[: len(self.incoming)]
        return [leaf for link_leaves in links for leaf in link_leaves]

    def backward_to_weights(self, microbatch: int, reduce: bool) -> None:
        """Runs the part of a backward that `backward_to_input` has left; see `backward`."""
        self._backward.to_weights(microbatch, reduce, self._explain)

    def _explain(self, error: RuntimeError) -> None:
        """Attributes some errors of a backward to the layer's forward that caused them."""
        if isinstance(error, CheckpointError):
            self._runner.check_recomputations()  # names the layer
            error.add_note(
                f"a layer of {self} computes different values in its recomputation than in its "
                f"forward: exclude it from {argument('recompute')}"
            )
        elif "modified by an inplace operation" in str(error):
            change = self._runner.state.change_of(str(error))
            if change is not None:
                raise changed_before_backward(change) from error

    def draws_before_next(self, microbatch: int) -> tuple[int, ...]:
        """Returns the draw counts for the next stage, if it continues a layer of this stage."""
        runner = self._runner
        return runner.rng.draws_before(runner.first + len(self.layers), microbatch)

    @property
    def continues_draws(self) -> bool:
        """Whether this stage continues a layer of the previous stage, and so its draws."""
        return self._runner.rng.pieces_before(self._runner.first) > 0

    def continue_draws(self, microbatch: int, draws: Sequence[int]) -> None:
        """Stores the draw counts of the previous stage, which is in another process."""
        self._runner.rng.continue_draws(self._runner.first, microbatch, draws)

    def run_several_replicas(self, collectors: Sequence[BatchNormCollector]) -> None:
        """Prepares for steps with several logical replicas; see `ReplicaStates`."""
        self._collectors = collectors
        self.replica_states = ReplicaStates(self._runner.state, collectors)

    def begin_replicas(self, places: Sequence[MicrobatchPlace] | None) -> None:
        """Starts a step with micro-batches of several logical replicas; see `Step`."""
        self._backward.places = places

    def end_replicas(self) -> None:
        """Ends the last batch of a step; restores logical replica 0's state if it ran here."""
        if self.replica_states is not None:
            self.replica_states.finish()

    def begin_step(self, kind: object, recomputes: bool) -> None:
        """Begins a step that trains; see `LayerRunner.begin_step`."""
        self._runner.begin_step(kind, recomputes)

    def check_step(self) -> None:
        """Compares recomputations; see `LayerRunner.check_recomputations`."""
        self._runner.check_recomputations()

    def clear(self) -> None:
        """Drops all micro-batches after a failed step."""
        self._in_flight.clear()
        self._backward.clear()
        for alias in self.aliases:
            alias.alias.grad = None
        self.end_replicas()


def _roots(begun: _InFlight) -> list[Root]:
    return [root for link_roots in begun.roots for root in link_roots]


def _starts(begun: _InFlight, gradients: Sequence[Gradients]) -> list[tuple[Root, Tensor]]:
    """Returns the start points of a micro-batch's backward, with their gradients."""
    if begun.gradient is not None:
        gradients = [[begun.gradient]]
    starts: list[tuple[Root, Tensor]] = []
    for roots, link_gradients in zip(begun.roots, gradients, strict=True):
        for root, gradient in zip(roots, link_gradients, strict=True):
            if gradient is not None:
                starts.append((root, gradient))
    return starts
