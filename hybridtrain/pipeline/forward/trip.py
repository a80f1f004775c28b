"""A trip: one micro-batch on its way through the stages, in a thread that runs the model's forward.

    model(inputs)   | code | layer 0 | code | layer 1 | code | layer 2 | code | loss |
    stage                     0                    1                      1
    device's turn   [1]-----------------[2][1]------------------------------------[2]

The forward is the user's, unmodified. Where it reaches a layer of a later stage, the trip passes
the turn of its device on [2] and waits for the next device's [1]. Code between two layers runs in
the stage of the layer before it; `glue` cuts the values of earlier stages that it uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import (
    next_node_number,
    pop_function_mode,
    push_function_mode,
)
from hybridtrain.errors import SplitError
from hybridtrain.pipeline import transfer
from hybridtrain.pipeline.boundary import edge_of
from hybridtrain.pipeline.engine import HeadOutput
from hybridtrain.pipeline.forward.glue import GRADIENT_OVER_CUT, PLAIN, Alias, Cut, Glue, here

if TYPE_CHECKING:
    from hybridtrain.pipeline.boundary import Root
    from hybridtrain.pipeline.forward.layers import LayersOfStage


class LayerPlace(NamedTuple):
    """Where a layer runs.

    Attributes:
        number: the index of the layer in the model.
        stage: the index of its stage.
        name: the name of its module.
        position: the index of the layer in its stage.
        runs: the layers of its stage.
    """

    number: int
    stage: int
    name: str
    position: int
    runs: LayersOfStage


class Model(NamedTuple):
    """What trips know of the model.

    Attributes:
        net: the module.
        places: the places of each layer, one for each of its calls, by the `id` of its module.
        owners: the stage that owns each parameter, by the parameter's `id`.
        devices: the device of each stage.
        look_inside: the layers, by index, that use values of earlier stages besides their
            arguments, such as a weight that an earlier stage owns.
        wanted: for each stage, a leaf that makes autograd record its cuts.
        moves: whether the stages are on several devices, so that values must be copied.
    """

    net: nn.Module
    places: Mapping[int, Sequence[LayerPlace]]
    owners: Mapping[int, int]
    devices: Sequence[torch.device]
    look_inside: set[int]
    wanted: Sequence[Tensor]
    moves: bool


class StageInFlight(NamedTuple):
    """A micro-batch in a stage between its forward and its backward.

    Attributes:
        roots: where its backward starts: the values that the next stage uses, or the loss.
        gradient: the gradient of the loss, in the last stage.
        aliases: the values of the stage before that it uses.
        whole: its backward cannot run in two parts, because activations are recomputed.
    """

    roots: Sequence[Root]
    gradient: Tensor | None
    aliases: Sequence[Alias]
    whole: bool

    def gradients_before(self) -> list[Tensor | None]:
        """Returns the gradients that the backward has computed for the stage before."""
        return [alias.gradient for alias in self.aliases]


def _no_stage(stage: int, microbatch: int) -> None:
    raise AssertionError(f"micro-batch {microbatch} is not in a forward")


class Trip:
    """The forward of one micro-batch.

    Args:
        model: the model.
        microbatch: its index.
        draws: the context of its random operations, see `LayerRNG.seeded`.
        enter_stage: waits for the turn of a stage's forward.
        leave_stage: passes it on.
        trains: whether a backward follows.
        hold: keep the tensors where backwards start, not only their place in the graph.
        learns: look inside all layers, to find those that use values of earlier stages besides
            their arguments.

    Attributes:
        stage: the stage in which it is.
        layer: the layer in which it is; None between layers.
        is_in_forward: False before and after the forward.
        glue: sees the operations between layers.
    """

    def __init__(
        self,
        model: Model,
        microbatch: int,
        draws: Any,
        enter_stage: Callable[[int, int], None],
        leave_stage: Callable[[int, int], None],
        trains: bool,
        hold: bool,
        learns: bool,
    ) -> None:
        self.microbatch = microbatch
        self.draws = draws
        self.stage = 0
        self.layer: LayerPlace | None = None
        self.is_in_forward = False
        self._model = model
        self._enter_stage, self._leave_stage = enter_stage, leave_stage
        self._last = len(model.devices) - 1
        self._cuts = trains
        self._hold = hold
        self._learns = learns
        self.glue = Glue(self)
        self._calls: dict[int, int] = {}  # of each layer so far
        self._starts: list[int] = []  # the first node number of each stage so far
        self._own_leaves: dict[int, tuple[int, Tensor]] = {}  # no parameters: stage and tensor
        self._aliases: list[dict[int, Alias]] = [{} for _ in model.devices]
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._head: HeadOutput | None = None

    # --- the forward

    def run(
        self,
        inputs: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]],
        head: Callable[[Any], HeadOutput],
        context: AbstractContextManager[object],
        hold: Callable[[], None] | None,
    ) -> Any:
        """Runs the forward and the head in this thread; returns the value of the head.

        Args:
            inputs: returns the arguments of the forward, once the first stage may begin.
            head: ends the forward, such as the loss.
            context: the autocast of the forward and the head.
            hold: called at the end of the last stage's turn, before its backward may begin.
        """
        outer, here.trip = here.trip, self
        try:
            self._enter_stage(0, self.microbatch)
            args, kwargs = inputs()
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._own_leaves[id(leaf)] = 0, leaf
            self._starts.append(next_node_number())
            self.is_in_forward = True
            with context, self.draws:
                self.draws.at(0)
                if self._last:
                    push_function_mode(self.glue)
                try:
                    output = self._model.net(*args, **kwargs)
                    del args, kwargs
                    self.enter(self._last)
                    self._head = head(output)
                    del output
                    value, root = self._head.value, self._head.root
                    if self._cuts and root is not None:
                        self._head = self._head._replace(root=self.cut(root))
                finally:
                    if self._last:
                        pop_function_mode(self.glue)
            self.is_in_forward = False
            self._check_aliases()
            self._copies.clear()
            if hold is not None:
                hold()
            self._leave_stage(self.stage, self.microbatch)
            return value
        finally:
            self.is_in_forward = False
            here.trip = outer
            self._end()

    def _end(self) -> None:
        """Drops what would be a circle of references: the graph's cuts hold this trip."""
        self.glue.forget_trip()
        self._enter_stage = self._leave_stage = _no_stage
        for alias in chain.from_iterable(of_stage.values() for of_stage in self._aliases):
            alias.forget_graph()
        self._aliases, self._own_leaves, self._copies, self._head = [], {}, {}, None

    def place_of(self, module: nn.Module) -> LayerPlace | None:
        """Returns the place of the next call of a layer; None for other modules."""
        places = self._model.places.get(id(module))
        if places is None:
            return None
        if len(places) == 1:
            return places[0]
        if torch._C._functorch.maybe_current_level() is not None:
            return None  # no stage can begin inside of a transform
        # a call that was skipped on another path moves no later call back to an earlier stage
        call = self._calls.get(id(module), 0)
        while call < len(places) and places[call].stage < self.stage:
            call += 1
        self._calls[id(module)] = call + 1
        return places[call] if call < len(places) else None

    def enter(self, stage: int) -> None:
        """Moves to a later stage: passes on, and waits for its turn.

        Raises:
            SplitError: the forward goes back to an earlier stage.
        """
        if stage < self.stage:
            raise SplitError(
                f"the forward goes back from stage {self.stage} to stage {stage}: cut elsewhere, "
                "so that layers run in the order of the stages"
            )
        if stage > self.stage and torch._C._functorch.maybe_current_level() is not None:
            raise SplitError(
                "a stage ends inside a transform of torch.func, such as vmap or grad: cut "
                "elsewhere, so that the layers inside it are in one stage"
            )
        while self.stage < stage:
            self._check_aliases()
            self._leave_stage(self.stage, self.microbatch)
            self.stage += 1
            self._enter_stage(self.stage, self.microbatch)
            self._starts.append(next_node_number())

    def run_layer(self, place: LayerPlace, args: Any, kwargs: Any) -> Any:
        """Runs a layer in its stage, on its own names of the values that it gets."""
        glue = self.glue
        # off the stack while a layer runs, or each of its operations would pass through it
        is_popped = self._last > 0 and pop_function_mode(glue)
        was_off, glue.is_off = glue.is_off, True
        try:
            if place.stage != self.stage:
                self.enter(place.stage)
            if self.stage and self.looks:
                args = self._arguments(place, args)
                if kwargs:
                    names, values = kwargs.keys(), self._arguments(place, kwargs.values())
                    kwargs = dict(zip(names, values, strict=True))
            self.draws.at(place.number)
            self.layer = place
            try:
                return place.runs.run(place.position, self, args, kwargs)
            finally:
                self.layer = None
        finally:
            glue.is_off = was_off
            if is_popped:
                push_function_mode(glue)

    def _arguments(self, place: LayerPlace, values: Iterable[Any]) -> tuple[Any, ...]:
        """Returns arguments of a layer, with this stage's own names of tensors in them.

        A list or a dict stays the same object, because the layer may add to it for its caller. The
        layer is looked into instead.
        """
        own: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                own.append(self.cut(value))
            elif type(value) is tuple:
                own.append(self._arguments(place, value))
            else:
                if type(value) not in PLAIN and self._has_foreign((value,)):
                    self._model.look_inside.add(place.number)
                own.append(value)
        return tuple(own)

    def looks_inside(self, layer: int) -> bool:
        """Returns whether a layer is known, or not yet known, to use values of earlier stages."""
        return (self._learns or layer in self._model.look_inside) and self.looks

    def look_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the module of a layer that uses values of earlier stages besides its arguments."""
        glue, was_off = self.glue, self.glue.is_off
        glue.is_off = False
        push_function_mode(glue)
        try:
            return call(*args, **kwargs)
        finally:
            pop_function_mode(glue)
            glue.is_off = was_off

    # --- values of earlier stages

    @property
    def looks(self) -> bool:
        """True where an operation may use a value of an earlier stage."""
        if not self.stage:
            return False
        return (self._cuts and torch.is_grad_enabled()) or self._model.moves

    @property
    def looks_in_functions(self) -> bool:
        """The same for custom autograd functions, which modes do not see."""
        inside = self.layer is not None and not self.looks_inside(self.layer.number)
        return self.is_in_forward and not inside and self.looks

    def cut_all(self, tree: Any) -> Any:
        """Returns a pytree with each tensor of an earlier stage replaced by this stage's own."""
        if not self._has_foreign(tree.values() if type(tree) is dict else tree):
            return tree
        return tree_map_only(Tensor, self.cut, tree)

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this stage's own name of a tensor, which is the tensor itself if it is its own.

        Shared by all uses in the stage, and copied to the stage's device once.
        """
        if not (self._cuts and tensor.requires_grad and torch.is_grad_enabled()):
            return self._moved(tensor) if self._model.moves else tensor
        if not self._is_earlier(tensor):
            return tensor
        if self.layer is not None:
            self._model.look_inside.add(self.layer.number)
        with self.glue.off():
            for stage in range(self._stage_of(tensor) + 1, self.stage + 1):
                alias = self._aliases[stage].get(id(tensor))
                if alias is None:
                    alias = self._aliases[stage][id(tensor)] = Alias(tensor)
                    here_too = tensor.detach()
                    if self._model.moves:
                        here_too = self._moved(here_too, stage)
                    alias.value = Cut.apply(here_too, self._model.wanted[stage], self, alias)
                    alias.version, alias.node = alias.value._version, alias.value.grad_fn
                tensor = alias.value
        return tensor

    def check_inner_gradient(self, inputs: Any) -> None:
        """Refuses a gradient that the forward takes with respect to a value of another stage."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad and self._is_earlier(leaf):
                raise SplitError(GRADIENT_OVER_CUT)

    def _has_foreign(self, values: Any) -> bool:
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is nn.Parameter:
                if self._is_foreign(value):
                    return True
            elif kind in PLAIN:
                continue
            elif kind is list or kind is tuple:
                if self._has_foreign(value):
                    return True
            elif any(
                isinstance(leaf, Tensor) and self._is_foreign(leaf) for leaf in tree_leaves(value)
            ):
                return True
        return False

    def _is_foreign(self, tensor: Tensor) -> bool:
        model = self._model
        if model.moves and tensor.device != model.devices[self.stage]:
            return tensor.device in model.devices
        return self._cuts and tensor.requires_grad and self._is_earlier(tensor)

    def _is_earlier(self, tensor: Tensor) -> bool:
        node = tensor.grad_fn
        if node is not None and id(tensor) not in self._own_leaves:
            return node._sequence_nr() < self._starts[-1]
        return self._stage_of(tensor) < self.stage

    def _stage_of(self, tensor: Tensor) -> int:
        known = self._own_leaves.get(id(tensor))
        if known is not None:
            return known[0]
        node = tensor.grad_fn
        if node is not None:
            # a graph from before the trip counts as the first stage's
            return max(bisect_right(self._starts, node._sequence_nr()) - 1, 0)
        owner = self._model.owners.get(id(tensor))
        if owner is not None:
            return owner
        self._own_leaves[id(tensor)] = self.stage, tensor  # its first use
        return self.stage

    def _moved(self, tensor: Tensor, stage: int | None = None) -> Tensor:
        device = self._model.devices[self.stage if stage is None else stage]
        if tensor.device == device or tensor.device not in self._model.devices:
            return tensor
        key = id(tensor), self.stage if stage is None else stage
        if key not in self._copies:
            sent = transfer.send(tensor, tensor.device, device, "F")
            self._copies[key] = tensor, transfer.receive(sent, device)
        return self._copies[key][1]

    def _check_aliases(self) -> None:
        """Refuses a change in place that an alias cannot see.

        Raises:
            SplitError: a value of an earlier stage was changed through another view of its memory.
        """
        aliases = list(self._aliases[self.stage].values())
        changed = [alias for alias in aliases if alias.value._version != alias.version]
        for alias in changed:
            is_shared = any(
                other is not alias and storage_id(other.value) == storage_id(alias.value)
                for other in aliases
            )
            if alias.value.grad_fn is alias.node or is_shared:
                raise SplitError(
                    f"a value of shape {tuple(alias.value.shape)} of an earlier stage is changed "
                    "in place through another view of it: change a copy (.clone()), or cut "
                    "elsewhere"
                )

    # --- the backward

    def in_flight(self, whole: Sequence[bool]) -> list[StageInFlight]:
        """Returns, after the forward, what each stage's backward needs.

        Args:
            whole: for each stage, whether its backward cannot run in two parts.
        """
        head, self._head = self._head, None
        assert head is not None
        aliases = [list(of_stage.values()) for of_stage in self._aliases]
        roots: list[list[Root]] = [
            [a.source if self._hold else edge_of(a.source) for a in of_next]
            for of_next in aliases[1:]
        ]
        roots.append([] if head.root is None else [head.root])
        return [
            StageInFlight(*values)
            for values in zip(
                roots, [*[None] * self._last, head.gradient], aliases, whole, strict=True
            )
        ]
