"""Batches of replicas that cannot know each other's numbers of samples, agreed on as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain.data.loader import Batch
from hybridtrain.errors import DataError
from hybridtrain.world import World


class Piece(NamedTuple):
    """A replica's share of a global batch.

    Attributes:
        batch: `(inputs, targets)`.
        samples: how many of them count; 0 if the batch is there for the replica to take part.
        total: the samples of the global batch, where this replica can tell.
        digest: of the first samples that were read for it, to compare with other readers'.
        worker: the number of the process that made it.
        state: pickled; where the data set stood after it, if it can tell.
    """

    batch: Any
    samples: int
    total: int | None = None
    digest: int = 0
    worker: int = 0
    state: bytes | None = None


class Agreed(NamedTuple):
    """A batch of this replica, and the piece that it was made of; None where it had none left."""

    batch: Batch
    piece: Piece | None


def agreed(
    pieces: Iterator[Piece],
    world: World,
    name: str,
    *,
    at_least: int = 1,
    check: Callable[[list[int]], None] = lambda digests: None,
) -> Generator[Agreed, None, None]:
    """Yields this replica's batches of one epoch, equally many on every replica.

    The replicas exchange how many samples each has, of this batch and of the next, in one message
    of a few bytes that travels while the batch before is in use. A replica that has run out takes
    part with a sample that counts for nothing until the last one has, so that no sample is lost,
    or repeated.

    Args:
        pieces: this replica's part of the epoch.
        world: tells the replicas.
        name: the data set's, for messages.
        at_least: the samples that a global batch must have; the epoch ends before one with fewer.
        check: given the replicas' digests of the first batch; may raise.

    Raises:
        DataError: the replicas have read different streams.
    """
    piece = next(pieces, None)
    following = next(pieces, None) if piece else None
    message = _exchange(world, piece, following)
    spare: Any = None
    first = True
    while True:
        after = next(pieces, None) if following else None
        next_message = _exchange(world, following, after)
        counts, next_counts, digests = message()
        total = sum(counts)
        if first:
            check(digests)
            if total >= at_least and 0 in counts and (piece is None or piece.total is None):
                own = _one_sample(piece.batch) if piece is not None else None
                spare = next(each for each in world.gather(own) if each is not None)
        if piece is not None and piece.total not in (None, total):
            raise DataError(
                f"the replicas read different samples from {name}: its order must be the same in "
                f"every process (shuffle with its own generator, from a fixed seed)"
            )
        if total < at_least:
            return
        if piece is not None and piece.samples:
            spare = piece.batch
        inputs, targets = piece.batch if piece is not None else _one_sample(spare)
        last = sum(next_counts) < at_least
        samples = piece.samples if piece is not None else 0
        yield Agreed(Batch(inputs, targets, samples, total, last), piece)
        if last:
            next_message()  # every replica has sent it
            return
        piece, following, message, first = following, after, next_message, False


def _exchange(
    world: World, piece: Piece | None, following: Piece | None
) -> Callable[[], tuple[list[int], list[int], list[int]]]:
    """Begins to tell all replicas the samples of two pieces; returns what waits for theirs."""
    own = [piece.samples if piece else 0, following.samples if following else 0]
    values = torch.zeros(world.replicas, 3, dtype=torch.int64)
    values[world.replica] = torch.tensor([*own, piece.digest if piece else 0])
    work = world.begin_max(values) if world.replicas > 1 else None

    def received() -> tuple[list[int], list[int], list[int]]:
        if work is not None:
            work.wait()
        counts, next_counts, digests = values.T.tolist()
        return counts, next_counts, digests

    return received


def _one_sample(batch: Any) -> Any:
    """Returns a batch of the first sample of `batch`."""
    return tree_map_only(Tensor, lambda leaf: leaf[:1] if leaf.dim() else leaf, batch)


def digest_of(samples: Any) -> int:
    """Returns a number of 62 bits that differs, most probably, for different samples."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(samples):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray):  # the bytes of objects are their addresses
            found.update(repr(leaf.tolist()).encode() if leaf.dtype.hasobject else leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | None):
            found.update(repr(leaf).encode())
    return int.from_bytes(found.digest()) >> 2
