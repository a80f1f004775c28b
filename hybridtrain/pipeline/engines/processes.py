"""The engine for a pipeline over several processes, with a device each, and its wire.

Each process runs its own lane of the schedule, in the caller's thread. Two processes must name
their messages to one another in the same order: they share a queue for each direction, and with
NCCL one for both. That order is the one over all processes that proves the schedule
(`Schedule.in_one_order`). Each process goes through all of it:

    in one order   F0@0        F0@1   F1@0        B0@1        B0@0   F1@1   ...
    process 0      F0 send            F1 send     receive B0  B0             stages 0, 2, ...
    process 1      receive F0  F0     receive F1  B0 send            F1      stages 1, 3, ...

A process runs its own actions, and begins to send each result. At an action of another process
that makes something for it, it begins to receive the result, and goes on. So both ends of a
message stand at one place of one order. A process waits only for arrivals, formats and the oldest
of many sends, and the other end begins each of them at its place of the order or earlier. So the
process that is least far in the order always goes on, and none waits in a circle.

ProcessGroupNCCL makes a message wait for all work that the current stream has when the message
begins. A receive that began from the computing stream would wait for the actions before it, and
delay the action that needs it. So receives begin from a side stream, into memory of that stream,
and the computing stream waits where it uses the value. A send begins from the computing stream,
right behind the work that makes its value.

    computing stream    F0             F1 waits for its message alone
    side stream         [2]
    NCCL's stream       F1's message

With gloo, which keeps the two directions apart, a process begins the next few receives ahead of
their places, in the same order. A message that finds its receive begun is sent at once; another one
first waits for a question and an answer between the two processes, while both compute. Receives
begin ahead after a process's first action, so that they do not delay it, and in each wait for a
message.

The sizes of a message must be known before it is received. They follow from the inputs, which the
first process has: it numbers the kinds of inputs, and sends the number of the step's kind to the
others ahead of the step. The first step of a kind sends the formats of its messages along
(`messages`), and later steps need none.

    process of stage s       [1] send: pack, format if new, numbers
    process of stage s+1     [2] begin_receive: format if new, memory     [3] receive: wait, unpack
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import ScheduleError, SplitError, setting
from hybridtrain.launch import LaneActivity, activity
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.engines.actions import ActionRunner
from hybridtrain.pipeline.links import Link, routes
from hybridtrain.pipeline.messages import (
    MessageFormat,
    empty,
    flat,
    format_buffer,
    from_bytes,
    pack,
    to_bytes,
    unpack,
    wire_device,
)
from hybridtrain.pipeline.point_to_point import begin_receive, begin_send
from hybridtrain.pipeline.stage import Stage
from hybridtrain.pipeline.transfer import keep_until, side_stream
from hybridtrain.schedule import Action, Schedule, receiver_of
from hybridtrain.world import World

RECEIVES_AHEAD = 4
"""The most messages on their way to a process with which it begins further receives early.

Each takes the memory of a message."""

Formats = dict[Action, MessageFormat]
"""The formats of the messages to each action of a step."""


class _Coming(NamedTuple):
    """A message on its way here; the tensors are there when the works are done.

    Attributes:
        form: of the message.
        tensors: in the message.
        parts: the memory of these, which must live until the works are done.
        works: the receives.
    """

    form: MessageFormat
    tensors: list[Tensor]
    parts: list[Tensor]
    works: list[dist.Work]


class Lane(NamedTuple):
    """The part of a schedule that a process runs.

    Attributes:
        number: of the lane in the schedule.
        actions: each after the number of receives that must have begun before it runs.
        receives: the actions that messages from other processes are for, in the order of these.
        peers: for each stage of the pipeline its process.
    """

    number: int
    actions: tuple[tuple[int, Action], ...]
    receives: tuple[Action, ...]
    peers: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, number: int) -> Lane:
        """Returns a lane of `schedule`."""
        actions: list[tuple[int, Action]] = []
        receives: list[Action] = []
        for is_own, action in order_of(schedule, number):
            if is_own:
                actions.append((len(receives), action))
            else:
                receives.append(action)
        # a process has one device, so one lane, whose number is its rank in the pipeline's group
        peers = tuple(schedule.lane_of[stage] for stage in range(schedule.stages))
        return cls(number, tuple(actions), tuple(receives), peers)


class MessageWire:
    """Sends values to other processes; see `Wire`. It is one step's.

    Args:
        stages: of this process.
        lane: of this process.
        world: the processes.
        formats: what is known of the messages; the first step that sends them fills it.
        doing: notes that a send waits for earlier ones.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        lane: Lane,
        world: World,
        formats: Formats,
        doing: LaneActivity,
    ) -> None:
        self._stages = stages
        self._peers = lane.peers
        self._receives = lane.receives
        self._begun = 0  # how many of these
        self._formats = formats
        self._doing = doing
        self._world = world
        self._group = world.pipeline_group
        self._device = world.devices[0]
        self._wire_device = world.wire_device
        self._accelerator = accelerator_of(self._wire_device)  # None with gloo
        self._here: dict[Action, list[Any]] = {}
        self._coming: dict[Action, _Coming] = {}
        # what is being sent must live until it is
        self._sent: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        # what a forward alone has sent would otherwise stay until the end of a long batch
        self._most_sent = 4 * len(lane.peers)

    def send(self, to: Action, message: list[Any]) -> None:
        """Begins to send the message, or keeps it for a stage of this process."""
        if to.stage in self._stages:
            self._here[to] = message
            return
        stage = self._stages[to.stage - 1 if to.kind == "F" else to.stage + 1]
        if to.kind == "F":
            # a tensor, since it may change from step to step
            draws = torch.tensor(stage.draws_before_next(to.microbatch), dtype=torch.int64)
            message = [*message, draws]
        known = self._formats.get(to)
        form, tensors = pack(message, to.kind == "F", known)  # [1]
        works: list[Any] = []
        held: list[Tensor] = []
        if known is None:
            # ahead of the numbers, in the same queue: the receiver takes it in the same place
            self._formats[to] = form
            data = to_bytes(form)
            held += [torch.tensor([data.numel()]), data]
            peer = self._peers[to.stage]
            works += [dist.isend(part, group=self._group, group_dst=peer) for part in held]
        elif known is not form:
            raise SplitError(
                f"{stage} sends values of other shapes or types than before, or other numbers "
                "that are not tensors, for inputs of the same shapes. With "
                f"{setting('engine', 'distributed')} they must follow from the shapes of the "
                f"inputs: use {setting('engine', 'local')} for this model"
            )
        parts = [
            flat(t, one).to(wire_device(one, self._wire_device))
            for t, one in zip(tensors, form.tensors, strict=True)
        ]
        works += begin_send(parts, self._world, self._peers[to.stage])
        # not waited for at once: the receiver may itself be about to send to this process. The
        # oldest may be: its receiver begins to receive it before it needs any later message
        if len(self._sent) >= self._most_sent:
            self._doing.wait(True)
            self._wait_for_oldest()
            self._doing.wait(False)
        self._sent.append((works, held + parts))

    def begin_receives(self, count: int) -> None:
        """Begins those of the first `count` receives of the step that have not begun."""
        while self._begun < count:
            self._begin_receive(self._receives[self._begun])
            self._begun += 1

    def begin_ahead(self) -> None:
        """Begins receives ahead of their places."""
        if self._accelerator is not None:  # NCCL needs the place, see the module
            return
        while (
            len(self._coming) < RECEIVES_AHEAD
            and self._begun < len(self._receives)
            # without its format the receive would wait
            and self._receives[self._begun] in self._formats
        ):
            self.begin_receives(self._begun + 1)

    def _begin_receive(self, action: Action) -> None:
        """Begins to receive the message to `action`, before it is needed."""
        sender = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action not in self._formats:
            # a wait, in the one order of all processes: the sender is at this message or before it
            self._formats[action] = self._receive_format(sender)
        form = self._formats[action]
        with self._beside_compute():  # [2]
            tensors = [empty(one, self._wire_device) for one in form.tensors]
            parts = [flat(t, one) for t, one in zip(tensors, form.tensors, strict=True)]
            works = begin_receive(parts, self._world, self._peers[sender])
        self._coming[action] = _Coming(form, tensors, parts, works)

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Waits for the message if it is on its way."""
        if action.kind == "I":  # the sender does not ask which part of a backward waits
            action = action._replace(kind="B")
        if action in self._here:
            return self._here.pop(action)
        self.begin_ahead()
        form, tensors, _, works = self._coming.pop(action)
        doing.wait(True)
        for work in works:
            work.wait()  # of NCCL's it is the current stream that waits
        doing.wait(False)
        if self._accelerator is not None:
            # the side stream's memory, which this stream reads
            keep_until(self._accelerator.current_stream(self._device), tensors, self._device)
        draws: Tensor | None = tensors[-1] if action.kind == "F" else None
        message: list[Any] = unpack(form, tensors, self._device)  # [3]
        if draws is not None:
            message.pop()
            if draws.numel():
                stage = self._stages[action.stage]
                stage.continue_draws(action.microbatch, draws.tolist())
        return message

    def finish(self) -> None:
        """Waits until all is sent."""
        self._doing.wait(True)
        while self._sent:
            self._wait_for_oldest()
        self._doing.wait(False)

    def _wait_for_oldest(self) -> None:
        works, _held = self._sent.popleft()
        for work in works:
            work.wait()

    def _receive_format(self, sender: int) -> MessageFormat:
        self._doing.wait(True)
        peer = self._peers[sender]
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=self._group, group_src=peer)
        data = format_buffer(int(size))
        dist.recv(data, group=self._group, group_src=peer)
        self._doing.wait(False)
        return from_bytes(data)

    def _beside_compute(self) -> AbstractContextManager[object]:
        """Returns the side stream of GPUs as a context; see the module."""
        if self._accelerator is None:
            return _NOTHING
        return self._accelerator.using([side_stream(self._wire_device, "messages")])


_NOTHING = nullcontext()
_PLAIN = (bool, int, float, str, bytes, type(None))  # equal by their repr

# Kinds of steps whose formats are kept, such as a whole batch and the last one of an epoch.
_KINDS = 64


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
        self._routes = routes(links)
        self._world = world
        self._lanes: dict[Schedule, Lane] = {}
        self._formats: dict[int, Formats] = {}  # by the number of the kind
        self._numbers: dict[Hashable, int] = {}  # of the kinds, in the first process
        self._kinds = 0  # how many it has numbered

    def run(self, step: Step) -> list[Any]:
        """Executes this process's part of `step`; see `Engine.run`."""
        schedule, (kind, sending) = step.schedule, self._begin_kind(step)
        if kind not in self._formats:
            if len(self._formats) == _KINDS:  # in all processes, which get the same numbers
                del self._formats[next(iter(self._formats))]
            self._formats[kind] = {}
        lane = self._lanes.get(schedule)
        if lane is None:
            lane = self._lanes[schedule] = Lane.of(schedule, self._world.pipeline_rank)
        (doing,) = activity.begin_step(1)
        wire = MessageWire(self._stages, lane, self._world, self._formats[kind], doing)
        runner = ActionRunner(step, self._stages, self._routes, wire)
        try:
            runner.run_actions(_actions(lane, wire, step.meanwhile), doing)
        except BaseException:  # the others wait for this process, and are ended by its failure
            for stage in self._stages.values():
                stage.clear()
            raise
        if sending is not None:
            sending.wait()
        return runner.values if schedule.stages - 1 in self._stages else []

    def _begin_kind(self, step: Step) -> tuple[int, dist.Work | None]:
        """Returns the number of the step's kind, and what the first process must wait for."""
        number = torch.zeros(1, dtype=torch.int64)
        if self._world.pipeline_rank:
            self._broadcast(number).wait()
            return int(number), None
        kind = _kind(step)
        if kind not in self._numbers:
            if len(self._numbers) == _KINDS:  # its formats are dropped as well
                del self._numbers[next(iter(self._numbers))]
            self._numbers[kind] = self._kinds
            self._kinds += 1
        number.fill_(self._numbers[kind])
        return self._numbers[kind], self._broadcast(number)

    def _broadcast(self, number: Tensor) -> dist.Work:
        """Begins to send the first process's `number` to the others."""
        group = self._world.pipeline_group
        assert group is not None
        # not dist.broadcast, whose checks and logging take longer than the message, in each step
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return group.broadcast([number], options)


def _actions(
    lane: Lane, wire: MessageWire, meanwhile: Callable[[], None] | None
) -> Iterator[tuple[int, Action]]:
    """Yields this process's actions; begins the receives between them, and waits for all sends.

    The wait is at the end.
    """
    _, first = lane.actions[0]
    for due, action in lane.actions:
        wire.begin_receives(due)
        yield lane.number, action
        if action is first:
            wire.begin_ahead()
            if meanwhile is not None:
                meanwhile()
    wire.finish()


def order_of(schedule: Schedule, lane: int) -> list[tuple[bool, Action]]:
    """Returns the actions of a process (True), and the receives between them (False).

    A receive is the action that its message is for, see `receiver_of`.
    """
    order: list[tuple[bool, Action]] = []
    for device, action in schedule.in_one_order:
        if device == lane:
            order.append((True, action))
        elif (to := receiver_of(action, schedule.stages)) and schedule.lane_of[to.stage] == lane:
            order.append((False, to))
    return order


def messages_of(schedule: Schedule) -> int:
    """Returns the number of messages between the processes of a pipeline in one step.

    Raises:
        ScheduleError: two processes do not name the same messages in the same order.
    """
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # by sender and receiver
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for lane in range(len(schedule.lanes)):
        for is_own, action in order_of(schedule, lane):
            to = receiver_of(action, schedule.stages) if is_own else None
            if to is not None and (peer := schedule.lane_of[to.stage]) != lane:
                sent[lane, peer].append(to)
            elif not is_own:
                sender = action.stage - 1 if action.kind == "F" else action.stage + 1
                received[schedule.lane_of[sender], lane].append(action)
    for pair in sent.keys() | received.keys():
        for ends in zip_longest(sent[pair], received[pair]):
            if ends[0] != ends[1]:
                raise ScheduleError(
                    f"{schedule.name}: device {pair[0]} sends the message to {ends[0]} where "
                    f"device {pair[1]} receives {ends[1]}"
                )
    return sum(map(len, sent.values()))


def _kind(step: Step) -> Hashable:
    """Returns the properties of a step that the formats of its messages depend on."""
    inputs = tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else "")
        for microbatch in range(step.schedule.chunks)
        for leaf in leaves_of(step.source(microbatch))
    )
    return step.schedule.chunks, inputs, step.thread_state, step.training
