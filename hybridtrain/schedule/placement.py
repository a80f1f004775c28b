"""The placement of stages on the devices of a pipeline.

loop    device 0: stages 0, P, ...      the stages go round the devices
v       device 0: stages 0 and 2P-1     the second half comes back, so that the first device
                                        has the last stage as well
"""

from __future__ import annotations

from typing import Literal

Placement = Literal["loop", "v"]

# The schedules that are for one number of stages per device.
STAGES_PER_DEVICE = {"zb-h1": 1, "zb-v": 2}


def placement_of(schedule: str) -> Placement:
    """Returns the placement that the schedule of this name needs."""
    return "v" if schedule == "zb-v" else "loop"


def place_of(stage: int, devices: int, placement: Placement = "loop") -> int:
    """Returns the number of the device, among those of the pipeline, that runs `stage`."""
    turn, place = divmod(stage, devices)
    return devices - 1 - place if placement == "v" and turn % 2 else place


def stages_at(
    device: int, devices: int, stages_per_device: int, placement: Placement = "loop"
) -> list[int]:
    """Returns the stages of a device, first to last."""
    stages = range(devices * stages_per_device)
    return [stage for stage in stages if place_of(stage, devices, placement) == device]
