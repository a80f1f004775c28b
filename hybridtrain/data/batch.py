"""Batches of one replica, and what a trainer asks of a loader of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Batch:
    """One replica's share of a global batch.

    Attributes:
        inputs: a pytree of tensors with the samples in dim 0.
        targets: likewise.
        samples: the samples of the share that count. 0 where a global batch has fewer samples than
            there are replicas: the share is then one sample that counts for nothing, because every
            replica has to take part in the step.
        total: the samples of the global batch.
        last: whether it is the last of its epoch.
    """

    inputs: Any
    targets: Any
    samples: int
    total: int
    last: bool = False


class BatchSource(Protocol):
    """An endless stream of batches, epoch after epoch: what a `Trainer` trains on.

    If it has an attribute `has_state` that is true, a checkpoint holds its `state_dict()`, which
    every process calls, and a resumed run calls its `load_state_dict`.

    Attributes:
        batch_size: the samples of a global batch; 1 where batches are counted in place of samples.
        batches_per_epoch: None if it is not known.
    """

    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def batches_per_epoch(self) -> int | None: ...  # noqa: D102

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on."""
        ...


def share_of(total: int, replica: int, replicas: int) -> slice:
    """Returns the part of `total` samples that `replica` takes; shares differ by 1 at most."""
    small, larger = divmod(total, replicas)
    start = replica * small + min(replica, larger)
    return slice(start, start + small + (replica < larger))


def length_of(iterable: Any) -> int | None:
    """Returns `len(iterable)`, or None if it has none: some types have `__len__` and refuse."""
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


def take(stream: Iterator[Batch], count: int) -> list[Batch]:
    """Returns the next `count` batches, or fewer if their epoch ends."""
    batches = [next(stream)]
    while len(batches) < count and not batches[-1].last:
        batches.append(next(stream))
    return batches
