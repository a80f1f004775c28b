"""The measured times of a step's actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridtrain.schedule import Action, Schedule, Span, mean_costs


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
    """The time that a stage computes for a micro-batch, the mean of one step, in milliseconds."""

    forward_ms: float
    backward_ms: float


def stage_times(
    spans: Sequence[Sequence[Span]], stages: int, reduced: bool = False
) -> list[StageTimes]:
    """Returns the means of the spans of each stage; see `mean_costs` for `reduced`."""
    costs = mean_costs(spans, stages, reduced)
    return [StageTimes(f * 1e3, b * 1e3) for f, b in zip(costs["F"], costs["B"], strict=True)]
