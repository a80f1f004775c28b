"""Ranks, sizes and groups of processes, and communication between them.

    pp, mp    the processes of one pipeline; mp is the same, because there is no tensor parallelism
    dp, rdp   the processes with the same stages, one per replica
    tp        this process only

With all stages in one process (`engine="local"`), pp and mp contain only this process too.

In a step, a process may only communicate with processes that run the same lines of it: after the
model's call, with the last stages of the other replicas.

The module also sends messages between processes (picklable objects with tensors on any device) and
joins the partial states of a pipeline's processes to the state of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from operator import add
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from hybridtrain._base import objects
from hybridtrain.errors import UserError
from hybridtrain.smp.bodies import current_body
from hybridtrain.smp.runtime import current


class CommGroup(Enum):
    """The processes that a call applies to."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The processes that a rank counts: all of them, or a group's."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


def rank() -> int:
    """Returns the global rank of this process."""
    return current().world.rank


def size() -> int:
    """Returns the number of processes."""
    return current().world.size


def local_rank() -> int:
    """Returns the rank of this process on its node."""
    return current().launch.local_rank


def local_size() -> int:
    """Returns the number of processes on this node."""
    return current().launch.local_size


def pp_rank() -> int:
    """Returns the rank of this process in its pipeline."""
    return current().world.pipeline_rank


def pp_size() -> int:
    """Returns the number of processes per pipeline."""
    return current().world.processes_per_replica


mp_rank, mp_size = pp_rank, pp_size


def dp_rank() -> int:
    """Returns the index of this process's replica, for sharding data."""
    return current().world.data_parallel_rank


def dp_size() -> int:
    """Returns the number of replicas."""
    return current().world.data_parallel_size


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
        return [world.rank_of(world.data_parallel_rank, place) for place in places]
    return [
        world.rank_of(replica, world.pipeline_rank) for replica in range(world.data_parallel_size)
    ]


def object_group(group: CommGroup) -> dist.ProcessGroup | None:
    """Returns the process group for objects and barriers; None for this process only."""
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
    """Returns the ranks with the same stages as this process."""
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
    """Returns the `ProcessGroup` of the processes with these stages, one per replica."""
    return current().dp_group or current().own_group()


get_pp_process_group, get_rdp_process_group = get_mp_process_group, get_dp_process_group


def get_tp_process_group() -> dist.ProcessGroup:
    """Returns the `ProcessGroup` of only this process: there is no tensor parallelism."""
    return current().own_group()


@dataclass(frozen=True)
class _OnGPU:
    """A tensor from a GPU, to be moved to the receiver's GPU."""

    tensor: Tensor


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends `obj` to a process, which calls `recv_from`.

    Args:
        obj: of a type that `World.gather` supports; its tensors arrive on the receiver's device.
        dest_rank: the receiver's rank.
        rank_type: the group that `dest_rank` counts in.

    Raises:
        UserError: there is no such process, or it does not run this part of a step.
    """
    receiver = _rank(dest_rank, rank_type)
    _check_runs_here("smp.send()", [receiver])
    objects.send(_packed(obj), current().object_group, receiver)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Waits for an object sent by `send` or `broadcast` of another process, and returns it.

    Raises:
        UserError: there is no such process, or it does not run this part of a step.
    """
    sender = _rank(src_rank, rank_type)
    _check_runs_here("smp.recv_from()", [sender])
    return _unpacked(objects.receive(current().object_group, sender))


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends `obj` to all other processes of `group`, which call `recv_from`.

    Raises:
        UserError: called in a part of a step that one of them does not run.
    """
    _check_runs_here("smp.broadcast()", members(group))
    for other in members(group):
        if other != current().world.rank:
            send(obj, other)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of all processes of `group`, in the order of their ranks in it.

    Raises:
        UserError: called in a part of a step that one of them does not run.
    """
    _check_runs_here("smp.allgather()", members(group))
    processes = object_group(group)
    if processes is None:
        return [obj]
    return [_unpacked(packed) for packed in objects.gather(_packed(obj), processes)]


def reduce_scatter(parts: Sequence[Any], group: CommGroup = CommGroup.WORLD) -> Any:
    """Returns the sum, over the processes of `group`, of their parts for this process's rank.

    Args:
        parts: tensors or other values with a `+`, one per process of `group`.
        group: the processes.

    Raises:
        UserError: the number of parts is not the number of processes, or one of them does not run
            this part of a step.
    """
    ranks = members(group)
    _check_runs_here("smp.reduce_scatter()", ranks)
    if len(parts) != len(ranks):
        raise UserError(f"reduce_scatter needs {len(ranks)} parts, one per process: {len(parts)}")
    position = ranks.index(current().world.rank)
    return reduce(add, [process_parts[position] for process_parts in allgather(list(parts), group)])


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns once all processes of `group` have called it.

    Raises:
        UserError: called in a part of a step that one of them does not run.
    """
    _check_runs_here("smp.barrier()", members(group))
    processes = object_group(group)
    if processes is not None:
        dist.barrier(group=processes)


mp_barrier = partial(barrier, CommGroup.MP_GROUP)
pp_barrier = partial(barrier, CommGroup.PP_GROUP)
dp_barrier = partial(barrier, CommGroup.DP_GROUP)
rdp_barrier = partial(barrier, CommGroup.RDP_GROUP)
tp_barrier = partial(barrier, CommGroup.TP_GROUP)


def _check_runs_here(call: str, ranks: Iterable[int]) -> None:
    """Refuses a call in a body that waits for a process which does not run this part of it."""
    body = current_body()
    if body is None or not body.has_called_model:
        return  # all processes run the lines before the model's call
    world = current().world
    last = world.processes_per_replica - 1
    running = {world.rank_of(replica, last) for replica in range(world.data_parallel_size)}
    if absent := sorted(set(ranks) - running):
        raise UserError(
            f"{call} in {body.name} would wait forever for rank {absent[0]}: after the model's "
            f"call, a step runs only in the process of the last stage. Return the value, which all "
            f"processes of the pipeline get, and call {call.partition('(')[0]} after the step"
        )


def _rank(rank: int, rank_type: RankType) -> int:
    ranks = members(rank_type)
    if not 0 <= rank < len(ranks):
        raise UserError(f"{rank_type.name} {rank} does not exist: use 0 to {len(ranks) - 1}")
    if ranks[rank] == current().world.rank:
        raise UserError(f"{rank_type.name} {rank} is this process itself: it has the object")
    return ranks[rank]


def _packed(obj: Any) -> Any:
    return tree_map_only(Tensor, lambda t: _OnGPU(t.detach().cpu()) if t.is_cuda else t, obj)


def _unpacked(obj: Any) -> Any:
    def to_device(leaf: Any) -> Any:
        return leaf.tensor.to(device()) if isinstance(leaf, _OnGPU) else leaf

    return tree_map(to_device, obj)


PARTIAL = "_smp_is_partial"
"""The key that marks a state as the part of one process's stages."""


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of the whole model or optimizer, given all of it or this process's part.

    With a part, it is a collective call of the pipeline.
    """
    if not state.get(PARTIAL, False):
        return {name: value for name, value in state.items() if name != PARTIAL}
    return dict(joined(allgather(dict(state), CommGroup.MP_GROUP)))


def joined(parts: list[Any]) -> Any:
    """Joins the objects that the processes of a pipeline have saved.

    Partial states in them are joined to whole ones; for anything else, the first one counts.
    """
    first = parts[0]
    if not isinstance(first, Mapping):
        return first
    if not first.get(PARTIAL, False):
        return {name: joined([part[name] for part in parts]) for name in first}
    if "param_groups" in first:  # an optimizer's state: its groups cover the whole model
        rest = {name: value for name, value in first.items() if name != PARTIAL}
        return {**rest, "state": {n: entry for part in parts for n, entry in part["state"].items()}}
    return {name: value for part in parts for name, value in part.items() if name != PARTIAL}
