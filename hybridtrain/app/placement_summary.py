"""The layout of a run as text: which process has which stages, layers and devices."""

from __future__ import annotations

import socket

from hybridtrain.model import HybridModel
from hybridtrain.planning.plan import table
from hybridtrain.text_table import text_table


def placement_summary(model: HybridModel, schedule: str) -> str:
    """A table of the stages and, below it, the devices of every process; a collective call."""
    world = model.world
    places = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    parameters = sum(cost.parameters for cost in model.plan.costs)
    head = (
        f"{_count(world.size, 'process', 'es')} x {_count(world.nb_part, 'stage')}, {schedule}, "
        f"{_count(model.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"started by {world.launcher}, {world.backend}"
    )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(places)
    ]
    return "\n".join([head, table(model.plan), *text_table(processes, right_aligned=1)])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
