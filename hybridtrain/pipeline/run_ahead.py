"""A bound on how far the host runs ahead of a device, which follows from the schedule.

The host queues work faster than a device does it. Memory that was sent, or has arrived, is reused
only when the streams that read it have come so far; a host that has queued a whole step would have
allocated it for every micro-batch. So a forward is queued once the device is done with the
micro-batch whose place it takes:

    a stage that holds 2:   F0 F1 B0 F2 B1 F3 ...     F3 is queued when B0 is done, so that the
                                                      device always has F2 and B1 before it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hybridtrain.accelerator import Accelerator, Event, accelerator_of
from hybridtrain.pipeline.stage import Stage
from hybridtrain.schedule import Action, Schedule, peak_in_flight

# Micro-batches beyond those that a stage holds: one is queued while another is computed.
SLACK = 1


class RunAhead:
    """Holds the host back before the forwards of one step.

    Args:
        schedule: of the step.
        stages: of this process, by their index.
        accelerator: of their devices.
    """

    def __init__(
        self, schedule: Schedule, stages: Mapping[int, Stage], accelerator: Accelerator
    ) -> None:
        self._accelerator = accelerator
        trains = schedule.trains
        held = peak_in_flight(schedule) if trains else (1,) * schedule.stages
        self._trains = trains
        self._most = {index: held[index] + SLACK for index in stages}
        self._stages = stages
        self._done: dict[int, deque[Event]] = {index: deque() for index in stages}
        self._begun = dict.fromkeys(stages, 0)
        self._finished = dict.fromkeys(stages, 0)

    def before_forward(self, index: int) -> None:
        """Waits until the stage has room for one more micro-batch."""
        self._begun[index] += 1
        while self._begun[index] - self._finished[index] > self._most[index]:
            self._done[index].popleft().synchronize()
            self._finished[index] += 1

    def after(self, action: Action) -> None:
        """Notes that the host has queued `action`."""
        if action.ends_microbatch if self._trains else action.kind == "F":
            device = self._stages[action.stage].device
            stream = self._accelerator.current_stream(device)
            self._done[action.stage].append(self._accelerator.record_event(stream))


def run_ahead(schedule: Schedule, stages: Mapping[int, Stage]) -> RunAhead | None:
    """Returns what bounds the host in a step; None where no device computes apart from it."""
    device = next(iter(stages.values())).device
    accelerator = accelerator_of(device)
    return None if accelerator is None else RunAhead(schedule, stages, accelerator)
