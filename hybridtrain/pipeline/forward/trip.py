"""A trip: one micro-batch on its way through the stages, in a thread that runs the model's forward.

    model(inputs)   | code | layer 0 | code | layer 1 | code | layer 2 | code | loss |
    stage                     0                    1                      1
    device's turn   [1]-----------------[2][1]------------------------------------[2]

The forward is the user's, unmodified. Where it reaches a layer of a later stage, the trip passes
the turn of its device on [2] and waits for the next device's [1]. Code between two layers runs in
the stage of the layer before it; `glue` cuts the values of earlier stages that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain._base.torch_private import (
    is_profiled,
    next_node_number,
    pop_function_mode,
    push_function_mode,
)
from hybridtrain.errors import SplitError
from hybridtrain.head import without_lazy
from hybridtrain.pipeline.autograd_graph import edge_of
from hybridtrain.pipeline.engine import HeadOutput
from hybridtrain.pipeline.forward.glue import (
    PLAIN,
    CutValue,
    Glue,
    OnDevice,
    here,
)
from hybridtrain.pipeline.forward.values import Model, StageValues

if TYPE_CHECKING:
    from hybridtrain.pipeline.autograd_graph import Root
    from hybridtrain.pipeline.forward.places import LayerPlace, Place
    from hybridtrain.pipeline.offload import Activations


class StageInFlight(NamedTuple):
    """A micro-batch in a stage between its forward and its backward.

    Attributes:
        roots: where its backward starts: the values that the next stage uses, or the loss.
        gradient: the gradient of the loss, in the last stage.
        aliases: the values of the stage before that it uses.
        whole: its backward cannot run in two parts, because activations are recomputed.
        activations: what may wait outside of the device, between two steps.
    """

    roots: Sequence[Root]
    gradient: Tensor | None
    aliases: Sequence[CutValue]
    whole: bool
    activations: Activations | None = None

    def gradients_before(self) -> list[Tensor | None]:
        """Returns the gradients that the backward has computed for the stage before."""
        for alias in self.aliases:
            alias.is_sent = True
        return [alias.gradient for alias in self.aliases]


def _no_stage(stage: int, microbatch: int) -> None:
    raise AssertionError(f"micro-batch {microbatch} is not in a forward")


class Trip(StageValues):
    """The forward of one micro-batch.

    Args:
        model: the model.
        microbatch: its index.
        draws: the context of its random operations, see `LayerRNG.drawing_in`.
        enter_stage: waits for the turn of a stage's forward.
        leave_stage: passes it on.
        trains: whether a backward follows.
        hold: keep the tensors where backwards start, not only their place in the graph.
        learns: look inside all layers, to find those that use values of earlier stages besides
            their arguments.

    Attributes:
        places: the places of modules, see `Model`.
        is_profiled: whether layers have names in a profiler's trace.
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
        super().__init__(model, trains, learns)
        self.microbatch = microbatch
        self.draws = draws
        self.places = model.places
        # Asked once per trip, and not at every layer.
        self.is_profiled = is_profiled()
        self._enter_stage, self._leave_stage = enter_stage, leave_stage
        self._last = len(model.devices) - 1
        self._hold = hold
        self._calls: dict[int, int] = {}  # of each layer so far
        self._head: HeadOutput | None = None

    @cached_property
    def glue(self) -> Glue:
        """See `StageValues`."""
        return Glue(self)

    # --- the forward

    def run(
        self,
        inputs: Callable[[], tuple[tuple[Any, ...], Mapping[str, Any]]],
        head: Callable[[Any], HeadOutput],
        context: AbstractContextManager[object],
        hold: Callable[[Trip], None] | None,
    ) -> Any:
        """Runs the forward and the head in this thread; returns the value of the head.

        Args:
            inputs: returns the arguments of the forward, once the first stage may begin.
            head: ends the forward, such as the loss.
            context: what the forward and the head run in, such as autocast.
            hold: called at the end of the last stage's turn, before its backward may begin.
        """
        # By thread: other trips run in other threads at the same time.
        outer, here.trip = here.trip, self
        try:
            self._enter_stage(0, self.microbatch)
            # After the turn: the inputs of a later micro-batch would take memory that is not needed
            # yet.
            args, kwargs = inputs()
            if self._last:
                self.note_own(*args, *kwargs.values())
                # At each stage's begin: nodes of this thread from here on belong to the stage.
                self._starts.append(next_node_number())
            self.is_in_forward = True
            with context:
                if self._last:
                    # Before the model's code, also in the first stage, which does not need it: a
                    # mode that the code enters before a cut and leaves after it must stay on top.
                    push_function_mode(self.glue)
                try:
                    self._through_stages(args, kwargs, head)
                    del args, kwargs
                finally:
                    if self._last:
                        pop_function_mode(self.glue)
                result, value = self._head, None
                if result is not None:
                    value = result.value
                    if self._model.is_lazy:
                        value = without_lazy(value)  # weights may change before its use
                    if self._last and self._cuts and result.root is not None:
                        # The loss may be a value of an earlier stage, such as a penalty that a
                        # layer returns.
                        self._head = result._replace(root=self.cut(result.root))
                    del result
            self.is_in_forward = False
            if self._last:
                self._check_changes()
                self._copies.clear()
            if hold is not None:
                hold(self)
            # Last: the next action of the device may begin at once, in another thread.
            self._leave_stage(self.stage, self.microbatch)
            return value
        finally:
            self.is_in_forward = False
            here.trip = outer
            self._end()

    def _through_stages(self, args: Any, kwargs: Any, head: Callable[[Any], HeadOutput]) -> None:
        """Runs the forward and the head, from stage to stage."""
        with self.draws:
            output = self._model.net(*args, **kwargs)
            del args, kwargs
            if self._last:
                # A forward may end before the last stage's layers; the head is always the last
                # stage's.
                self.enter(self._last)
        # outside of the model's draws: a loss may draw in threads that it starts
        self._is_in_head = True
        self._head = head(output)

    def _end(self) -> None:
        """Breaks reference cycles: the cuts in the graph hold this trip."""
        # They are methods of the engine, which would be kept alive by a graph.
        self._enter_stage = self._leave_stage = _no_stage
        self._head = None
        if not self._last:
            return
        self.glue.forget_trip()
        for alias in chain.from_iterable(of_stage.values() for of_stage in self._aliases):
            alias.forget_graph()
        self._aliases, self._stages, self._copies = [], {}, {}

    def place_of_call(self, module: nn.Module, places: Sequence[Place]) -> Place | None:
        """Returns the place of the next call of a module with several; None: no further one."""
        if torch._C._functorch.maybe_current_level() is not None:
            return None  # no stage can begin inside a transform
        # if the forward skipped a call, the next one must not return to an earlier stage
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
        self._check_order(stage)
        while self.stage < stage:
            # Before the turn is passed on: from then on other threads use the device's values.
            self._check_changes()
            self.draws.leave_stage()
            # Before the wait for the next turn: a trip that held two turns could block all others.
            self._leave_stage(self.stage, self.microbatch)
            self.stage += 1
            self._enter_stage(self.stage, self.microbatch)
            # After the turn has come: the generator of a device has one user at a time.
            self.draws.enter_stage()
            self._starts.append(next_node_number())

    def _check_order(self, stage: int) -> None:
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

    def run_layer(self, place: LayerPlace, args: Any, kwargs: Any) -> Any:
        """Runs a layer in its stage, on its own names of the values that it gets."""
        is_popped = was_off = False
        if self._last:
            glue = self.glue
            # Off the stack while a layer runs, or each of its operations would pass through it.
            # False if a mode of the model's code is above it: `is_off` then lets operations pass.
            is_popped = pop_function_mode(glue)
            was_off, glue.is_off = glue.is_off, True
        try:
            if place.stage != self.stage:
                self.enter(place.stage)
            if self.stage and self.looks:
                args = self._arguments(place, args)
                if kwargs:
                    names, values = kwargs.keys(), self._arguments(place, kwargs.values())
                    kwargs = dict(zip(names, values, strict=True))
            draws = self.draws
            if draws.seeds_device:
                draws.at(place.number, place.unit)
            else:
                draws.layer, draws.unit = place.number, place.unit
            self.layer = place
            return place.runs.run(place.position, self, args, kwargs)
        finally:
            self.layer = None
            if self._last:
                glue.is_off = was_off
                if is_popped:
                    # Only where it was: code may have popped it with its own modes.
                    push_function_mode(glue)

    def _arguments(self, place: LayerPlace, values: Iterable[Any]) -> tuple[Any, ...]:
        """Returns arguments of a layer, with this stage's own names of tensors in them.

        A list or a dict stays the same object, because the layer may add to it for its caller. The
        layer is looked into instead.
        """
        arguments: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                arguments.append(self.cut(value))
            elif type(value) is tuple:
                arguments.append(self._arguments(place, value))
            else:
                if type(value) not in PLAIN and self._has_foreign((value,)):
                    self._model.look_inside.add(place.number)
                arguments.append(value)
        return tuple(arguments)

    def on_device_again(self, place: LayerPlace) -> AbstractContextManager[object]:
        """Returns a context in which a layer finds the values of other stages on its own device.

        For its recomputation, which this trip does not see.
        """
        devices = self._model.devices
        if not (self._model.moves and self.looks_inside(place.number)):
            return nullcontext()
        return OnDevice(devices[place.stage], devices)

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

    # --- the backward

    @property
    def is_trainable(self) -> bool:
        """Whether the result of the head depends on trainable parameters."""
        head = self._head
        return head is None or (head.root is not None and head.root.requires_grad)

    def in_flight(self, whole: Sequence[bool]) -> list[StageInFlight]:
        """Returns, after the forward, what each stage's backward needs.

        Args:
            whole: for each stage, whether its backward cannot run in two parts.
        """
        head, self._head = self._head, None
        assert head is not None
        of_loss: list[Root] = [] if head.root is None else [head.root]
        if not self._last:
            return [StageInFlight(of_loss, head.gradient, (), whole[0])]
        aliases = [list(of_stage.values()) for of_stage in self._aliases]
        roots: list[list[Root]] = [
            [a.source if self._hold else edge_of(a.source) for a in of_next]
            for of_next in aliases[1:]
        ]
        # The stages' roots are the values that the next stage has names for; the last stage's is
        # the loss.
        roots.append(of_loss)
        return [
            StageInFlight(*values)
            for values in zip(
                roots, [*[None] * self._last, head.gradient], aliases, whole, strict=True
            )
        ]


def own_values(output: Any) -> Any:
    """Returns the model's output as values of the last stage, for code that the glue does not see.

    Such as a head that goes on in another thread.
    """
    trip = here.trip
    return output if trip is None or not trip.is_cut else trip.cut_all((output,))[0]


def net_of_trip() -> nn.Module | None:
    """Returns the model that a pipeline runs in this thread; None outside of its forwards."""
    return None if here.trip is None else here.trip._model.net
