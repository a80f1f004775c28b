"""How far the host runs ahead of accelerators."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

import torch

from hybridtrain._base.accelerator import Accelerator, Event
from hybridtrain.schedule import Action, Schedule, peak_in_flight

# Micro-batches beyond the number that a stage holds: one is queued while another is computed.
SLACK = 1


class _OnDevice(Protocol):
    device: torch.device
    accelerator: Accelerator | None


class RunAhead:
    """A schedule-dependent limit on how far the host runs ahead of the devices in a step.

    The host queues work faster than a device executes it. Memory of messages is reused only after
    the streams that read it have caught up, so a host that queues a whole step would allocate it
    for every micro-batch. Therefore a forward is queued only after the device has finished the
    micro-batch that it replaces:

        a stage that holds 2:   F0 F1 B0 F2 B1 F3 ...     F3 is queued when B0 is done, so that the
                                                          device always has F2 and B1 before it

    Args:
        schedule: the schedule of the step.
        stages: the stages of this process, by their index; those on a CPU are not limited.
    """

    def __init__(self, schedule: Schedule, stages: Mapping[int, _OnDevice]) -> None:
        self._trains = schedule.trains
        # Without backwards a stage holds no micro-batch beyond its forward.
        held = peak_in_flight(schedule) if self._trains else (1,) * schedule.stages
        self._most = {index: held[index] + SLACK for index in stages}
        self._stages = stages
        # Lists by stage: only the thread that has the turn of the stage's device uses one.
        self._done: dict[int, deque[Event]] = {index: deque() for index in stages}
        self._begun = dict.fromkeys(stages, 0)
        self._finished = dict.fromkeys(stages, 0)

    def before_forward(self, index: int) -> None:
        """Waits until the stage has room for one more micro-batch."""
        if self._stages[index].accelerator is None:
            return
        self._begun[index] += 1
        # The deque is never empty here: the host has queued the end of all but `held` of the begun
        # micro-batches.
        while self._begun[index] - self._finished[index] > self._most[index]:
            self._done[index].popleft().synchronize()
            self._finished[index] += 1

    def after(self, action: Action) -> None:
        """Notes that the host has queued `action`."""
        # With a backward in two parts the first one frees only a part of the memory.
        if action.ends_microbatch if self._trains else action.kind == "F":
            stage = self._stages[action.stage]
            if stage.accelerator is not None:
                stream = stage.accelerator.current_stream(stage.device)
                self._done[action.stage].append(stage.accelerator.record_event(stream))
