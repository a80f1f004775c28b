"""The engine of a process that has some of the stages, and runs the model's own forward.

    process 0      [1] [2] F0@0 F0@1 ...          B0@0
    process 1      [1] [2]      F1@0 B1@0 ...

[1] The first message of a step tells its kind. For a new kind of micro-batch, each process alone
rehearses the forward (`rehearsal`), so that all know what crosses the borders. [2] Each process
runs its own lane of the schedule. Its forwards are `PartTrip`s; `MessageWire` carries the values.

A process with one stage runs all actions in the caller's thread. One with several has threads, as
with all stages in one process: a forward waits between the stages of its process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from hybridtrain._base import codec
from hybridtrain._base.python_draws import watched_python_draws
from hybridtrain._base.skip import skip_scope
from hybridtrain._base.torch_private import FakeTensorMode, without_fast_attention
from hybridtrain.errors import UserError
from hybridtrain.graph import Layer, arguments_of
from hybridtrain.partitioning import PlannedLayers, copy_of, fake_like
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.forward.engine import ForwardEngine, StepRun
from hybridtrain.pipeline.forward.layers import install
from hybridtrain.pipeline.forward.part_transport import MessageTransport, Transport, outline
from hybridtrain.pipeline.forward.part_trip import (
    PartTrip,
    RehearsalTrip,
    is_elsewhere,
    is_of_first_stage,
)
from hybridtrain.pipeline.forward.places import places_of
from hybridtrain.pipeline.forward.rehearsal import InputElsewhere, Rehearsal
from hybridtrain.pipeline.forward.rehearsed_layers import (
    LayersOfCopy,
    RehearsedLayers,
    attributes_of,
    modules_of,
)
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.forward.trip import Trip
from hybridtrain.pipeline.forward.values import Model
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.message_wire import (
    Lane,
)
from hybridtrain.schedule import Action, Schedule
from hybridtrain.world import World

log = logging.getLogger("hybridtrain")

# Kinds of micro-batches whose rehearsals are kept, and modes of the modules whose copies are.
_KINDS, _COPIES = 256, 4

_PLAIN = (bool, int, float, str, bytes, type(None))  # equal by their repr


class _Copy(NamedTuple):
    """A copy of the model on fake tensors.

    Attributes:
        facts: what the model was like.
        model: the copy, as trips know it.
        own: what it was like itself, before its first rehearsal.
    """

    facts: Hashable
    model: Model
    own: Hashable


class PartEngine(ForwardEngine):
    """Executes steps on the stages of this process; other processes run their own part.

    If a step fails in one process, the others wait for it forever: all must exit then.

    Args:
        model: what trips know of the model.
        stages: the stages of this process.
        rng: seeds random operations.
        planned: the layers of all stages.
        world: the processes of the pipeline.
        hold_roots, compiles, moves_saved: as for a `ForwardEngine`.

    Attributes:
        known: the rehearsals so far, by the kind of micro-batch.
        rehearsals: those of the micro-batches of the step.
        transport: connects this process to the others.
        world: the processes of the pipeline.
    """

    def __init__(
        self,
        model: Model,
        stages: Sequence[ForwardStage],
        rng: LayerRNG,
        planned: PlannedLayers,
        world: World,
        hold_roots: bool,
        compiles: bool,
        moves_saved: bool,
    ) -> None:
        super().__init__(model, stages, rng, world.devices, hold_roots, compiles, moves_saved)
        self._planned = planned
        self.world = world
        self._lanes: dict[Schedule, Lane] = {}
        self.transport: Transport = MessageTransport(world)
        self.known: dict[Hashable, Rehearsal] = {}
        self._here = threading.local()
        self._mode_of_copies = FakeTensorMode(allow_non_fake_inputs=True)
        # Operations on new shapes are in no cache, and PyTorch would keep each of them for good.
        self._mode_of_copies.cache_enabled = False
        self._copies: dict[tuple[bool, ...], _Copy] = {}  # by the modes of the modules
        self.rehearsals: list[Rehearsal] = []  # of the micro-batches of the step

    def run(self, step: Step) -> list[Any]:
        """Executes this process's part of `step`; see `Engine.run`."""
        schedule = step.schedule
        inputs, kinds = self.transport.begin_step(step, self._kinds)
        step = step._replace(source=inputs.__getitem__)
        self.rehearsals = self._rehearsals(step, kinds)
        self.transport.agree(self.rehearsals)
        values = super().run(step)
        self.transport.end_step()
        return values if self._stages[-1].index + 1 == schedule.stages else []

    @property
    def stand_ins(self) -> FakeTensorMode:
        """The mode of the fake tensors of this thread; two threads cannot be in one mode."""
        mode: FakeTensorMode | None = getattr(self._here, "mode", None)
        if mode is None:
            mode = self._here.mode = FakeTensorMode()
        return mode

    def lane_of(self, schedule: Schedule) -> Lane:
        """Returns the lane of this process."""
        if schedule not in self._lanes:
            self._lanes[schedule] = Lane.of(schedule, self.world.pipeline_rank)
        return self._lanes[schedule]

    # --- rehearsals

    def rehearse(self, step: Step) -> list[Rehearsal]:
        """Returns the rehearsal of each micro-batch; runs those of new kinds."""
        outlines = [outline(step.source(number)) for number in range(step.schedule.chunks)]
        return self._rehearsals(step, self._kinds(step, outlines))

    def _rehearsals(self, step: Step, kinds: Sequence[Hashable]) -> list[Rehearsal]:
        model: list[Model] = []  # a copy, made once if it is needed
        rehearsals = []
        for microbatch, kind in enumerate(kinds):
            rehearsal = self.known.get(kind)
            if rehearsal is None:
                model = model or [self._copy()]
                rehearsal = self._rehearse(step, microbatch, model[0])
                if len(self.known) == _KINDS:
                    del self.known[next(iter(self.known))]
                self.known[kind] = rehearsal
            rehearsals.append(rehearsal)
        return rehearsals

    def _kinds(self, step: Step, outlines: Sequence[Any]) -> tuple[Hashable, ...]:
        """Returns what the code of each micro-batch's forward depends on."""
        state = step.thread_state, step.schedule.trains, self._modes_of_modules
        kinds: list[Hashable] = []
        for inputs in outlines:
            if isinstance(inputs, Tensor | InputElsewhere):  # most often
                kinds.append((state, _fact(inputs)))
            else:
                leaves, spec = tree_flatten(inputs, is_leaf=is_elsewhere)
                kinds.append((state, spec, *map(_fact, leaves)))
        return tuple(kinds)

    @property
    def _modes_of_modules(self) -> tuple[bool, ...]:
        return tuple(module.training for module in modules_of(self._model.net))

    def _copy(self) -> Model:
        """Returns a copy of the model on fake tensors; the last one if nothing has changed since.

        To copy a large model takes longer than to rehearse it, and texts of ever new lengths are
        ever new kinds.
        """
        facts, modes = self._facts(), self._modes_of_modules
        kept = self._copies.get(modes)
        if kept is not None and kept.facts == facts and attributes_of(kept.model.net) == kept.own:
            return kept.model
        net = self._model.net
        outside = self._buffers_outside()

        def replacement(tensor: Tensor) -> Tensor:
            if id(tensor) in outside:
                return tensor.detach().clone()
            with self._mode_of_copies:
                return fake_like(tensor)

        copy = copy_of(Layer("", net), replacement)
        for part, copied in zip(net.modules(), copy.modules(), strict=True):
            copied.training = part.training
        model = self._model_of_copy(copy)
        if len(self._copies) == _COPIES:
            self._copies.clear()
        self._copies[modes] = _Copy(facts, model, attributes_of(copy))
        return model

    def _facts(self) -> Hashable:
        """Returns what a copy of the model depends on."""
        outside = self._buffers_outside().values()
        return attributes_of(self._model.net), [(id(t), t._version) for t in outside]

    def _buffers_outside(self) -> dict[int, Tensor]:
        """Returns the buffers of no layer, which are equal in all processes, by `id`."""
        layers = (layer for stage in self._planned.stages for layer in stage)
        inside = {id(t) for layer in layers for t in layer.module.buffers()}
        return {id(t): t for t in self._model.net.buffers() if id(t) not in inside}

    def _rehearse(self, step: Step, microbatch: int, model: Model) -> Rehearsal:
        """Runs the forward of a copy of the model on fake tensors, as of a micro-batch."""
        trains = step.makes_graphs
        draws = self._rng.rehearsing().drawing_in_part(0, begins_here=True)
        trip = RehearsalTrip(self._mode_of_copies, model, draws, trains)
        inputs = tree_map_only(Tensor, _own_integers, step.source(microbatch))
        arguments = arguments_of(model.net, inputs)
        try:
            with (
                without_fast_attention(),
                torch.random.fork_rng([]),
                torch.set_grad_enabled(trains),
                skip_scope({}),
                watched_python_draws(trip.refuse_draw),
            ):
                rehearsal = trip.go(arguments, step.thread_state.autocast())
                for learn in trip.lessons:
                    learn()
                return rehearsal
        except UserError:  # about the model as a whole
            raise
        except Exception as error:
            where = f"micro-batch {microbatch} on stage {trip.stage}"
            error.add_note(f"in the forward of {where}, on tensors without values")
            raise

    def _model_of_copy(self, copy: nn.Module) -> Model:
        model, planned = self._model, self._planned
        names = {id(module): name for name, module in model.net.named_modules()}
        modules = [
            [copy.get_submodule(names[id(layer.module)]) for layer in layers]
            for layers in planned.stages
        ]
        install([module for of_stage in modules for module in of_stage])
        install([copy.get_submodule(name) for name in planned.opened.values()])
        layers = LayersOfCopy()
        runs = {stage: RehearsedLayers(of_stage, layers) for stage, of_stage in enumerate(modules)}
        parameters = dict(copy.named_parameters())
        owners = {
            id(parameters[name]): model.owners[id(parameter)]
            for name, parameter in model.net.named_parameters()
        }
        return model._replace(
            net=copy,
            places=places_of(copy, planned, runs),
            owners=owners,
            names={id(t): name for name, t in (*copy.named_parameters(), *copy.named_buffers())},
        )


def _own_integers(tensor: Tensor) -> Tensor:
    """Returns a copy of an integer input, which the rehearsal may change; others get no values."""
    return tensor if is_of_first_stage(tensor) else tensor.clone()


def _fact(leaf: Any) -> Hashable:
    """Returns what code between layers may ask about an input.

    For integers and booleans also whether all or any differ from zero, because code asks whether a
    mask masks anything.
    """
    if isinstance(leaf, InputElsewhere):
        return leaf.form
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else _encoded(leaf)
    form = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    if leaf.device.type != "cpu":  # reading a number would wait for the device
        return form
    return *form, bool(leaf.all()), bool(leaf.any())


def _encoded(value: Any) -> bytes:
    """Returns what the other processes get of an input, such as a member of an enum."""
    with suppress(codec.CodecError):  # the first message with it raises it as an error of the user
        return codec.encode(value)
    return b""


class PartRun(StepRun):
    """The state of this process's part of a step while it runs."""

    only_arguments = (Tensor, InputElsewhere)

    _engine: PartEngine

    def __init__(self, engine: PartEngine, step: Step, *args: Any, **kwargs: Any) -> None:
        super().__init__(engine, step, *args, **kwargs)
        lane = engine.lane_of(step.schedule)
        self._after_all = step.schedule.stages
        self._trips: dict[int, PartTrip] = {}
        self._receives = len(lane.receives)
        self._due = {action: due for due, action in lane.actions}  # receives that begin before
        (self._doing,) = self.activity.values()
        self._wire = engine.transport.wire(self._stages, lane, self._doing, step.batch_check)

    def _new_trip(self, microbatch: int) -> Trip:
        engine = self._engine
        trip = self._trips[microbatch] = PartTrip(
            engine.rehearsals[microbatch],
            tuple(self._stages),
            engine.stand_ins,
            self._model,
            microbatch,
            engine._rng.drawing_in_part(microbatch, begins_here=0 in self._stages),
            self._enter,
            self._leave,
            self.step.makes_graphs,
        )
        return trip

    def _enter(self, stage: int, microbatch: int) -> None:
        if stage in self._stages:
            super()._enter(stage, microbatch)

    def _take_message(self, stage: int, microbatch: int) -> None:
        action = Action("F", stage, microbatch)
        self._wire.begin_receives(self._due[action])
        if stage:
            (values,) = self._wire.receive(action, self._doing)
            self._trips[microbatch].arrive(stage, values)

    def _send_message(self, stage: int, microbatch: int) -> None:
        if stage + 1 < self._after_all:
            message = [tuple(self._trips[microbatch].outgoing(stage))]
            self._wire.send(Action("F", stage + 1, microbatch), message)
        if stage == self._last:
            del self._trips[microbatch]

    def gradients_from_after(self, stage: int, microbatch: int) -> Any:
        """Returns the gradient of the loss; None where another process sends gradients."""
        if stage + 1 == self._after_all:
            return super().gradients_from_after(stage, microbatch)
        return None

    def backward(self, action: Action, gradients: Any) -> Any:
        """See `StepRun`."""
        self._wire.begin_receives(self._due[action])
        if gradients is None:
            (gradients,) = self._wire.receive(action, self._doing)
        return super().backward(action, gradients)

    def _sent_back(self, gradients: Any, stage: int, microbatch: int) -> Any:
        if stage - 1 in self._stages:
            return super()._sent_back(gradients, stage, microbatch)
        self._wire.send(Action("B", stage - 1, microbatch), [gradients])
        return None

    def finish(self) -> None:
        """Waits for what this process still sends and receives."""
        super().finish()
        self._wire.begin_receives(self._receives)
        self._wire.finish()


PartEngine.run_type = PartRun
