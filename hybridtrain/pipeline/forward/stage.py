"""A stage of a pipeline that runs the model's own forward.

Its layers run inside `Trip`s. The stage has what belongs to a device: the layers' parameters,
their state, and the backwards of micro-batches in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.shares import MicrobatchPlace
from hybridtrain._base.tensors import byte_size, storages
from hybridtrain._base.torch_private import tensors_saved_by
from hybridtrain.errors import argument
from hybridtrain.graph import Layer
from hybridtrain.pipeline.autograd_graph import Root, nodes_from, parameters_of
from hybridtrain.pipeline.batch_norm import BatchNormCollector
from hybridtrain.pipeline.forward.layers import LayersOfStage
from hybridtrain.pipeline.forward.trip import StageInFlight
from hybridtrain.pipeline.layer_errors import changed_before_backward
from hybridtrain.pipeline.offload import StageOffload
from hybridtrain.pipeline.reducer import LocalReducer, StageReducer
from hybridtrain.pipeline.replicas import ReplicaStates
from hybridtrain.pipeline.stage_backward import StageBackward, Start
from hybridtrain.pipeline.ties import Alias, refuse_foreign_parameters


def saved_bytes(roots: Sequence[Root], state: Sequence[Tensor], kept: Iterable[Tensor] = ()) -> int:
    """Returns the bytes that the backward from `roots` keeps.

    A tensor that is a part of a larger one, such as the batch, counts with its own bytes.

    Args:
        roots: where the backward of a stage starts; it ends at the cuts before the stage.
        state: tensors that do not count.
        kept: tensors that recomputed layers start from.
    """
    left_out = {number for tensor in state for number in storages(tensor)}
    sizes: dict[int, int] = {}
    parts: dict[int, dict[Any, int]] = defaultdict(dict)
    saved = chain.from_iterable(map(tensors_saved_by, nodes_from(roots)))
    for tensor in chain(saved, kept):
        for number, size in storages(tensor).items():
            if number not in left_out:
                sizes[number] = size
                is_plain = tensor.layout == torch.strided and not tensor.is_nested
                place = (tensor.storage_offset(), tensor.shape) if is_plain else number
                parts[number][place] = byte_size(tensor)
    return sum(min(size, sum(parts[number].values())) for number, size in sizes.items())


class ForwardStage:
    """Runs the backwards of a stage, and holds its layers.

    Attributes:
        index: its place in the pipeline.
        runs: runs its layers.
        layers: the layers.
        first: the index of its first layer in the model.
        device: the device of the layers.
        accelerator: the interface of a device that runs asynchronously; None for the CPU.
        module: its layers, and parameters that code between layers uses, under one root.
        replica_states: gives each logical replica the state before the step; None if this process
            runs only one.
        parameter_count: the number of elements of the parameters that it owns.
        saved_bytes: bytes that the backward of a micro-batch keeps, but for those that can leave
            the device; by whether all its layers are recomputed. Empty before the first.
        offload: what waits outside of the device; None: nothing does.
        cut_leaf: a leaf that makes autograd record the cuts before this stage.
        owner_of: the stage that owns each parameter of the model, by the parameter's `id`.
    """

    aliases: Sequence[Alias] = ()  # with all stages in one process, there are none; see `glue`

    def __init__(
        self,
        index: int,
        module: nn.Module,
        owned: Sequence[nn.Parameter],
        device: torch.device,
        runs: LayersOfStage,
        owner_of: Mapping[int, int],
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.accelerator = accelerator_of(device)
        self.runs = runs
        self.owner_of = owner_of
        self.layers: tuple[Layer, ...] = runs.layers
        self.first = runs.first
        self.replica_states: ReplicaStates | None = None
        self.parameter_count = sum(parameter.numel() for parameter in owned)
        self.saved_bytes: dict[bool, int] = {}
        self.offload: StageOffload | None = None
        self.cut_leaf = torch.zeros((), requires_grad=True)
        self._backward = StageBackward()
        self._in_flight: dict[int, StageInFlight] = {}
        self._allowed: frozenset[int] | None = None
        self._names: Mapping[int, str] = {}

    def check_parameters(self, allowed: frozenset[int], names: Mapping[int, str]) -> None:
        """Checks the graph of the first micro-batch for parameters of other stages.

        Args:
            allowed: the `id` of each parameter that the stage owns.
            names: the names of the model's parameters, by their `id`.
        """
        self._allowed, self._names = allowed, names

    @property
    def reducer(self) -> StageReducer | LocalReducer | None:
        """Averages the gradients over the replicas; None with one replica."""
        return self._backward.reducer

    @reducer.setter
    def reducer(self, reducer: StageReducer | LocalReducer | None) -> None:
        self._backward.reducer = reducer

    def __repr__(self) -> str:
        first, last = self.layers[0].name, self.layers[-1].name
        return f"stage {self.index} ({first if first == last else f'{first} to {last}'})"

    def enter(self, microbatch: int) -> None:
        """Prepares the forward of a micro-batch, at its turn."""
        places = self._backward.places
        if self.replica_states is not None and places is not None:
            self.replica_states.enter(places[microbatch].replica, places[microbatch].ahead)

    def hold(self, microbatch: int, in_flight: StageInFlight) -> None:
        """Holds what the backward of a micro-batch needs."""
        if self._allowed is not None:
            # the gradient of another stage's parameter would not be averaged over the replicas
            refuse_foreign_parameters(
                parameters_of(in_flight.roots), self._allowed, self._names, self
            )
            # Once, since it walks through the whole graph.
            self._allowed = None
        kept, is_whole = self.runs.kept.pop(microbatch, ()), microbatch in self.runs.whole
        # By the first micro-batch of each sort; the others keep as much.
        if is_whole not in self.saved_bytes:
            state = [*self.module.parameters(), *self.module.buffers()]
            self.saved_bytes[is_whole] = saved_bytes(in_flight.roots, state, kept)
        self._in_flight[microbatch] = in_flight

    def bytes_in_flight(self, count: int) -> int:
        """Returns the most bytes that the backwards of so many micro-batches keep.

        If not all recompute their layers, the last of them does not.
        """
        sizes = self.saved_bytes
        if len(sizes) < 2:
            return count * sum(sizes.values())
        return (count - 1) * sizes[True] + max(sizes.values())

    def take_graphs(self) -> dict[int, StageInFlight]:
        """Returns what it holds after forwards, by micro-batch, and holds nothing."""
        in_flight, self._in_flight = self._in_flight, {}
        if (away := self.offload) is not None:
            return {k: held._replace(activations=away.take(k)) for k, held in in_flight.items()}
        return in_flight

    def put_back_graphs(self, in_flight: dict[int, StageInFlight]) -> None:
        """Holds again what `take_graphs` has returned, for the backwards."""
        self._in_flight = in_flight
        if self.offload is not None:
            for microbatch, held in in_flight.items():
                self.offload.put_back(microbatch, held.activations)

    def gradients_of_loss(self, microbatch: int) -> list[Tensor | None]:
        """Returns the gradient of the loss of a micro-batch, in the last stage."""
        return [self._in_flight[microbatch].gradient]

    def backward(
        self, kind: str, microbatch: int, gradients: Sequence[Tensor | None], reduce: bool
    ) -> list[Tensor | None]:
        """Runs a backward, or its first part (`I`); gradients are added to `parameter.grad`.

        Args:
            kind: the kind of the action, `B` or `I`.
            microbatch: its index.
            gradients: the gradient of each value that the next stage uses, or of the loss.
            reduce: whether it completes the stage's gradients, and averages them over the replicas.

        Returns:
            the gradient of each value of the stage before that this stage uses.
        """
        # Popped before the backward, so that a failure leaves no graph behind here.
        in_flight = self._in_flight.pop(microbatch)
        starts: list[Start] = [
            (root, gradient)
            for root, gradient in zip(in_flight.roots, gradients, strict=True)
            # The next stage has not used the value in a way that needs a gradient.
            if gradient is not None
        ]
        if kind == "B":
            self._backward.run(microbatch, starts, reduce, self._explain)
        else:
            # the cuts lead to `cut_leaf`, and hand their gradients to the aliases on the way
            leaves = [self.cut_leaf] if in_flight.aliases else []
            self._backward.to_input(
                microbatch, in_flight.roots, starts, leaves, reduce, in_flight.whole, self._explain
            )
        return in_flight.gradients_before() if in_flight.aliases else []

    def backward_to_weights(self, microbatch: int, reduce: bool) -> None:
        """Runs the second part of a backward, after `backward_to_input`."""
        self._backward.to_weights(microbatch, reduce, self._explain)

    def _explain(self, error: RuntimeError) -> None:
        """Attributes some errors of a backward to the layer's forward that caused them."""
        if isinstance(error, CheckpointError):
            self.runs.check_recomputations()  # names the layer
            error.add_note(
                f"a layer of {self} computes different values in its recomputation than in its "
                f"forward: exclude it from {argument('recompute')}"
            )
        elif "modified by an inplace operation" in str(error):
            change = self.runs.state.change_of(str(error))
            if change is not None:
                raise changed_before_backward(change) from error

    def run_several_replicas(self, collectors: Sequence[BatchNormCollector]) -> None:
        """Prepares for steps with several logical replicas; see `ReplicaStates`."""
        self.replica_states = ReplicaStates(self.runs.state, collectors)

    def begin_replicas(self, places: Sequence[MicrobatchPlace] | None) -> None:
        """Starts a step with micro-batches of several logical replicas; see `Step`."""
        self._backward.places = places

    def end_replicas(self) -> None:
        """Ends the last batch of a step; restores logical replica 0's state if it ran here."""
        if self.replica_states is not None:
            self.replica_states.finish()

    def clear(self) -> None:
        """Drops all micro-batches after a failed step."""
        self._in_flight.clear()
        self.runs.kept.clear()
        self._backward.clear()
        if self.offload is not None:
            self.offload.clear()
        self.end_replicas()
