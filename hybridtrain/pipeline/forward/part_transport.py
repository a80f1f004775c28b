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
from torch.utils._pytree import tree_map

from hybridtrain.errors import SplitError, setting
from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.agreement import BatchCheck
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.forward.part_trip import is_of_first_stage
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

    def begin_step(self, step: Step, kind_of: Callable[[Step], Hashable]) -> list[Any]:
        """Begins a step.

        Args:
            step: the step.
            kind_of: returns the kind of a step; called in the first process.

        Returns:
            the inputs of each micro-batch; in later processes, an `InputElsewhere` in the place of
            each floating-point tensor.
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

    def begin_step(self, step: Step, kind_of: Callable[[Step], Hashable]) -> list[Any]:
        """See `Transport`."""
        number, self._sending = self._first_message.pass_on(step, kind_of)
        self._formats = formats_of(self._known, number)
        self._is_new = _INPUTS not in self._formats
        return self._share_inputs(step)

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

    def _share_inputs(self, step: Step) -> list[Any]:
        world, rank = self._world, self._world.pipeline_rank
        expected = self._formats.get(_INPUTS)
        if rank:
            form = expected or receive_format(world, rank - 1)
            received = [empty(tensor_form, world.wire_device) for tensor_form in form.tensors]
            parts = [dense(t, f) for t, f in zip(received, form.tensors, strict=True)]
            wait(begin_receive(parts, world, rank - 1))
            inputs: list[Any] = unpack(form, received, world.devices[0])
        else:
            inputs = [step.source(microbatch) for microbatch in range(step.schedule.chunks)]
            form, tensors = pack(tree_map(without_values, inputs), True, expected)
            parts = [
                dense(t, f).to(wire_device(f, world.wire_device))
                for t, f in zip(tensors, form.tensors, strict=True)
            ]
        self._formats[_INPUTS] = form
        if rank + 1 < world.processes_per_replica:
            if expected is None:
                works, held = begin_send_format(form, world, rank + 1)
                self._sending += works
                parts = [*parts, *held]
            self._sending += begin_send(parts[: len(form.tensors)], world, rank + 1)
        self._held = parts  # until they are sent
        return inputs

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


def without_values(leaf: Any) -> Any:
    """Returns what other processes than the first get of an input."""
    return InputElsewhere(ValueFormat.of(leaf)) if is_of_first_stage(leaf) else leaf
