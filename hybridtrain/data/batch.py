"""Batches of one replica, and what a trainer asks of a loader of them."""

from __future__ import annotations

from collections.abc import Generator
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

    With `state_dict` and `load_state_dict` (JSON's types; None: nothing to save) its state is part
    of a checkpoint.

    Attributes:
        batch_size: the samples of a global batch; 1 where batches are counted in place of samples.
        batches_per_epoch: None if it is not known.
    """

    batch_size: int
    batches_per_epoch: int | None

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on."""
        ...


def share_of(total: int, replica: int, replicas: int) -> slice:
    """Returns the part of `total` samples that `replica` takes; shares differ by 1 at most."""
    small, larger = divmod(total, replicas)
    start = replica * small + min(replica, larger)
    return slice(start, start + small + (replica < larger))
