"""The source of the values that each process loads: files, or rank 0.

If all processes see the same files, each reads what it needs of them, memory-mapped. Otherwise
rank 0 alone reads, and sends one tensor at a time. Neither way does a process hold the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from hybridtrain.checkpoint.shared_files import on_each
from hybridtrain.checkpoint.trees import broadcast_tree
from hybridtrain.world import World

T = TypeVar("T")


class Source:
    """The files of a state; all calls are collective ones.

    Args:
        world: the processes.
        shared: each of them reads the files; False: rank 0 sends what it reads.
    """

    def __init__(self, world: World, shared: bool) -> None:
        self.world = world
        self.shared = shared or world.size == 1

    def read(self, action: Callable[[], T]) -> T | None:
        """Returns what `action` opens: on every process, or on rank 0 alone.

        Raises:
            Exception: that of rank 0, or of the first process that fails, on every process.
        """
        if not self.shared:
            return self.world.on_main(action)
        # rank 0 first: what is wrong with the files is said once
        own = self.world.on_main(action)
        return on_each(self.world, lambda: action() if own is None else own)

    def tree(
        self, tree: Any, move: Callable[[KeyPath, Tensor], Tensor] = lambda _, value: value
    ) -> Any:
        """Returns a tree that `read` gave, on every process, with copies of its tensors `move`d."""
        if not self.shared:
            return broadcast_tree(self.world, tree, move)

        def own(path: KeyPath, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            moved = move(path, value)
            # not the memory of the file
            return moved.clone() if moved is value else moved

        return tree_map_with_path(own, tree)

    def tensors(
        self, given: Mapping[str, Tensor], state: Mapping[str, Any], left_out: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the names and whole values of the tensors that this process has in `state`.

        Args:
            given: what `read` gave, by name; some may be missing.
            state: of the model, the same names on every process.
            left_out: names that are not wanted.
        """
        if self.shared:
            for name, value in given.items():
                if name not in left_out and not state[name].is_meta:
                    yield name, value
            return
        names = self.world.broadcast(set(given))
        for name, tensor in state.items():
            if name in left_out or name not in names:
                continue
            if self.world.is_main:
                sent = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(given[name])
            elif tensor.is_meta:  # of another stage
                sent = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                sent = tensor.cpu().contiguous()  # no copy of a contiguous CPU tensor
            self.world.broadcast_tensor(sent)
            if not tensor.is_meta:
                yield name, sent
