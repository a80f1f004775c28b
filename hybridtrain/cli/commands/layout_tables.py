"""Tables of a layout: the stages of a plan, and the hosts and devices of the processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hybridtrain._base.text_table import Block, counted, text_table
from hybridtrain.partitioning import Plan, table
from hybridtrain.world import World


def placement_tables(plan: Plan, world: World) -> Block:
    """Returns tables of the stages and of the devices of all processes; a collective call."""
    hosts = world.gather((socket.gethostname(), [str(device) for device in world.devices]))
    how = f"launcher {world.launcher}, backend {world.backend}"
    if world.fixed_replicas is not None:
        how = f"{counted(world.fixed_replicas, 'logical replica')}, {how}"
    return layout_tables(plan, hosts, how)


def layout_tables(plan: Plan, hosts: Sequence[tuple[str, list[str]]], how: str) -> Block:
    """Returns tables of the stages, and of the hosts and devices of the processes."""
    parameters = sum(cost.parameters for cost in plan.costs)
    head = (
        f"{counted(len(hosts), 'process', 'es')} x {counted(len(plan.stages), 'stage')}, "
        f"{plan.schedule}, {counted(plan.chunks, 'micro-batch', 'es')}, {parameters:,} parameters, "
        f"{how}"
    )
    processes = [("rank", "host", "devices, by stage")]
    processes += [
        (str(rank), host, " ".join(devices)) for rank, (host, devices) in enumerate(hosts)
    ]
    return Block("\n".join([head, table(plan), *text_table(processes, 1)]))
