"""Ranks, sizes and groups of processes.

    pp, mp    the processes of one pipeline; mp is the same, as there is no tensor parallelism
    dp, rdp   the processes that have the same stages, one for each replica
    tp        this process alone

With all stages in one process (`engine="local"`), pp and mp are this process alone too.
"""

from __future__ import annotations

from enum import Enum
from typing import cast

import torch
import torch.distributed as dist

from hybridtrain.smp.runtime import current


class CommGroup(Enum):
    """The processes that a call concerns."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The processes that a rank is counted over: all of them, or those of a group."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


def rank() -> int:
    """Returns the number of this process among all."""
    return current().world.rank


def size() -> int:
    """Returns the number of processes."""
    return current().world.size


def local_rank() -> int:
    """Returns the number of this process on its node."""
    return current().launch.local_rank


def local_size() -> int:
    """Returns the number of processes on this node."""
    return current().launch.local_size


def pp_rank() -> int:
    """Returns the number of this process in its pipeline."""
    return current().world.pipeline_rank


def pp_size() -> int:
    """Returns the number of processes of a pipeline."""
    return current().world.processes_per_replica


mp_rank, mp_size = pp_rank, pp_size


def dp_rank() -> int:
    """Returns the number of this process's replica, by which data are divided."""
    return current().world.replica


def dp_size() -> int:
    """Returns the number of replicas."""
    return current().world.replicas


rdp_rank, rdp_size = dp_rank, dp_size


def tp_rank() -> int:
    """Returns 0: there is no tensor parallelism."""
    current()
    return 0


def tp_size() -> int:
    """Returns 1: there is no tensor parallelism."""
    current()
    return 1


def device() -> torch.device:
    """Returns the device of this process's first stage; not in smp 1.x."""
    return current().world.devices[0]


def members(group: CommGroup | RankType) -> list[int]:
    """Returns the ranks of the processes of a group, in the order of their ranks in it."""
    world = current().world
    kind = group.value
    if kind == "world":
        return list(range(world.size))
    if kind == "tp":
        return [world.rank]
    if kind in ("mp", "pp"):
        places = range(world.processes_per_replica)
        return [world.rank_of(world.replica, place) for place in places]
    return [world.rank_of(replica, world.pipeline_rank) for replica in range(world.replicas)]


def object_group(group: CommGroup) -> dist.ProcessGroup | None:
    """Returns the process group for objects and barriers; None if it is this process alone."""
    runtime = current()
    if len(members(group)) == 1:
        return None
    if group is CommGroup.WORLD:
        return runtime.object_group
    if group in (CommGroup.MP_GROUP, CommGroup.PP_GROUP):
        return runtime.world.pipeline_object_group
    return runtime.dp_object_group


def get_mp_group() -> list[int]:
    """Returns the ranks of this process's pipeline."""
    return members(CommGroup.MP_GROUP)


def get_dp_group() -> list[int]:
    """Returns the ranks that have the same stages as this process."""
    return members(CommGroup.DP_GROUP)


get_pp_group, get_rdp_group = get_mp_group, get_dp_group


def get_tp_group() -> list[int]:
    """Returns the rank of this process."""
    return members(CommGroup.TP_GROUP)


def get_world_process_group() -> dist.ProcessGroup:
    """Returns the `ProcessGroup` of all processes."""
    return cast(dist.ProcessGroup, dist.group.WORLD) if size() > 1 else current().own_group()


def get_mp_process_group() -> dist.ProcessGroup:
    """Returns the `ProcessGroup` of this pipeline."""
    return current().world.pipeline_group or current().own_group()


def get_dp_process_group() -> dist.ProcessGroup:
    """Returns the `ProcessGroup` of the processes that have these stages, one of each replica."""
    return current().dp_group or current().own_group()


get_pp_process_group, get_rdp_process_group = get_mp_process_group, get_dp_process_group


def get_tp_process_group() -> dist.ProcessGroup:
    """Returns the `ProcessGroup` of this process alone: there is no tensor parallelism."""
    return current().own_group()
