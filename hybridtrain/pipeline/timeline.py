"""The measured times of a step's actions."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hybridtrain.accelerator import Event, accelerator_of
from hybridtrain.schedule import Action, Schedule, Span, mean_costs


class Timeline:
    """Records the start and the end of every action of one step.

    On a CPU it reads the clock. On a GPU it records events in the stream, without a wait; `spans`
    reads them after one synchronisation.

    Args:
        schedule: the schedule of the step.
        devices: of its lanes.
        gather: where lanes are in several processes, returns the lists of all of them as one.
        own_lane: the lane that is in this process then.

    Attributes:
        schedule: the schedule of the step.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Sequence[torch.device],
        gather: Callable[[list[_Lane]], list[_Lane]] | None = None,
        own_lane: int = 0,
    ) -> None:
        self.schedule = schedule
        self._devices = devices
        self._gather = gather
        self._own_lane = own_lane
        self._marks: list[list[tuple[Action, Mark, Mark]]] = [[] for _ in devices]
        _align(devices)
        self._zero = [mark(device) for device in devices]
        self._began = time.perf_counter()
        self._spans: tuple[tuple[Span, ...], ...] | None = None

    def record(self, lane: int, action: Action, start: Mark, end: Mark) -> None:
        """Notes that `lane` ran `action` between two marks."""
        self._marks[lane].append((action, start, end))

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of each lane, in seconds since the start of the step.

        The first call is a collective one where lanes are in several processes. Processes of a node
        have one clock; on other nodes the step is taken to have begun at the same time.
        """
        if self._spans is None:
            self._spans = self._own_spans()
            if self._gather is not None:
                lane = _Lane(socket.gethostname(), self._began, self._spans[self._own_lane])
                self._spans = _aligned(self._gather([lane]))
        return self._spans

    def _own_spans(self) -> tuple[tuple[Span, ...], ...]:
        lanes = []
        for device, marks, zero in zip(self._devices, self._marks, self._zero, strict=True):
            if (accelerator := accelerator_of(device)) is not None:
                accelerator.synchronize(device)
            lanes.append(
                tuple(Span(action, _since(zero, a), _since(zero, b)) for action, a, b in marks)
            )
        return tuple(lanes)


class _Lane(NamedTuple):
    """The spans of a lane in another process, and what they count from."""

    host: str
    began: float
    spans: tuple[Span, ...]


def _aligned(lanes: Sequence[_Lane]) -> tuple[tuple[Span, ...], ...]:
    """Returns the spans of all lanes, counted from the first process that began, of each node."""
    first: dict[str, float] = {}
    for lane in lanes:
        first[lane.host] = min(lane.began, first.get(lane.host, lane.began))
    return tuple(
        tuple(
            Span(
                Action(*action),
                start + lane.began - first[lane.host],
                end + lane.began - first[lane.host],
            )
            for action, start, end in lane.spans
        )
        for lane in lanes
    )


Mark = float | Event


def mark(device: torch.device) -> Mark:
    """Returns the present time on `device`."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return time.perf_counter()
    return accelerator.record_event(accelerator.current_stream(device), timing=True)


def _align(devices: Iterable[torch.device]) -> None:
    """Has all devices begin together: their zeros would be apart by what each has still to do."""
    accelerators = {device: accelerator_of(device) for device in devices}
    streams = {
        device: (accelerator, accelerator.current_stream(device))
        for device, accelerator in accelerators.items()
        if accelerator is not None
    }
    if len(streams) > 1:
        events = [accelerator.record_event(own) for accelerator, own in streams.values()]
        for _, stream in streams.values():
            for event in events:
                stream.wait_event(event)


def _since(zero: Mark, end: Mark) -> float:
    if isinstance(zero, float) and isinstance(end, float):
        return end - zero
    assert not isinstance(zero, float)
    assert not isinstance(end, float)
    return float(zero.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class StageTimes:
    """The time that a stage computes for a micro-batch, the mean of one step, in milliseconds."""

    forward_ms: float
    backward_ms: float


def stage_times(
    spans: Sequence[Sequence[Span]], stages: int, reduced: bool = False
) -> list[StageTimes]:
    """Returns the means of the spans of each stage; see `mean_costs` for `reduced`."""
    costs = mean_costs(spans, stages, reduced)
    return [StageTimes(f * 1e3, b * 1e3) for f, b in zip(costs["F"], costs["B"], strict=True)]
