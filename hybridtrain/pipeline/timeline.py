"""The measured times of a step's actions, for all processes on one clock.

The processes of a node share one monotonic clock. Clocks of other nodes have another origin; the
offset is measured as in NTP (RFC 5905, section 8), from the fastest of several requests:

    this process      asked |---------------| answered      here  = (asked + answered) / 2
    the first one             \\__ read __/                 there = what it read

The error is at most half the time of that request, about 0.1 ms on Ethernet.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hybridtrain._base.accelerator import Event, accelerator_of
from hybridtrain.schedule import (
    Action,
    CopySpan,
    Held,
    Schedule,
    Span,
    SpansWithCopies,
    copies_of,
    mean_backwards,
    mean_costs,
    window,
)
from hybridtrain.world import World

_QUESTIONS = 10


class Timeline:
    """Records the start and the end of every action of one step.

    On a CPU it reads the clock. On a GPU it records events in the stream, without a wait; `spans`
    reads them after one synchronisation.

    Args:
        schedule: the schedule of the step.
        devices: the devices of its lanes.
        peers: the processes that run the other lanes, if there are several.

    Attributes:
        schedule: the schedule of the step.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Sequence[torch.device],
        peers: LanePeers | None = None,
    ) -> None:
        self.schedule = schedule
        self._devices = devices
        self._peers = peers
        self._marks: list[list[tuple[Action, Mark, Mark]]] = [[] for _ in devices]
        self._computed: dict[Action, tuple[Mark, Mark]] = {}
        self._copied: list[list[tuple[Held, bool, Mark, Mark]]] = [[] for _ in devices]
        _align(devices)
        if peers is not None and (accelerator := accelerator_of(devices[peers.own_lane])):
            # The origins of the events and of the compared clock must be the same time.
            accelerator.synchronize(devices[peers.own_lane])
        # Right before `_began`, with nothing between them that could wait.
        self._zero = marks(devices)
        self._began = now()
        self._spans: tuple[tuple[Span, ...], ...] | None = None
        self._reductions: dict[Action, float] = {}
        self._behind = 0.0  # how much later this process started than the first process

    def record(
        self, lane: int, action: Action, start: Mark, end: Mark, computed: Mark | None = None
    ) -> None:
        """Records that `lane` ran `action` between two marks.

        Args:
            lane: the index of the lane.
            action: the action.
            start: the start of the action.
            end: the end of the action.
            computed: the time when only its all-reduce was left, if it has one.
        """
        # From the thread that has the turn of the lane's device; lists of different lanes share
        # nothing.
        self._marks[lane].append((action, start, end))
        if computed is not None:
            self._computed[action] = (computed, end)

    def record_copy(self, lane: int, held: Held, back: bool, start: Mark, end: Mark) -> None:
        """Records that activations of `lane` were copied to the host, or `back`.

        Args:
            lane: the index of the lane.
            held: the stage and the micro-batch.
            back: whether they came back.
            start: the start of the copy.
            end: the end of the copy.
        """
        self._copied[lane].append((held, back, start, end))

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of each lane, in seconds since the start of the step.

        With offloaded activations, these are `SpansWithCopies`.

        The first call is a collective if lanes are in several processes. Times count from the start
        of the process that started first; across nodes, this is exact to half the time of a
        message.
        """
        if self._spans is None:
            read_timelines([self])
        assert self._spans is not None
        return self._spans

    @property
    def reductions(self) -> Mapping[Action, float]:
        """The seconds at the end of actions in which they only waited for the all-reduce."""
        self.spans()
        return self._reductions

    def computing(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans without the waits for the all-reduce."""
        spans = self.spans()
        if not self._reductions:
            return spans
        computing = tuple(
            tuple(
                Span(action, start, end - self.reductions.get(action, 0.0))
                for action, start, end in lane
            )
            for lane in spans
        )
        copies = copies_of(spans)
        return SpansWithCopies.of(computing, copies) if copies else computing

    def _read_own(self) -> None:
        # Synchronizes the devices, so it comes after the step.
        self._spans = self._own_spans()
        for action, (computed, end) in self._computed.items():
            self._reductions[action] = max(0.0, _since(computed, end))

    def _told(self, peers: LanePeers) -> _LaneSpans:
        """Returns the data about this process's lane for the other processes."""
        assert self._spans is not None
        copies = copies_of(self._spans)
        own = copies[peers.own_lane] if copies else ()
        return _LaneSpans(self._began, self._spans[peers.own_lane], self._reductions, own)

    def _put_together(
        self, peers: LanePeers, lanes: Sequence[_LaneSpans], ahead: Sequence[float]
    ) -> None:
        """Stores the lanes of all processes; their clocks are `ahead` by so many seconds."""
        began = [lane.began - seconds for lane, seconds in zip(lanes, ahead, strict=True)]
        self._behind = began[peers.own_lane] - min(began)
        self._spans = tuple(
            tuple(
                # On the clock of the first process, and from the start of whichever began first.
                Span(
                    Action(*action),
                    start + start_of_lane - min(began),
                    end + start_of_lane - min(began),
                )
                for action, start, end in lane.spans
            )
            for lane, start_of_lane in zip(lanes, began, strict=True)
        )
        copies = [
            [
                CopySpan(*copy[:3], *(time + start_of_lane - min(began) for time in copy[3:]))
                for copy in lane.copies
            ]
            for lane, start_of_lane in zip(lanes, began, strict=True)
        ]
        if any(copies):
            self._spans = SpansWithCopies.of(self._spans, copies)
        self._reductions = {
            Action(*action): wait for lane in lanes for action, wait in lane.reductions.items()
        }

    def _own_spans(self) -> tuple[tuple[Span, ...], ...]:
        lanes, copies = [], []
        for device, marks, copied, zero in zip(
            self._devices, self._marks, self._copied, self._zero, strict=True
        ):
            if (accelerator := accelerator_of(device)) is not None:
                # `elapsed_time` raises for an event that the device has not reached.
                accelerator.synchronize(device)
            lanes.append(
                tuple(Span(action, _since(zero, a), _since(zero, b)) for action, a, b in marks)
            )
            copies.append(
                [
                    CopySpan(*held, back, _since(zero, a), _since(zero, b))
                    for held, back, a, b in copied
                ]
            )
        return SpansWithCopies.of(lanes, copies) if any(copies) else tuple(lanes)

    @property
    def own_lanes(self) -> range:
        """The lanes that are in this process."""
        if self._peers is None:
            return range(len(self._devices))
        return range(self._peers.own_lane, self._peers.own_lane + 1)

    def window(self, lane: int, since: Mark) -> tuple[float, float]:
        """Returns when the first action of all lanes started and the last action ended.

        Args:
            lane: a lane of this process.
            since: a mark on its device, the origin of the times.
        """
        begin, end = window(self.spans())
        zero = _since(since, self._zero[lane]) - self._behind
        return zero + begin, zero + end


class Phases:
    """The phases of a step around its actions, as this process's devices see them.

    On a GPU their ends are events in its stream.

    Args:
        devices: the devices to measure.

    Attributes:
        begin: the start of the step, a mark on each device.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.begin = marks(devices)
        self._devices = devices
        self._ends: dict[str, list[Mark]] = {}

    def end(self, name: str) -> None:
        """Records that the phase `name` ends, and the next phase starts."""
        self._ends[name] = marks(self._devices)

    def ends(self, device: int) -> dict[str, float]:
        """Returns when each phase ended on a device, in seconds since the start of the step."""
        if accelerator := accelerator_of(self._devices[device]):
            accelerator.synchronize(self._devices[device])
        begin = self.begin[device]
        return {name: _since(begin, marks[device]) for name, marks in self._ends.items()}


def read_timelines(timelines: Sequence[Timeline]) -> None:
    """Reads the timelines of one step's batches; processes compare their clocks once.

    A collective call if lanes are in several processes.
    """
    for timeline in timelines:
        timeline._read_own()
    peers = timelines[0]._peers
    if peers is None:
        return
    measured = [(clock_name(), [timeline._told(peers) for timeline in timelines])]
    of_processes = peers.gather(measured)
    ahead = [0.0] * len(of_processes)
    # On one node, as in most runs, the clocks need no comparison. All processes see the same set,
    # so they agree.
    if len({clock for clock, _ in of_processes}) > 1:
        ahead = peers.gather([peers.seconds_ahead()])
    for number, timeline in enumerate(timelines):
        timeline._put_together(peers, [lanes[number] for _, lanes in of_processes], ahead)


class _LaneSpans(NamedTuple):
    """The spans of a lane in another process, their origin, its `reductions` and its copies."""

    began: float
    spans: tuple[Span, ...]
    reductions: Mapping[Action, float]
    copies: tuple[CopySpan, ...] = ()


@dataclass(frozen=True)
class LanePeers:
    """The processes of a pipeline with one lane each; its functions are collective calls.

    Attributes:
        own_lane: the lane of this process.
        gather: returns the lists of all processes as one.
        seconds_ahead: how far this process's clock is ahead of the first process's.
    """

    own_lane: int
    gather: Callable[[list[Any]], list[Any]]
    seconds_ahead: Callable[[], float]


Mark = float | Event


def mark(device: torch.device) -> Mark:
    """Returns the present time on `device`."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return now()
    return accelerator.record_event(accelerator.current_stream(device), timing=True)


def marks(devices: Sequence[torch.device]) -> list[Mark]:
    """Returns the present time on each device; lanes on the same device have the same time.

    Otherwise a thread that waits between two readings would shift the lanes.
    """
    time_on = {device: mark(device) for device in dict.fromkeys(devices)}
    return [time_on[device] for device in devices]


def _align(devices: Iterable[torch.device]) -> None:
    """Synchronizes all devices, so that pending work does not shift their origins."""
    accelerators = {device: accelerator_of(device) for device in devices}
    streams = {
        device: (accelerator, accelerator.current_stream(device))
        for device, accelerator in accelerators.items()
        if accelerator is not None
    }
    if len(streams) > 1:
        events = [accelerator.record_event(queue) for accelerator, queue in streams.values()]
        for _, stream in streams.values():
            for event in events:
                # Every stream waits for every other one: all origins come after the last of them.
                stream.wait_event(event)


def _since(zero: Mark, end: Mark) -> float:
    if isinstance(zero, float) and isinstance(end, float):
        return end - zero
    assert not isinstance(zero, float)
    assert not isinstance(end, float)
    # Milliseconds, as CUDA's events measure.
    return float(zero.elapsed_time(end)) / 1e3


def measured_ms(spans: Sequence[Sequence[Span]], stages: int) -> list[tuple[float, float]]:
    """Returns the mean milliseconds of a forward and a whole backward of each stage in one step."""
    forward = mean_costs(spans, stages)["F"]
    backward = mean_backwards(spans, stages)
    return [(f * 1e3, b * 1e3) for f, b in zip(forward, backward, strict=True)]


def now() -> float:
    """Returns the seconds of the clock of this process that timelines read."""
    return time.perf_counter()


def clock_name() -> str:
    """Returns a name that is equal for processes that share a clock."""
    boot = clock = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # a container may have its own clock
        clock = os.readlink("/proc/self/ns/time")
    return f"{socket.gethostname()} {boot} {clock}"


def seconds_ahead(world: World) -> float:
    """Returns how far this process's clock is ahead of its pipeline's first process.

    A collective call of the pipeline's processes; 0 in the first one.
    """
    # The group of objects, whose messages are in CPU memory: no stream delays an answer.
    group, ranks = world.pipeline_object_group, world.processes_per_replica
    answer = torch.zeros(1, dtype=torch.float64)
    if world.pipeline_rank == 0:
        # One after another: another process's question would add to the time of this one's.
        for other in range(1, ranks):
            for _ in range(_QUESTIONS):
                dist.recv(answer, group=group, group_src=other)
                answer[0] = now()
                dist.send(answer, group=group, group_dst=other)
        return 0.0
    fastest = ahead = float("inf")
    for _ in range(_QUESTIONS):
        asked = now()
        dist.send(answer, group=group, group_dst=0)
        dist.recv(answer, group=group, group_src=0)
        answered = now()
        # The fastest was delayed least, so its error bound is the smallest.
        if answered - asked < fastest:
            fastest, ahead = answered - asked, (asked + answered) / 2 - float(answer)
    return ahead
