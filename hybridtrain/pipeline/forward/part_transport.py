"""What a process with some of the stages gets from the others, and gives them.

    in a step       first message, inputs             values of forwards, gradients of backwards
    from process    0 -> 1 -> 2                       s -> s + 1, s + 1 -> s

Integer inputs go from the first process to all: code between layers may depend on them, and they
are small. Of floating-point inputs only the formats do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hybridtrain.errors import SplitError, setting
from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.agreement import BatchCheck
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.forward.part_trip import is_elsewhere, is_of_first_stage
from hybridtrain.pipeline.forward.rehearsal import InputElsewhere, Rehearsal, ValueFormat
from hybridtrain.pipeline.forward.stage import ForwardStage
from hybridtrain.pipeline.message_wire import (
    FirstMessage,
    Formats,
    Lane,
    MessageWire,
    begin_send_format,
    formats_of,
    receive_format,
)
from hybridtrain.pipeline.messages import dense, empty, pack, unpack, wire_device
from hybridtrain.pipeline.point_to_point import Pending, begin_receive, begin_send, wait
from hybridtrain.schedule import Action
from hybridtrain.world import World

_INPUTS = Action("F", 0, 0)
"""Where the format of the inputs is among the formats: the first stage gets no message."""


KindsOf = Callable[[Step, Sequence[Any]], Sequence[Hashable]]
"""`kinds_of(step, outlines)` returns the kind of each micro-batch, see `outline`."""


class Wire(Protocol):
    """Carries values over the borders between stages in one step, and gradients back."""

    def begin_receives(self, count: int) -> None:
        """Starts the receives among the first `count` of the step that have not started."""

    def send(self, to: Action, message: list[Any]) -> None:
        """Sends a message to an action, a forward or a backward; does not wait for its arrival."""

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Waits for the message to `action`, and returns it on the device of its stage."""

    def finish(self) -> None:
        """Waits until all messages are sent."""


class Transport(Protocol):
    """Connects a process to the others of its pipeline."""

    def begin_step(self, step: Step, kinds_of: KindsOf) -> tuple[list[Any], Sequence[Hashable]]:
        """Begins a step.

        Args:
            step: the step.
            kinds_of: returns the kind of each micro-batch of a step, from its `outline`.

        Returns:
            the inputs of each micro-batch, which are outlines in later processes than the first,
            and the kinds.
        """
        ...

    def agree(self, rehearsals: Sequence[Rehearsal]) -> None:
        """Checks, in the first step of a kind, that all processes have the same rehearsals.

        Raises:
            SplitError: they differ, so a process would wait for a message that none sends.
        """

    def wire(
        self,
        stages: Mapping[int, ForwardStage],
        lane: Lane,
        doing: LaneActivity,
        batch_check: BatchCheck | None,
    ) -> Wire:
        """Returns the wire of the step."""
        ...

    def end_step(self) -> None:
        """Ends a step."""


class MessageTransport:
    """Messages between the processes of a pipeline.

    Args:
        world: the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._first_message = FirstMessage(world)
        self._known: dict[int, Formats] = {}  # by the number of the kind
        self._formats: Formats = {}  # of the messages of the step
        self._sending: list[Pending] = []
        self._is_new = False
        self._held: list[Tensor] = []  # until it is sent

    def begin_step(self, step: Step, kinds_of: KindsOf) -> tuple[list[Any], Sequence[Hashable]]:
        """See `Transport`."""
        if self._world.pipeline_rank:
            number, self._sending = self._first_message.pass_on(step)
            self._follow(number)
            inputs = self._receive_inputs()
            return inputs, kinds_of(step, inputs)
        inputs = [step.source(microbatch) for microbatch in range(step.schedule.chunks)]
        outlines = list(map(outline, inputs))
        tensors, order = distinct(outlines)
        kinds = kinds_of(step, outlines)
        # A tensor that occurs twice is sent once, so where it does is part of the message's format.
        number, self._sending = self._first_message.pass_on(step, (kinds, order))
        self._follow(number)
        self._send_inputs(outlines, tensors)
        return inputs, kinds

    def _follow(self, kind: int) -> None:
        """Takes up the formats of a kind of step."""
        self._formats = formats_of(self._known, kind)
        self._is_new = _INPUTS not in self._formats

    def agree(self, rehearsals: Sequence[Rehearsal]) -> None:
        """See `Transport`."""
        if not self._is_new:
            return
        text = "".join(rehearsal.digest for rehearsal in rehearsals)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
        world, rank = self._world, self._world.pipeline_rank
        if rank + 1 < world.processes_per_replica:
            self._sending += begin_send([mine], world, rank + 1)
            self._held = [*self._held, mine]
        if not rank:
            return
        theirs = torch.empty_like(mine)
        wait(begin_receive([theirs], world, rank - 1))
        if not torch.equal(mine, theirs):
            ranks = [world.rank_of(world.data_parallel_rank, rank + step) for step in (0, -1)]
            raise SplitError(
                f"the forward takes another path on rank {ranks[0]} than on rank {ranks[1]}: with "
                f"{setting('engine', 'distributed')} the model's code, its settings and its Python "
                f"state must be the same in all processes; use {setting('engine', 'local')} if "
                "they cannot be"
            )

    def _send_inputs(self, outlines: list[Any], tensors: list[Tensor]) -> None:
        if self._is_new:
            self._formats[_INPUTS], tensors = pack(outlines, True)
        device = self._world.wire_device
        form = self._formats[_INPUTS]
        parts = zip(tensors, form.tensors, strict=True)
        self._pass_on([dense(t, f).to(wire_device(f, device)) for t, f in parts])

    def _receive_inputs(self) -> list[Any]:
        world, before = self._world, self._world.pipeline_rank - 1
        if self._is_new:
            self._formats[_INPUTS] = receive_format(world, before)
        form = self._formats[_INPUTS]
        tensors = [empty(tensor_form, world.wire_device) for tensor_form in form.tensors]
        parts = [dense(t, f) for t, f in zip(tensors, form.tensors, strict=True)]
        wait(begin_receive(parts, world, before))
        inputs: list[Any] = unpack(form, tensors, world.devices[0])
        self._pass_on(parts)
        return inputs

    def _pass_on(self, parts: list[Tensor]) -> None:
        """Sends inputs to the next process, and their format in the first step of a kind."""
        world, after = self._world, self._world.pipeline_rank + 1
        if after == world.processes_per_replica:
            return
        # Copies, which live until they are sent: the forward may change the inputs before.
        self._held = parts = [part.clone() for part in parts]
        if self._is_new:
            works, held = begin_send_format(self._formats[_INPUTS], world, after)
            self._sending += works
            self._held = [*parts, *held]
        self._sending += begin_send(parts, world, after)

    def wire(
        self,
        stages: Mapping[int, ForwardStage],
        lane: Lane,
        doing: LaneActivity,
        batch_check: BatchCheck | None,
    ) -> Wire:
        """See `Transport`."""
        return MessageWire(stages, lane, self._world, self._formats, doing, batch_check)

    def end_step(self) -> None:
        """See `Transport`."""
        wait(self._sending)
        self._sending, self._held = [], []


def outline(inputs: Any) -> Any:
    """Returns what other processes than the first get of the inputs of a micro-batch.

    An `InputElsewhere` in the place of each floating-point tensor.
    """
    return _outline(inputs) if isinstance(inputs, Tensor) else tree_map(_outline, inputs)


def _outline(leaf: Any) -> Any:
    return InputElsewhere(ValueFormat.of(leaf)) if is_of_first_stage(leaf) else leaf


def distinct(outlines: Sequence[Any]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Returns the tensors of outlines once each, and for each place the index of its tensor."""
    index_of: dict[int, int] = {}
    tensors: list[Tensor] = []
    order: list[int] = []
    # Most often each outline is an `InputElsewhere` itself.
    for leaf in tree_leaves([part for part in outlines if not is_elsewhere(part)], is_elsewhere):
        if isinstance(leaf, Tensor):
            if id(leaf) not in index_of:
                index_of[id(leaf)] = len(tensors)
                tensors.append(leaf)
            order.append(index_of[id(leaf)])
    return tensors, tuple(order)
