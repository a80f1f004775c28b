"""The part of a checkpoint that is in other processes than rank 0, which writes it.

Rank 0 knows names, shapes and dtypes of all tensors beforehand, as meta tensors, and asks for the
values one tensor at a time, when it writes them. So no process ever holds the whole model, and no
file system need be shared:

    rank 0      writes header, own tensors ...  asks for "5.weight"  writes it ...  end
    rank 1                                      sends it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hybridtrain.checkpoint.optimizer_state import optimizer_by_name
from hybridtrain.checkpoint.trees import pack
from hybridtrain.errors import CheckpointError
from hybridtrain.model import HybridModel

_Key = tuple[str, str]  # the stem of a file, the name of a tensor in it


class OtherStages:
    """The state of all stages, of which rank 0 has its own; a collective call of all processes.

    Attributes:
        optimizer: on rank 0, the state of `optimizer_by_name` for the whole model; tensors of other
            processes are meta tensors.
        extra: on rank 0, what `get_extra_state` returned, unless it is a tensor, by name.

    Raises:
        CheckpointError: the processes' optimizers have different groups.
    """

    def __init__(self, model: HybridModel, optimizer: Optimizer) -> None:
        world = model.world
        own = optimizer_by_name(model, optimizer)
        self._group = world.pipeline_object_group  # rank 0 may write for long
        self._place = world.pipeline_rank
        self._serves = world.replica == 0
        self._own: dict[_Key, Tensor] = {
            ("optimizer", name): tensor for name, tensor in pack("optimizer", own)[1].items()
        }
        extra = {}
        for name, value in model.pipeline.own_state().items():
            if isinstance(value, Tensor):
                self._own["model", name] = value
            else:
                extra[name] = value
        described = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), own)
        parts: list[Any] = [None] * world.processes_per_replica
        mine = (described, extra, list(self._own))
        dist.all_gather_object(parts, mine, group=self._group)
        self._owner: dict[_Key, int] = {}
        for place, (_, _, keys) in reversed(list(enumerate(parts))):
            self._owner |= dict.fromkeys(keys, place)
        self.extra = {name: value for part in reversed(parts) for name, value in part[1].items()}
        self.optimizer = _merged([own, *(part[0] for part in parts[1:])], model)

    def value(self, stem: str, name: str, tensor: Tensor) -> Tensor:
        """Returns the values of `tensor`, which may be in another process; rank 0 calls it."""
        key = stem, name
        if self._owner.get(key, 0) == 0:
            return tensor
        self._broadcast(key)
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(_flat(received), group=self._group, group_src=self._owner[key])
        return received

    def has(self, stem: str, name: str) -> bool:
        """Returns whether another process has the values of this tensor."""
        return self._owner.get((stem, name), 0) != 0

    def serve(self) -> None:
        """Sends what rank 0 asks for, until it calls `end`; returns at once on rank 0."""
        if not self._serves or self._place == 0:
            return
        while (key := self._broadcast(None)) is not None:
            if self._owner[key] == self._place:
                tensor = self._own[key].detach().cpu().resolve_conj().resolve_neg().contiguous()
                dist.send(_flat(tensor), group=self._group, group_dst=0)

    def end(self) -> None:
        """Lets the other processes go on; rank 0 calls it."""
        self._broadcast(None)

    def _broadcast(self, key: _Key | None) -> _Key | None:
        keys: list[Any] = [key]
        dist.broadcast_object_list(keys, group=self._group, group_src=0)
        return keys[0]  # type: ignore[no-any-return]


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor: gloo does not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _merged(trees: list[Mapping[str, Any]], model: HybridModel) -> dict[str, Any]:
    """Returns the state of an optimizer over the whole model from those of its processes."""
    groups = [tree["param_groups"] for tree in trees]
    if len({len(each) for each in groups}) > 1:
        raise CheckpointError(
            "the optimizers of the processes have different numbers of parameter groups: make the "
            "same groups in each process, also where one is empty"
        )
    order = {name: index for index, (name, _) in enumerate(model.net.named_parameters())}
    merged = []
    for same in zip(*groups, strict=True):
        names = {name for group in same for name in group["params"]}
        merged.append({**same[0], "params": sorted(names, key=order.__getitem__)})
    state = {name: entry for tree in reversed(trees) for name, entry in tree["state"].items()}
    return {
        "state": {name: state[name] for name in sorted(state, key=order.__getitem__)},
        "param_groups": merged,
    }
