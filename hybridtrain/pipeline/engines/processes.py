"""The engine for a pipeline whose stages are in several processes, with a device each.

Each process runs its own lane of the schedule, in the caller's thread. PyTorch's pipelines put the
sends and receives into it (`_torch_private.lowered`), in an order in which no process can wait in a
circle:

    process 0   F0 send F1 send       receive B0      stages 0, 2, ...
    process 1   receive F0 receive send B0            stages 1, 3, ...

What goes from one stage to the next is one message: the values of all links that cross this border.
A value that skips stages is passed on by the processes between, outside of autograd.

The sizes of a message must be known before it is received. They follow from the inputs, which all
processes of a pipeline are given. So the first step with inputs of some sizes sends the formats of
its messages along (`messages`), and later steps need none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain._torch_private import ThreadDraws, lowered
from hybridtrain.errors import SplitError
from hybridtrain.launch.activity import activity
from hybridtrain.pipeline.engines.actions import ActionRunner
from hybridtrain.pipeline.links import Link
from hybridtrain.pipeline.messages import (
    MessageFormat,
    empty,
    flat,
    from_bytes,
    pack,
    to_bytes,
    unpack,
    wire_device,
)
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.step import StagePorts, Step
from hybridtrain.schedule import WORDS, Action, Schedule
from hybridtrain.skip import skip_scope
from hybridtrain.world import World

# Kinds of steps whose formats are kept, such as a whole batch and the last one of an epoch.
_KINDS = 64

_PLAIN = (bool, int, float, str, bytes, type(None))  # of which repr is the same in all processes

# What crosses a border for one micro-batch: for each link its message, or its gradients.
_Values = dict[Link, Any]


class ProcessEngine:
    """Executes steps on `stages`, those of this process; the others run their own part.

    A step that has failed in one process leaves the others waiting for it: all must end then.

    Args:
        stages: of this process.
        links: of the whole pipeline.
        world: the processes of the pipeline.
    """

    def __init__(self, stages: Sequence[Stage], links: Sequence[Link], world: World) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._links = links
        self._world = world
        self._orders: dict[Schedule, list[tuple[str, int, int]]] = {}
        self._formats: dict[Hashable, dict[Action, MessageFormat]] = {}

    def forget(self) -> None:
        """Forgets the formats of messages; see `Engine.forget`."""
        self._formats.clear()

    def run(self, step: Step) -> list[Any]:
        """Executes this process's part of `step`; see `Engine.run`."""
        kind = _kind(step)
        if kind not in self._formats:
            if len(self._formats) == _KINDS:  # in all processes, which see the same kinds
                del self._formats[next(iter(self._formats))]
            self._formats[kind] = {}
        run = _StepRun(step, self._stages, self._links, self._world, self._formats[kind])
        try:
            with step.thread_state.applied(), skip_scope(None), ThreadDraws():
                run.run_actions(self._order(step.schedule))
        except BaseException:
            for stage in self._stages.values():
                stage.clear()
            raise
        return run.values if step.schedule.stages - 1 in self._stages else []

    def _order(self, schedule: Schedule) -> list[tuple[str, int, int]]:
        if schedule not in self._orders:
            place = self._world.pipeline_rank
            process_of = schedule.lane_of.__getitem__
            self._orders[schedule] = lowered(schedule.lanes, process_of, schedule.stages)[place]
        return self._orders[schedule]


def _kind(step: Step) -> Hashable:
    """Returns what the formats of a step's messages depend on, which all processes know."""
    inputs = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else "")
        for microbatch in range(step.schedule.chunks)
        for leaf in tree_leaves(step.source(microbatch))
    )
    return step.schedule.chunks, inputs, step.thread_state, step.training


class _Slot:
    """One end of a link, for the one message that is there at a time."""

    __slots__ = ("_message",)

    def send(self, message: Any) -> None:
        self._message = message

    def receive(self) -> Any:
        message = self._message
        del self._message
        return message


@dataclass
class _Transfer:
    """Messages on their way: the works, and the tensors that must live until they are done."""

    works: list[dist.Work]
    tensors: list[Tensor] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _StepRun:
    """The state of one step while it runs."""

    def __init__(
        self,
        step: Step,
        stages: Mapping[int, Stage],
        links: Sequence[Link],
        world: World,
        formats: dict[Action, MessageFormat],
    ) -> None:
        self._stages = stages
        self._links = links
        self._world = world
        self._formats = formats
        self._group = world.pipeline_group
        self._device = world.devices[0]
        self._wire = world.wire_device
        # a process has one device, so one lane
        lane_of = step.schedule.lane_of
        self._peers = [lane_of[stage] for stage in range(step.schedule.stages)]
        self._batches = world.backend == "nccl"  # on one communicator, not one for each pair
        self._forward = {link: _Slot() for link in links}
        self._backward = {link: _Slot() for link in links}
        ports = {
            index: StagePorts(
                receive=[self._forward[link] for link in stage.incoming],
                send=[self._forward[link] for link in stage.outgoing],
                receive_gradients=[self._backward[link] for link in stage.outgoing],
                send_gradients=[self._backward[link] for link in stage.incoming],
            )
            for index, stage in stages.items()
        }
        self._runner = ActionRunner(step, stages, ports)
        self._arrived: dict[Action, _Values] = {}
        self._coming: dict[Action, tuple[MessageFormat, list[Tensor], _Transfer]] = {}
        self._leaving: dict[Action, _Values] = {}
        self._sent: deque[_Transfer] = deque()
        # what a forward alone has sent would otherwise stay until the end of a long batch
        self._most_sent = 4 * step.schedule.stages
        self._doing = activity.begin_step(1)[0]

    @property
    def values(self) -> list[Any]:
        """The head's values by micro-batch."""
        return self._runner.values

    def run_actions(self, order: Sequence[tuple[Any, int, int]]) -> None:
        """Executes the actions of this process, and the sends and receives between them."""
        lane = self._world.pipeline_rank
        try:
            for kind, stage, microbatch in order:
                if kind in WORDS:
                    self._run(lane, Action(kind, stage, microbatch))
                elif kind == "SEND_F":
                    self._send(Action("F", stage + 1, microbatch), stage)
                elif kind == "SEND_B":
                    self._send(Action("B", stage - 1, microbatch), stage)
                elif kind == "RECV_F":
                    self._begin_receive(Action("F", stage, microbatch), stage - 1)
                else:
                    self._begin_receive(Action("B", stage, microbatch), stage + 1)
            self._doing.wait(True)
            while self._sent:
                self._sent.popleft().wait()
        finally:
            self._doing.end()

    def _run(self, lane: int, action: Action) -> None:
        kind, stage, microbatch = action
        own, doing = self._stages[stage], self._doing
        doing.begin(action)
        try:
            doing.wait(True)
            values = self._take(action)
            doing.wait(False)
            slots, border = (self._forward, stage) if kind == "F" else (self._backward, stage - 1)
            leaving = self._pass_on(values, slots, border)
            run = self._runner.forward if kind == "F" else self._runner.backward
            run(lane, action, doing)
        except BaseException as error:
            self._runner.add_note(error, action)
            raise
        if kind == "F":
            leaving |= {link: self._forward[link].receive() for link in own.outgoing}
            to = Action("F", stage + 1, microbatch)
        elif action.sends_gradient:
            leaving |= {link: self._backward[link].receive() for link in own.incoming}
            to = Action("B", stage - 1, microbatch)
        if leaving:
            (self._arrived if to.stage in self._stages else self._leaving)[to] = leaving

    def _pass_on(self, values: _Values, slots: Mapping[Link, _Slot], border: int) -> _Values:
        """Gives a stage its own of `values`; returns those that go on over `border`."""
        leaving = {}
        for link, value in values.items():
            if _crosses(link, border):
                leaving[link] = value
            else:
                slots[link].send(value)
        return leaving

    def _crossing(self, action: Action) -> list[Link]:
        """Returns the links of the message to `action`, in an order that both sides have."""
        border = action.stage - 1 if action.kind == "F" else action.stage
        return [link for link in self._links if _crosses(link, border)]

    def _send(self, to: Action, sender: int) -> None:
        """Begins to send what the stage `sender` has for the action `to`."""
        leaving, stage = self._leaving.pop(to), self._stages[sender]
        message = [leaving[link] for link in self._crossing(to)]
        if to.kind == "F":
            # a tensor, since it may change from step to step
            message.append(torch.tensor(stage.draws_before_next(to.microbatch), dtype=torch.int64))
        known = self._formats.get(to)
        form, tensors = pack(message, to.kind == "F", known)
        works: list[Any] = []
        held: list[Tensor] = []
        if known is None:
            self._formats[to] = form
            data = to_bytes(form)
            held += [torch.tensor([data.numel()]), data]
            peer = self._peers[to.stage]
            works += [dist.isend(part, group=self._group, group_dst=peer) for part in held]
        elif known is not form:
            raise SplitError(
                f"{stage} sends values of other shapes or types than before, or other numbers "
                f"that are not tensors, for inputs of the same shapes. With engine=distributed "
                f"they must follow from the shapes of the inputs: use engine=local for this model"
            )
        parts = [
            flat(t, one).to(wire_device(one, self._wire))
            for t, one in zip(tensors, form.tensors, strict=True)
        ]
        works += self._begin(dist.isend, parts, to.stage)
        if len(self._sent) >= self._most_sent:
            self._doing.wait(True)
            self._sent.popleft().wait()
        self._sent.append(_Transfer(works, held + parts))

    def _begin_receive(self, action: Action, sender: int) -> None:
        """Begins to receive what `action` needs from the stage `sender`."""
        if action not in self._formats:
            self._formats[action] = self._receive_format(sender)
        form = self._formats[action]
        tensors = [empty(one, self._wire) for one in form.tensors]
        parts = [flat(t, one) for t, one in zip(tensors, form.tensors, strict=True)]
        works = self._begin(dist.irecv, parts, sender)
        self._coming[action] = form, tensors, _Transfer(works, parts)

    def _take(self, action: Action) -> _Values:
        """Returns what has come for `action`; waits for it if it is on its way."""
        if action.kind == "W":
            return {}
        if action.sends_gradient:  # whatever part of the backward waits for it
            action = action._replace(kind="B")
        if action in self._arrived:
            return self._arrived.pop(action)
        if action not in self._coming:
            return {}  # the first forward, or the last stage's backward
        form, tensors, transfer = self._coming.pop(action)
        transfer.wait()
        draws: Tensor | None = tensors[-1] if action.kind == "F" else None
        message = unpack(form, tensors, self._device)
        if draws is not None:
            message.pop()
            if draws.numel():
                stage = self._stages[action.stage]
                stage.continue_draws(action.microbatch, draws.tolist())
        return dict(zip(self._crossing(action), message, strict=True))

    def _receive_format(self, sender: int) -> MessageFormat:
        self._doing.wait(True)
        peer = self._peers[sender]
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=self._group, group_src=peer)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, group=self._group, group_src=peer)
        return from_bytes(data)

    def _begin(self, operation: Any, parts: Sequence[Tensor], stage: int) -> list[Any]:
        """Begins to send `parts` to the process of `stage`, or to receive them from it."""
        peer, group = self._peers[stage], self._group
        parts = [part for part in parts if part.numel()]
        batch = [part for part in parts if self._batches and part.device.type != "cpu"]
        operations = [dist.P2POp(operation, part, group=group, group_peer=peer) for part in batch]
        works = dist.batch_isend_irecv(operations) if batch else []
        # of the CPU's with gloo, in whatever order NCCL's are done
        rest = [part for part in parts if not self._batches or part.device.type == "cpu"]
        if operation is dist.isend:
            return works + [dist.isend(part, group=group, group_dst=peer) for part in rest]
        return works + [dist.irecv(part, group=group, group_src=peer) for part in rest]


def _crosses(link: Link, border: int) -> bool:
    """Returns whether `link` goes over the border between the stages `border` and `border + 1`."""
    return link.source <= border < link.target
