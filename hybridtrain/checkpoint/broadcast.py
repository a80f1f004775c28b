"""A tree of values that rank 0 sends to all processes, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map_only, tree_map_with_path

from hybridtrain.world import World


def broadcast_tree(world: World, tree: Any, move: Callable[[KeyPath, Tensor], Tensor]) -> Any:
    """Returns rank 0's `tree` on every rank; sends its tensors one by one and `move`s each."""
    kinds = world.broadcast(
        tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), tree)
    )

    def receive(path: KeyPath, kind: Any, *mains: Any) -> Any:
        if not isinstance(kind, Tensor):
            return kind
        value = torch.empty_like(kind, device="cpu")
        if world.is_main:
            value.copy_(*mains)
        # as bytes in memory order: gloo and NCCL do not support every dtype
        # All processes walk the tree in the same order, so each tensor meets its own broadcast.
        world.broadcast_tensor(value.as_strided((value.numel(),), (1,)).view(torch.uint8))
        return move(path, value)

    return tree_map_with_path(receive, kinds, *([tree] if world.is_main else []))
