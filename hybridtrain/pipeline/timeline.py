"""The measured times of a step's actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridtrain.schedule import Action, Schedule, Span


class Timeline:
    """Records the start and the end of every action of one step.

    On a CPU it reads the clock. On a GPU it records events in the stream, without a wait; `spans`
    reads them after one synchronisation.

    Attributes:
        schedule: the schedule of the step.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[torch.device]) -> None:
        self.schedule = schedule
        self._devices = devices
        self._marks: list[list[tuple[Action, Mark, Mark]]] = [[] for _ in devices]
        self._zero = [mark(device) for device in devices]

    def record(self, lane: int, action: Action, start: Mark, end: Mark) -> None:
        """Notes that `lane` ran `action` between two marks."""
        self._marks[lane].append((action, start, end))

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Returns the spans of each lane, in seconds since the start of the step."""
        lanes = []
        for device, marks, zero in zip(self._devices, self._marks, self._zero, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            lanes.append(
                tuple(Span(action, _since(zero, a), _since(zero, b)) for action, a, b in marks)
            )
        return tuple(lanes)


Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Returns the present time on `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _since(zero: Mark, end: Mark) -> float:
    if isinstance(zero, float) and isinstance(end, float):
        return end - zero
    assert isinstance(zero, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return float(zero.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class StageTimes:
    """The time that a stage computed in one step, summed over micro-batches, in milliseconds."""

    forward_ms: float
    backward_ms: float


def stage_times(spans: Sequence[Sequence[Span]], stages: int) -> list[StageTimes]:
    """Returns the sums of the spans of each stage."""
    total = {"F": [0.0] * stages, "B": [0.0] * stages}
    for lane in spans:
        for action, start, end in lane:
            total[action.kind][action.stage] += (end - start) * 1e3
    return [StageTimes(f, b) for f, b in zip(total["F"], total["B"], strict=True)]
