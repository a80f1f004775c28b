"""Loaders of training and evaluation batches: their order, each replica's share, prefetching.

The order of an epoch is one permutation of the whole data set, drawn from (seed, epoch) alone. It
is cut into global batches, and each of these into one share per replica. So the same samples meet
in the same optimizer step whatever the number of replicas, and every replica takes equally many
steps, whatever the length of the data set.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import torch

from hybridtrain.data.batch import Batch, share_of
from hybridtrain.data.faults import name_of
from hybridtrain.data.fetch import fetch
from hybridtrain.data.stream import StreamLoader, is_stream
from hybridtrain.errors import DataError
from hybridtrain.options import LoaderOptions, check_batch_size
from hybridtrain.world import World

__all__ = ["Batch", "EvalLoader", "LoaderOptions", "TrainLoader", "permutation", "share_of"]


class TrainLoader:
    """An endless stream of batches, epoch after epoch, that can start anywhere.

    Args:
        dataset: map-style; items are `(inputs, target)`.
        batch_size: samples of a global batch, over all replicas.
        world: tells which replica this process belongs to.
        shuffle: False for the order of the data set.
        seed: the order is drawn from it.
        options: how batches are loaded.

    Raises:
        ConfigError: `batch_size` is not a positive number.
        DataError: the data set has less than one batch, or can only be iterated over.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        shuffle: bool = True,
        seed: int = 0,
        options: LoaderOptions | None = None,
    ) -> None:
        if is_stream(dataset):
            raise DataError(
                f"{name_of(dataset)} has no samples by number (`__getitem__` and `__len__`): pass "
                f"StreamLoader(dataset, batch_size, world) from hybridtrain.data.stream"
            )
        check_batch_size(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.samples = len(dataset)
        self._world = world
        self._shuffle = shuffle
        self._seed = seed
        self.options = self._options = options or LoaderOptions()
        full, rest = divmod(self.samples, batch_size)
        self.batches_per_epoch = full + (rest > 0 and not self._options.drop_last)
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the training data has {self.samples} samples, less than one batch of "
                f"batch_size={batch_size}: lower it, or set drop_last=False"
            )

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on, fetched ahead of time."""
        fetched = fetch(self.dataset, self._indices(epoch, batch), self._options, self._world)
        starts = itertools.chain(self._starts(batch), itertools.cycle(self._starts(0)))
        try:
            for (inputs, targets), start in zip(fetched, starts, strict=False):
                share, total = self._share(start)
                last = start + self.batch_size >= self.batches_per_epoch * self.batch_size
                yield Batch(inputs, targets, share.stop - share.start, total, last)
        finally:
            fetched.close()

    def _starts(self, batch: int) -> range:
        """Returns where the batches begin in the order of an epoch, from `batch` on."""
        return range(
            batch * self.batch_size, self.batches_per_epoch * self.batch_size, self.batch_size
        )

    def _share(self, start: int) -> tuple[slice, int]:
        """Returns this replica's slice of the global batch from `start` on, and its samples."""
        total = min(self.batch_size, self.samples - start)
        return share_of(total, self._world.replica, self._world.replicas), total

    def _indices(self, epoch: int, batch: int) -> Iterator[torch.Tensor]:
        """Yields the sample indices of this replica's batches, each of shape (samples,)."""
        for number in itertools.count(epoch):
            order = torch.arange(self.samples)
            if self._shuffle:
                order = permutation(self.samples, self._seed, number)
            for start in self._starts(batch if number == epoch else 0):
                share, total = self._share(start)
                indices = order[start : start + total][share]
                yield indices if len(indices) else order[start : start + 1]


class EvalLoader:
    """Every sample of `dataset` once over all replicas; shares may differ in length.

    Args:
        dataset: map-style, each replica takes a stretch of it; or iterable, see `StreamLoader`.
        batch_size: samples over all replicas.
        world: tells which replica this process belongs to.
        options: how batches are loaded.

    Attributes:
        samples: of this replica; None if it is not known.

    Raises:
        ConfigError: `batch_size` is not a positive number.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        options: LoaderOptions | None = None,
    ) -> None:
        check_batch_size(batch_size)
        self._dataset = dataset
        self._batch_size = max(1, batch_size // world.replicas)
        self._world = world
        self._options = options or LoaderOptions()
        self.samples: int | None = None
        if not is_stream(dataset):
            share = share_of(len(dataset), world.replica, world.replicas)
            self.samples = share.stop - share.start

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if is_stream(self._dataset):
            size, options = self._batch_size * self._world.replicas, self._options
            yield from StreamLoader(self._dataset, size, self._world, options=options).once()
            return
        total: int = len(self._dataset)
        mine = torch.arange(total)[share_of(total, self._world.replica, self._world.replicas)]
        batches = mine.split(self._batch_size) if len(mine) else ()
        yield from fetch(self._dataset, batches, self._options, self._world)


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns the order of an epoch, a function of the arguments alone."""
    generator = torch.Generator()
    # An odd multiplier keeps neighbouring seeds from sharing orders of neighbouring epochs.
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randperm(samples, generator=generator)
