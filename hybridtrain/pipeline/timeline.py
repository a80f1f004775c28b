"""The measured times of a step's actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridtrain.accelerator import Event, accelerator_of
from hybridtrain.pipeline.clocks import clock_name, now
from hybridtrain.schedule import Action, Schedule, Span, mean_backwards, mean_costs


class Timeline:
    """Records the start and the end of every action of one step.

    On a CPU it reads the clock. On a GPU it records events in the stream, without a wait; `spans`
    reads them after one synchronisation.

    Args:
        schedule: the schedule of the step.
        devices: of its lanes.
        peers: the processes that have the other lanes, if there are several.

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
        _align(devices)
        self._zero = [mark(device) for device in devices]
        self._began = now()
        self._spans: tuple[tuple[Span, ...], ...] | None = None

    def record(self, lane: int, action: Action, start: Mark, end: Mark) -> None:
        """Notes that `lane` ran `action` between two marks."""
        self._marks[lane].append((action, start, end))

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of each lane, in seconds since the start of the step.

        The first call is a collective one where lanes are in several processes. All count from the
        start of the process that began first. On other nodes that is known to half the time of a
        message, see `clocks`.
        """
        if self._spans is None:
            self._spans = self._own_spans()
            if self._peers is not None:
                self._spans = self._spans_of_all(self._peers)
        return self._spans

    def _spans_of_all(self, peers: LanePeers) -> tuple[tuple[Span, ...], ...]:
        assert self._spans is not None
        lanes = peers.gather([_Lane(clock_name(), self._began, self._spans[peers.own_lane])])
        ahead = [0.0] * len(lanes)
        if len({lane.clock for lane in lanes}) > 1:
            ahead = peers.gather([peers.seconds_ahead()])
        began = [lane.began - seconds for lane, seconds in zip(lanes, ahead, strict=True)]
        return tuple(
            tuple(
                Span(Action(*action), start + own - min(began), end + own - min(began))
                for action, start, end in lane.spans
            )
            for lane, own in zip(lanes, began, strict=True)
        )

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

    clock: str
    began: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class LanePeers:
    """The processes of a pipeline with a lane each; all call its functions together.

    Attributes:
        own_lane: the lane that is in this process.
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
    forward = mean_costs(spans, stages, reduced)["F"]
    backward = mean_backwards(spans, stages, reduced)
    return [StageTimes(f * 1e3, b * 1e3) for f, b in zip(forward, backward, strict=True)]
