"""The placement of a run as text: stages, layers and devices."""

from __future__ import annotations

import socket

from hybridtrain.planning.plan import Plan, table
from hybridtrain.text_table import text_table
from hybridtrain.world import World


def placement_summary(plan: Plan, world: World) -> str:
    """Returns a table of the stages and one of every process's devices; a collective call."""
    hosts = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    parameters = sum(cost.parameters for cost in plan.costs)
    head = (
        f"{_count(world.size, 'process', 'es')} x {_count(world.nb_part, 'stage')}, "
        f"{plan.schedule}, {_count(plan.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"started by {world.launcher}, {world.backend}"
    )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(hosts)
    ]
    return "\n".join([head, table(plan), *text_table(processes, 1)])


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
