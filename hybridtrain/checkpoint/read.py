"""Reading a checkpoint by all processes of a run.

The nodes of a run may or may not share files. If all processes see the same files (`same_files`),
each reads the tensors that it needs, memory-mapped. Otherwise only rank 0 reads, and sends one
tensor at a time. In both cases, a process holds no more of the model and the optimizer than its own
part and one tensor.
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
    """Reads the files of a state for all processes; all calls are collective.

    Args:
        world: the processes.
        paths: the files, or a file that differs whenever they do, such as a manifest; rank 0's
            paths are used.

    Attributes:
        shared: True if all processes see the same files and each reads them; False if rank 0 reads
            and sends.
    """

    def __init__(self, world: World, paths: Sequence[Path]) -> None:
        self.world = world
        self.shared = same_files(world, paths)

    def read(self, action: Callable[[], T]) -> T | None:
        """Returns the result of `action`, which opens files, on every process or only on rank 0.

        Raises:
            Exception: the error of rank 0, or of the first process that failed, on every process.
        """
        if not self.shared:
            return self.world.on_main(action)
        # rank 0 first, so that a problem with the files is reported once
        opened = self.world.on_main(action)
        return self.world.on_all(lambda: action() if opened is None else opened)

    def tree(
        self, tree: Any, move: Callable[[KeyPath, Tensor], Tensor] = lambda _, value: value
    ) -> Any:
        """Returns a tree from `read` on every process, with `move`d copies of its tensors."""
        if not self.shared:
            return broadcast_tree(self.world, tree, move)

        def local_copy(path: KeyPath, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            moved = move(path, value)
            # copy, so that the tensor does not map the file
            return moved.clone() if moved is value else moved

        return tree_map_with_path(local_copy, tree)

    def sent(
        self, available: Mapping[str, Tensor], state: Mapping[str, Any], left_out: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that rank 0 sends to this process, if only rank 0 reads.

        Args:
            available: the tensors from `read`, by name; some may be missing.
            state: the model's state dict, with the same names on every process.
            left_out: names to skip.
        """
        if self.shared:
            return
        # Rank 0 knows what it has; the others only learn the names here, and then make the same
        # calls.
        names = self.world.broadcast(set(available))
        for name, tensor in state.items():
            if name in left_out or name not in names:
                continue
            if self.world.is_main:
                # A copy in dense memory: a broadcast needs the same layout everywhere, and must not
                # write to the mapped file.
                value = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(available[name])
            elif tensor.is_meta:  # another process's stage
                value = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                # Received into the parameter itself where it can be, so that no second copy exists.
                value = tensor.cpu().contiguous()  # does not copy a contiguous CPU tensor
            self.world.broadcast_tensor(value)
            if not self.world.is_main and not tensor.is_meta:
                yield name, value
