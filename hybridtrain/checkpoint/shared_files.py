"""Files that the nodes of a run may share or not, and the values that each process loads.

If all processes see the same files, each reads what it needs of them, memory-mapped. Otherwise
rank 0 alone reads, and sends one tensor at a time. Neither way does a process hold the whole state.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from hybridtrain.checkpoint.directory import TEMPORARY
from hybridtrain.checkpoint.joint_save import on_each
from hybridtrain.checkpoint.pytree_json import broadcast_tree
from hybridtrain.errors import CheckpointError
from hybridtrain.files import make_directory
from hybridtrain.world import World

T = TypeVar("T")

# How long a file of another node may take to appear: NFS asks again after a few seconds.
_APPEARS_S = 5.0
_PIECES, _PIECE_BYTES = 16, 64 << 10


def hosts_without(root: Path, world: World) -> list[str]:
    """Returns the ranks and hosts that do not see the directory `root` of rank 0.

    A collective call; it makes the directory, and removes a file in it.

    Args:
        root: the directory, by the path that each process has.
        world: the processes.

    Raises:
        CheckpointError: rank 0 cannot make the directory or write to it; on every process.
    """
    if world.size == 1:
        return []

    def make() -> str:
        token = root / f"{TEMPORARY}seen-{uuid4().hex}"
        try:
            make_directory(root)
            token.touch()
        except OSError as error:
            raise CheckpointError(f"cannot write to {root}: {error}") from error
        return token.name

    name = world.broadcast(world.on_main(make))
    assert name is not None
    deadline = time.monotonic() + _APPEARS_S
    # False, not an error, where a process may not look
    while not (seen := os.path.exists(root / name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyones = world.gather((seen, socket.gethostname()))
    if world.is_main:
        (root / name).unlink(missing_ok=True)
    return [f"rank {rank} on {host}" for rank, (seen, host) in enumerate(everyones) if not seen]


def same_files(world: World, paths: Sequence[Path]) -> bool:
    """Returns whether all processes see the same files under rank 0's `paths`; a collective call.

    Files are the same that have the same size and the same bytes in 16 places.
    """
    if world.size == 1:
        return True
    expected = world.broadcast([(path, fingerprint(path)) for path in paths])
    own = all(found is not None and fingerprint(path) == found for path, found in expected)
    return all(world.gather(own))


def fingerprint(path: Path) -> tuple[int, int] | None:
    """Returns the size of a file and a checksum of some of its bytes; None if it is not there."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            crc32 = 0
            step = max(_PIECE_BYTES, (size - _PIECE_BYTES) // (_PIECES - 1))
            for place in range(0, size, step):
                file.seek(place)
                crc32 = zlib.crc32(file.read(_PIECE_BYTES), crc32)
            return size, crc32
    except OSError:
        return None


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
