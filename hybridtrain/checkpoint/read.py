"""Reading a checkpoint by all processes of a run.

The nodes of a run may share files or not. If all processes see the same ones (`same_files`), each
reads what it needs of them, memory-mapped. Otherwise rank 0 alone reads, and sends one tensor at a
time. Neither way does a process hold more of the model and the optimizer than its own part, and one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from hybridtrain.checkpoint.broadcast import broadcast_tree
from hybridtrain.checkpoint.shared_files import same_files
from hybridtrain.world import World

T = TypeVar("T")


class CheckpointReader:
    """Reads the files of a state for all processes; all calls are collective ones.

    Args:
        world: the processes.
        paths: the files, or one that differs wherever any does, such as a manifest; rank 0's count.

    Attributes:
        shared: all processes see the same files, so that each reads them; False: rank 0 sends what
            it reads.
    """

    def __init__(self, world: World, paths: Sequence[Path]) -> None:
        self.world = world
        self.shared = same_files(world, paths)

    def read(self, action: Callable[[], T]) -> T | None:
        """Returns what `action` opens: on every process, or on rank 0 alone.

        Raises:
            Exception: that of rank 0, or of the first process that fails, on every process.
        """
        if not self.shared:
            return self.world.on_main(action)
        # rank 0 first: what is wrong with the files is said once
        opened = self.world.on_main(action)
        return self.world.on_all(lambda: action() if opened is None else opened)

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

    def sent(
        self, given: Mapping[str, Tensor], state: Mapping[str, Any], left_out: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what rank 0 sends, where it alone reads, of the tensors that this process has.

        Args:
            given: what `read` gave, by name; some may be missing.
            state: of the model, the same names on every process.
            left_out: names that are not wanted.
        """
        if self.shared:
            return
        names = self.world.broadcast(set(given))
        for name, tensor in state.items():
            if name in left_out or name not in names:
                continue
            if self.world.is_main:
                value = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(given[name])
            elif tensor.is_meta:  # of another stage
                value = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                value = tensor.cpu().contiguous()  # no copy of a contiguous CPU tensor
            self.world.broadcast_tensor(value)
            if not self.world.is_main and not tensor.is_meta:
                yield name, value
