"""Which rows each replica gets, in which order, and how they arrive in time.

The order of an epoch is one permutation of the whole data set, drawn from (seed, epoch) alone. It
is cut into global batches, and each of these into one share a replica. So the same rows meet in
the same optimizer step whatever the number of processes, and every replica takes as many steps as
the others, whatever the length of the data set.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from hybridtrain.data.splits import InMemoryDataset
from hybridtrain.errors import DataError
from hybridtrain.world import World

T = TypeVar("T")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """One replica's share of a global batch.

    TraceGuards:
        inputs: a pytree of tensors with the rows in dim 0.
        targets: likewise.
        samples: how many rows of the share count. 0 where a global batch has fewer rows than there
            are replicas: then one row that must count for nothing stands in, because every
            replica has to take part in the step.
        total: the rows of the global batch.
    """

    inputs: Any
    targets: Any
    samples: int
    total: int


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are fetched.

    TraceGuards:
        workers: processes that fetch batches; 0: a thread of this process.
        timeout_s: how long to wait for a worker before it is an error.
        collate: from a list of items to a batch; None: torch's default.
    """

    workers: int = 0
    timeout_s: float = 120.0
    collate: Callable[[Any], Any] | None = None

    def fetch(
        self, dataset: Dataset[Any], batches: Iterable[list[int]], world: World
    ) -> Generator[Any, None, None]:
        """Yields the `batches`, lists of row numbers, of `dataset`, fetched ahead of time."""
        device = world.devices[0]
        if isinstance(dataset, InMemoryDataset) and dataset.immediate and device.type == "cpu":
            return (dataset.__getitems__(rows) for rows in batches)
        # its workers' seeds come from here, not from the default generator
        generator = torch.Generator()
        generator.manual_seed(world.rank)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=self.workers,
            timeout=self.timeout_s if self.workers else 0,
            collate_fn=self.collate,
            generator=generator,
            pin_memory=device.type == "cuda",
        )
        return prefetch((batch for batch in loader), device=device)


class TrainLoader:
    """An endless stream of batches, epoch after epoch, that can start anywhere.

    Args:
        dataset: map-style; items are `(inputs, target)`.
        batch_size: rows of a global batch, over all replicas.
        world: who this replica is.
        seed: what the order is drawn from.
        drop_last: leave out a last batch that is not full.
        options: how batches are fetched.

    Raises:
        DataError: there is not one batch in the data set.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        world: World,
        *,
        seed: int = 0,
        drop_last: bool = False,
        options: LoaderOptions = LoaderOptions(),
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.samples = len(dataset)  # type: ignore[arg-type]
        self._world = world
        self._seed = seed
        self._options = options
        full, rest = divmod(self.samples, batch_size)
        self.batches_per_epoch = full + (rest > 0 and not drop_last)
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the training data has {self.samples} rows, less than one batch of "
                f"data.batch_size={batch_size}: lower it, or set data.drop_last=false"
            )

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on, fetched ahead of time."""
        plan = _Plan(self, epoch, batch)
        fetched = self._options.fetch(self.dataset, plan, self._world)
        try:
            for (inputs, targets), (share, total) in zip(fetched, plan.shares(), strict=False):
                yield Batch(inputs, targets, share.stop - share.start, total)
        finally:
            fetched.close()


@dataclass(frozen=True)
class _Plan:
    """The row numbers of this replica's batches; also a torch batch sampler."""

    loader: TrainLoader
    epoch: int
    batch: int

    def shares(self) -> Iterator[tuple[slice, int]]:
        """For each batch, this replica's part of the global batch, and the rows of the whole."""
        size, rows, world = self.loader.batch_size, self.loader.samples, self.loader._world
        batch = self.batch
        while True:
            for start in range(batch, self.loader.batches_per_epoch):
                total = min(size, rows - start * size)
                yield share_of(total, world.rank, world.size), total
            batch = 0

    def __iter__(self) -> Iterator[list[int]]:
        epoch, batch = self.epoch, self.batch
        order = permutation(self.loader.samples, self.loader._seed, epoch)
        for share, total in self.shares():
            if batch == self.loader.batches_per_epoch:
                epoch, batch = epoch + 1, 0
                order = permutation(self.loader.samples, self.loader._seed, epoch)
            start = batch * self.loader.batch_size
            rows = order[start : start + total][share]
            yield (rows if len(rows) else order[start : start + 1]).tolist()
            batch += 1


class EvalLoader:
    """Every row of `dataset` once over all replicas, in order; replicas may differ in length."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        world: World,
        *,
        options: LoaderOptions = LoaderOptions(),
    ) -> None:
        self._dataset = dataset
        self._batch_size = max(1, batch_size // world.size)
        self._world = world
        self._options = options

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        total: int = len(self._dataset)  # type: ignore[arg-type]
        mine = range(total)[share_of(total, self._world.rank, self._world.size)]
        batches = [
            list(mine[start : start + self._batch_size])
            for start in range(0, len(mine), self._batch_size)
        ]
        yield from self._options.fetch(self._dataset, batches, self._world)


def share_of(total: int, rank: int, size: int) -> slice:
    """The rows of `total` that replica `rank` of `size` takes; shares differ by 1 at most."""
    small, larger = divmod(total, size)
    start = rank * small + min(rank, larger)
    return slice(start, start + small + (rank < larger))


def permutation(rows: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch; a function of its arguments alone."""
    generator = torch.Generator()
    # an odd multiplier, so that neighbouring seeds do not share orders of neighbouring epochs
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randperm(rows, generator=generator)


def prefetch(
    source: Iterator[T], depth: int = 2, device: torch.device = _CPU
) -> Generator[T, None, None]:
    """Yields from `source`, which a thread runs up to `depth` items ahead.

    An exception of `source` comes out where its item would have been. `device` is where the items
    go: pinning memory for a GPU wants it to be the thread's current one.
    """
    ready: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    credits: SimpleQueue[None] = SimpleQueue()  # one for each item that may be fetched
    for _ in range(depth):
        credits.put(None)
    stopped = Event()

    def fill() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            while True:
                credits.get()
                if stopped.is_set():
                    return
                ready.put((next(source), None))
        except BaseException as error:
            # torch re-raises a worker's exception in a reference cycle, which would keep the
            # workers until a collection, and then end them the slow way
            traceback.clear_frames(error.__traceback__)
            ready.put((None, error))

    thread = Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # the same cycle, in this frame
            credits.put(None)
            yield item  # type: ignore[misc]
            del item  # or this frame would keep it while the next one is waited for
    finally:
        stopped.set()
        credits.put(None)
        thread.join()
