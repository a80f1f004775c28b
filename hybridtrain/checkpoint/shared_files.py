"""Files and folders shared by the processes of several hosts."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from hybridtrain._base.files import make_directory
from hybridtrain.checkpoint.directory import TEMPORARY
from hybridtrain.errors import CheckpointError
from hybridtrain.world import World

# How long to wait for a file from another node: NFS refreshes after a few seconds.
_APPEARS_S = 5.0
_PIECES, _PIECE_BYTES = 16, 64 << 10


def hosts_without(root: Path, world: World) -> list[str]:
    """Returns the ranks and hosts that do not see rank 0's directory `root`.

    A collective call. Creates the directory, and a temporary file in it.

    Args:
        root: the directory, by this process's path.
        world: the processes.

    Raises:
        CheckpointError: rank 0 cannot create or write to the directory; raised on every process.
    """
    if world.size == 1:
        return []

    def make() -> str:
        # A new name: a cache of an NFS client cannot know that it does not exist.
        token = root / f"{TEMPORARY}seen-{uuid4().hex}"
        try:
            make_directory(root)
            token.touch()
        except OSError as error:
            raise CheckpointError(f"cannot write to {root}: {error}") from error
        return token.name

    name = world.from_main(make)
    deadline = time.monotonic() + _APPEARS_S
    # False, not an error, if a process lacks the permission
    while not (seen := os.path.exists(root / name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    # After all have looked: only then may rank 0 remove it.
    everyones = world.gather((seen, socket.gethostname()))
    if world.is_main:
        (root / name).unlink(missing_ok=True)
    return [f"rank {rank} on {host}" for rank, (seen, host) in enumerate(everyones) if not seen]


def same_files(world: World, paths: Sequence[Path]) -> bool:
    """Returns whether all processes see the same files at rank 0's `paths`; a collective call.

    Files count as the same if they have the same size and the same bytes in 16 places.
    """
    if world.size == 1:
        return True
    expected = world.broadcast([(path, fingerprint(path)) for path in paths])
    all_match = all(
        rank_0s is not None and fingerprint(path) == rank_0s for path, rank_0s in expected
    )
    return all(world.gather(all_match))


def fingerprint(path: Path) -> tuple[int, int] | None:
    """Returns a file's size and a checksum of a sample of its bytes; None if it is missing."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            crc32 = 0
            # From the first to the last piece of a large file; a small one is read whole.
            step = max(_PIECE_BYTES, (size - _PIECE_BYTES) // (_PIECES - 1))
            for place in range(0, size, step):
                file.seek(place)
                crc32 = zlib.crc32(file.read(_PIECE_BYTES), crc32)
            return size, crc32
    except OSError:
        return None
