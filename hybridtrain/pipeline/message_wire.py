"""Messages between the processes of a pipeline, which have one device each.

Each process runs its own lane of the schedule (`forward/part_engine`). Two processes must issue
their messages to each other in the same order, because they share one queue per direction, or with
NCCL one queue for both. They use the global order that shows that the schedule cannot deadlock
(`Schedule.in_one_order`). Each process walks through the whole order:

    in one order   F0@0        F0@1   F1@0        B0@1        B0@0   F1@1   ...
    process 0      F0 send            F1 send     receive B0  B0             stages 0, 2, ...
    process 1      receive F0  F0     receive F1  B0 send            F1      stages 1, 3, ...

A process runs its own actions and starts sending each result. At another process's action with a
result for this process, it starts receiving the result and continues. So both ends of a message are
at the same place in one order. A process waits only for arrivals, formats and the oldest of many
sends, and the other end starts each of these at its place in the order or earlier. So the process
that is furthest behind can always continue, and a circular wait is impossible.

ProcessGroupNCCL makes a message wait for all work queued on the current stream when the message
starts. A receive started from the compute stream would wait for earlier actions, and delay the
action that needs it. So receives start from a side stream, into memory of that stream, and the
compute stream waits where it uses the value. A send starts from the compute stream, right after the
work that produces its value.

    compute stream      F0             F1 waits for its message alone
    side stream         [2]
    NCCL's stream       F1's message

With gloo, which has separate queues for the two directions, a process starts the next few receives
early, in the same order. A message is sent immediately if its receive has started; otherwise it
first waits for a handshake between the two processes while both compute. Starting a receive takes
about as long as a send, so early receives start where a process waits for a message.

A process that has run its last action does not wait for the others. If it ends before them, as in
ZB-V, it can begin the next forward or the optimizer step while they finish.

A receiver must know the sizes of a message in advance. They follow from the inputs, which the first
process has. It numbers the kinds of inputs. Before a step, a first message goes from each process
to the next, with the number of its kind, the number of its micro-batches and a digest of the batch.
The first step of a kind also sends the formats of its messages (`messages`); later steps do not.

    process of stage s       [1] send: pack, format if new, numbers
    process of stage s+1     [2] begin_receive: format if new, memory     [3] receive: wait, unpack
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.tensors import storage_id
from hybridtrain._base.text_table import counted
from hybridtrain.errors import BatchError, ScheduleError, SplitError, argument, setting
from hybridtrain.launch import LaneActivity
from hybridtrain.pipeline.agreement import BatchCheck
from hybridtrain.pipeline.engine import Step
from hybridtrain.pipeline.messages import (
    MessageFormat,
    dense,
    empty,
    format_buffer,
    from_bytes,
    pack,
    to_bytes,
    unpack,
    wire_device,
)
from hybridtrain.pipeline.point_to_point import Pending, begin_receive, begin_send, wait
from hybridtrain.pipeline.transfer import keep_until, side_stream
from hybridtrain.schedule import Action, Schedule, receiver_of
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.stage import ForwardStage

RECEIVES_AHEAD = 4
"""The number of pending messages up to which a process starts further receives early.

Each receive takes the memory of a message."""

Formats = dict[Action, MessageFormat]
"""The formats of the messages to each action of a step."""


class _Coming(NamedTuple):
    """A pending incoming message; its tensors are complete when the works are done.

    Attributes:
        form: the format of the message.
        tensors: the tensors of the message.
        parts: the memory of the tensors, which must live until the works are done.
        works: the receives.
    """

    form: MessageFormat
    tensors: list[Tensor]
    parts: list[Tensor]
    works: list[Pending]


class Lane(NamedTuple):
    """The part of a schedule that a process runs.

    Attributes:
        number: the index of the lane in the schedule.
        actions: each preceded by the number of receives that must start before it runs.
        receives: the actions that need messages from other processes, in message order.
        peers: the process of each stage of the pipeline.
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
                # All messages from other processes, also those for an action much later: the
                # sender's queue has them in this order.
                receives.append(action)
        # a process has one device, so one lane, whose number is its rank in the pipeline's group
        peers = tuple(schedule.lane_of[stage] for stage in range(schedule.stages))
        return cls(number, tuple(actions), tuple(receives), peers)


class MessageWire:
    """Sends values to other processes, for one step; see `Wire`.

    Args:
        stages: the stages of this process.
        lane: the lane of this process.
        world: the processes.
        formats: the known message formats; the first step that sends messages fills it.
        doing: notes that a send waits for earlier sends.
        batch_check: its result is shared before the first message from another process is awaited,
            or at the end of the step.
    """

    def __init__(
        self,
        stages: Mapping[int, ForwardStage],
        lane: Lane,
        world: World,
        formats: Formats,
        doing: LaneActivity,
        batch_check: BatchCheck | None = None,
    ) -> None:
        self._stages = stages
        self._peers = lane.peers
        self._receives = lane.receives
        # A count is enough, because receives start in the one order only.
        self._begun = 0  # the number of started receives
        self._formats = formats
        self._doing = doing
        self._batch_check = batch_check
        self._world = world
        self._device = world.devices[0]
        self._wire_device = world.wire_device
        self._accelerator = accelerator_of(self._wire_device)  # None with gloo
        # Messages between two stages of this process, as in ZB-V, which needs no copy.
        self._here: dict[Action, list[Any]] = {}
        self._coming: dict[Action, _Coming] = {}
        # tensors must live until they are sent
        self._sent: deque[tuple[list[Pending], list[Tensor]]] = deque()
        # without backwards, sent tensors would otherwise stay until the end of a long batch; a sent
        # one that is offloaded stays until it is sent
        self._most_sent = (1 if any(s.offload for s in stages.values()) else 4) * len(lane.peers)

    def send(self, to: Action, message: list[Any]) -> None:
        """Starts sending the message, or keeps it for a stage of this process."""
        if to.stage in self._stages:
            self._here[to] = message
            return
        stage = self._stages[to.stage - 1 if to.kind == "F" else to.stage + 1]
        expected = self._formats.get(to)
        form, tensors = pack(message, to.kind == "F", expected)  # [1]
        works: list[Pending] = []
        held: list[Tensor] = []
        if expected is None:
            # ahead of the numbers, in the same queue: the receiver takes it in the same place
            self._formats[to] = form
            works, held = begin_send_format(form, self._world, self._peers[to.stage])
        elif expected is not form and to.kind == "B":
            raise SplitError(
                f"{stage} sends gradients of other values than before: the loss, or a later stage, "
                "has begun or stopped to use a value of an earlier one. With "
                f"{setting('engine', 'distributed')} it must use the same in each step for inputs "
                f"of the same shapes: multiply it by 0 instead, or use {setting('engine', 'local')}"
            )
        elif expected is not form:
            raise SplitError(
                f"{stage} sends values of different shapes or types than before, or different "
                "non-tensor values, for inputs of the same shapes. With "
                f"{setting('engine', 'distributed')} they must depend only on the shapes of the "
                f"inputs: use {setting('engine', 'local')} for this model"
            )
        # With gloo and a GPU this copy blocks the host, so the numbers are complete when the send
        # starts.
        parts = [
            dense(t, tensor_format).to(wire_device(tensor_format, self._wire_device))
            for t, tensor_format in zip(tensors, form.tensors, strict=True)
        ]
        if to.kind == "F":
            # The next micro-batch may change a buffer before it is sent.
            for place, (t, part) in enumerate(zip(tensors, parts, strict=True)):
                if not t.requires_grad and storage_id(part) in self._of_buffers:
                    parts[place] = part.clone()
        works += begin_send(parts, self._world, self._peers[to.stage])
        # do not wait immediately: the receiver may itself be about to send to this process. Waiting
        # for the oldest send is safe: its receiver starts receiving it before it needs any later
        # message
        if len(self._sent) >= self._most_sent:
            self._doing.wait(True)
            self._wait_for_oldest()
            self._doing.wait(False)
        self._sent.append((works, held + parts))

    @cached_property
    def _of_buffers(self) -> set[Any]:
        """The memories of the buffers of this process's stages."""
        stages = self._stages.values()
        return {storage_id(buffer) for stage in stages for buffer in stage.module.buffers()}

    def begin_receives(self, count: int) -> None:
        """Starts the receives among the first `count` of the step that have not started."""
        while self._begun < count:
            self._begin_receive(self._receives[self._begun])
            self._begun += 1

    def _begin_ahead(self) -> None:
        """Starts receives before their place in the order."""
        if self._accelerator is not None:  # NCCL needs the exact order, see the module
            return
        while (
            len(self._coming) < RECEIVES_AHEAD
            and self._begun < len(self._receives)
            # without its format the receive would wait
            and self._receives[self._begun] in self._formats
        ):
            self.begin_receives(self._begun + 1)

    def _begin_receive(self, action: Action) -> None:
        """Starts receiving the message to `action`, before it is needed."""
        sender = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action not in self._formats:
            # a wait, in the one order of all processes: the sender is at this message or before it
            self._formats[action] = self._receive_format(sender)
        form = self._formats[action]
        with self._beside_compute():  # [2]
            tensors = [empty(tensor_format, self._wire_device) for tensor_format in form.tensors]
            # Views: what arrives in them is in `tensors`.
            parts = [
                dense(t, tensor_format)
                for t, tensor_format in zip(tensors, form.tensors, strict=True)
            ]
            works = begin_receive(parts, self._world, self._peers[sender])
        self._coming[action] = _Coming(form, tensors, parts, works)

    def receive(self, action: Action, doing: LaneActivity) -> list[Any]:
        """Waits for the message if it is on its way."""
        if action.kind == "I":  # senders do not distinguish the parts of a backward
            action = action._replace(kind="B")
        # Before `_share_result`: this is no wait for another process.
        if action in self._here:
            return self._here.pop(action)
        self._begin_ahead()
        # The result of the batch check is on its way while this process waits anyway.
        self._share_result()
        doing.wait(True)
        form, tensors, _, works = self._coming.pop(action)
        # With NCCL the compute stream waits for this message alone. With gloo the host waits.
        wait(works)
        doing.wait(False)
        if self._accelerator is not None:
            # the side stream's memory, which this stream reads
            keep_until(self._accelerator.current_stream(self._device), tensors, self._device)
        message: list[Any] = unpack(form, tensors, self._device)  # [3]
        return message

    def finish(self) -> None:
        """Waits until all messages are sent."""
        self._share_result()
        # For the watchdog: a late receiver is to blame, not this process.
        self._doing.wait(True)
        while self._sent:
            self._wait_for_oldest()
        self._doing.wait(False)

    def _share_result(self) -> None:
        if self._batch_check is not None:
            self._batch_check.share_result()

    def _wait_for_oldest(self) -> None:
        works, _held = self._sent.popleft()
        # `_held` lives until here: gloo reads the memory until the send is done.
        wait(works)

    def _receive_format(self, sender: int) -> MessageFormat:
        self._doing.wait(True)
        form = receive_format(self._world, self._peers[sender])
        self._doing.wait(False)
        return form

    def _beside_compute(self) -> AbstractContextManager[object]:
        """Returns the side stream of GPUs as a context; see the module."""
        if self._accelerator is None:
            return _NOTHING
        return self._accelerator.using([side_stream(self._wire_device, "messages")])


_NOTHING = nullcontext()

# Kinds of steps with stored formats, such as a full batch and the last batch of an epoch.
_KINDS = 64


def begin_send_format(
    form: MessageFormat, world: World, peer: int
) -> tuple[list[Pending], list[Tensor]]:
    """Starts sending a format; returns the sends, and tensors that must live until they end."""
    data = to_bytes(form)
    held = [torch.tensor([data.numel()]), data]
    # Two sends, because the receiver must know a size before it can receive the format itself.
    return [work for part in held for work in begin_send([part], world, peer)], held


def receive_format(world: World, peer: int) -> MessageFormat:
    """Returns the format that another process sends by `begin_send_format`."""
    size = torch.zeros(1, dtype=torch.int64)
    wait(begin_receive([size], world, peer))
    data = format_buffer(int(size))
    wait(begin_receive([data], world, peer))
    return from_bytes(data)


class FirstMessage:
    """The message with which a step begins: from each process of a pipeline to the next.

    It has the number of the step's kind, the number of micro-batches, and what `BatchCheck.merge`
    compares. A send costs the first process less time than a broadcast, and later stages need the
    number later.

    Args:
        world: the processes of the pipeline.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        # sent until the step has waited for it
        self._message = torch.zeros(2 + len(BatchCheck.NO_BATCH), dtype=torch.int64)
        self._numbers: dict[Hashable, int] = {}  # of the kinds, in the first process
        self._kinds = 0  # how many it has numbered

    def pass_on(self, step: Step, kind: Hashable = None) -> tuple[int, list[Pending]]:
        """Returns the number of the step's kind, and the send of the message, if any.

        Args:
            step: the step.
            kind: the kind of the step, in the first process.

        Raises:
            BatchError: the first process has a different number of micro-batches, so this one would
                wait for messages that nobody sends.
        """
        world, rank, chunks = self._world, self._world.pipeline_rank, step.schedule.chunks
        numbers = self._message.numpy()  # tensor operations take longer, between two steps
        if rank:
            # Written into the memory of `numbers`, which is the same.
            wait(begin_receive([self._message], world, rank - 1))
        else:
            numbers[:2] = self._number_of(kind), chunks
            numbers[2:] = BatchCheck.NO_BATCH
        if step.batch_check is not None:
            numbers[2:] = step.batch_check.merge(numbers[2:].tolist())
        is_last = rank + 1 == world.processes_per_replica
        sending = [] if is_last else begin_send([self._message], world, rank + 1)
        number, chunks_of_first = numbers[:2].tolist()
        if chunks_of_first != chunks:
            raise BatchError(
                f"this process has {counted(chunks, 'micro-batch', 'es')} in a step, and the first "
                f"one of its pipeline has {chunks_of_first}: with "
                f"{setting('engine', 'distributed')}, a process that does not read a batch expects "
                f"as many samples as the sampler selects. Let {argument('collate')} return as many "
                "samples, or pass your own DataLoader to OwnLoader, which tells all processes the "
                "number"
            )
        return number, sending

    def _number_of(self, kind: Hashable) -> int:
        """Returns the number of a kind, in the first process."""
        if kind not in self._numbers:
            # In order of arrival, as `formats_of` does in all processes: they must drop the same
            # kind.
            if len(self._numbers) == _KINDS:  # its formats are dropped too
                del self._numbers[next(iter(self._numbers))]
            self._numbers[kind] = self._kinds
            self._kinds += 1
        return self._numbers[kind]


def formats_of(known: dict[int, Formats], kind: int) -> Formats:
    """Returns the formats of the messages of a kind; forgets those of the oldest of many."""
    if kind not in known:
        if len(known) == _KINDS:  # in all processes, which get the same numbers
            del known[next(iter(known))]
        known[kind] = {}
    return known[kind]


def order_of(schedule: Schedule, lane: int) -> list[tuple[bool, Action]]:
    """Returns the actions of a process (True), and the receives between them (False).

    A receive is the action that needs its message, see `receiver_of`.
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
        ScheduleError: two processes issue different messages, or in different orders.
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
                    f"{schedule.name}: device {pair[0]} sends the message for {ends[0]} where "
                    f"device {pair[1]} expects the one for {ends[1]}: order their "
                    "actions alike"
                )
    return sum(map(len, sent.values()))
