"""Messages between processes: any picklable object, and tensors on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from hybridtrain.errors import UserError
from hybridtrain.smp.ranks import CommGroup, RankType, device, members, object_group
from hybridtrain.smp.runtime import current


@dataclass(frozen=True)
class _OnGPU:
    """A tensor that was on a GPU, and is to be on the receiver's."""

    tensor: Tensor


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends `obj` to a process, which calls `recv_from`.

    Args:
        obj: a picklable object; the tensors in it arrive on the receiver's device.
        dest_rank: the receiver's rank.
        rank_type: what `dest_rank` is a rank of.
    """
    group = current().object_group
    dist.send_object_list([_packed(obj)], dst=_rank(dest_rank, rank_type), group=group)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Waits for what a process sends to this one, with `send` or `broadcast`, and returns it."""
    received: list[Any] = [None]
    group = current().object_group
    dist.recv_object_list(received, src=_rank(src_rank, rank_type), group=group)
    return _unpacked(received[0])


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends `obj` to all other processes of `group`, which call `recv_from`."""
    for other in members(group):
        if other != current().world.rank:
            send(obj, other)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns what each process of `group` has given, in the order of their ranks in it."""
    processes = object_group(group)
    if processes is None:
        return [obj]
    found: list[Any] = [None] * len(members(group))
    dist.all_gather_object(found, _packed(obj), group=processes)
    return [_unpacked(one) for one in found]


def reduce_scatter(parts: Sequence[Any], group: CommGroup = CommGroup.WORLD) -> Any:
    """Returns the sum, over the processes of `group`, of the part with this process's rank in it.

    Args:
        parts: tensors or other values with a `+`, one for each process of `group`.
        group: the processes.

    Raises:
        UserError: there are not as many parts as processes.
    """
    ranks = members(group)
    if len(parts) != len(ranks):
        raise UserError(f"reduce_scatter needs {len(ranks)} parts, one per process: {len(parts)}")
    own = ranks.index(current().world.rank)
    return reduce(add, [given[own] for given in allgather(list(parts), group)])


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when all processes of `group` have called it."""
    processes = object_group(group)
    if processes is not None:
        dist.barrier(group=processes)


mp_barrier = partial(barrier, CommGroup.MP_GROUP)
pp_barrier = partial(barrier, CommGroup.PP_GROUP)
dp_barrier = partial(barrier, CommGroup.DP_GROUP)
rdp_barrier = partial(barrier, CommGroup.RDP_GROUP)
tp_barrier = partial(barrier, CommGroup.TP_GROUP)


def _rank(rank: int, rank_type: RankType) -> int:
    ranks = members(rank_type)
    if not 0 <= rank < len(ranks):
        raise UserError(f"there is no {rank_type.name} {rank}: they are 0 to {len(ranks) - 1}")
    if ranks[rank] == current().world.rank:
        raise UserError(f"{rank_type.name} {rank} is this process itself: it has the object")
    return ranks[rank]


def _packed(obj: Any) -> Any:
    return tree_map_only(Tensor, lambda t: _OnGPU(t.detach().cpu()) if t.is_cuda else t, obj)


def _unpacked(obj: Any) -> Any:
    def own(leaf: Any) -> Any:
        return leaf.tensor.to(device()) if isinstance(leaf, _OnGPU) else leaf

    return tree_map(own, obj)
