"""Iterable data sets, such as streams: divided over replicas and workers, and resumed exactly.

Every process reads the same stream and keeps its own samples of each global batch:

    stream     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      batch_size=4, the last batch is short
    replica 0  0   2   | 4   6   | 8   10    | 12
    replica 1    1   3 |   5   7 |   9    11 |    13

With worker processes, number w of W makes the global batches w, w + W, ... of its replica. So the
batches are the same for any number of replicas and workers, and each can tell how long the stream
is. What it costs is that a sample is read in every process; a data set that divides itself
(`divided=True`) avoids that, and then the replicas must agree on each batch (see `agreement`).
"""

from __future__ import annotations

import itertools
import logging
import pickle
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hybridtrain.data.agreement import Piece, agreed, digest_of
from hybridtrain.data.faults import Failure, name_of, unless_failed
from hybridtrain.data.fetch import WatchedLoader, collated, prefetch, whole_batch
from hybridtrain.data.loader import (
    Batch,
    Loader,
    Position,
    batches_in,
    has_state,
    is_stream,
    length_of,
    share_of,
)
from hybridtrain.errors import CheckpointError, DataError
from hybridtrain.launch.activity import activity
from hybridtrain.options import LoaderOptions
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# as many samples tell two streams apart
_DIGESTED_SAMPLES = 16


def example_batch(dataset: Any, samples: int, collate: Callable[[Any], Any] | None) -> Any:
    """Returns the first `samples` of a data set as a batch `(inputs, targets)`.

    Raises:
        DataError: there are none, or they make no batch.
    """
    if not is_stream(dataset):
        there = range(min(samples, len(dataset)))
        if len(there):
            return whole_batch(dataset, there, collate)
        raise DataError(f"{name_of(dataset)} has no samples")
    before = dataset.state_dict() if has_state(dataset) else None
    reader = _Reader(dataset)
    items, total = reader.take(samples, 0, 1, keep=True)
    if before is not None:
        dataset.load_state_dict(before)  # training begins where the data set stood
    unless_failed(reader.failure)
    if total == 0:
        raise DataError(f"{name_of(dataset)} has no samples")
    what = f"the first {total} samples of {name_of(dataset)}"
    return unless_failed(collated(items, collate or default_collate, dataset, what))


class StreamLoader(Loader):
    """An endless stream of batches from an iterable data set, epoch after epoch: a `Loader`.

    `dataset` is anything whose `iter()` starts anew and yields `(inputs, target)`. `set_epoch(e)`
    is called before each epoch if it is there. With `state_dict` and `load_state_dict` a resumed
    run continues where it was; without them it reads up to there again, so the samples must come in
    the same order.

    Args:
        dataset: iterable; or a Hugging Face `IterableDataset`, which is divided by its own means.
        batch_size: see `Loader`, as for all others.
        world: tells which replica this process belongs to.
        **settings: `divided=True` if `dataset` divides itself.

    Attributes:
        batches_per_epoch: None where `dataset` has no length.

    Raises:
        DataError: `dataset` can be iterated over only once, or there are fewer samples in a batch
            than replicas that `dataset` is divided over.
    """

    def __init__(self, dataset: Any, batch_size: int, world: World, **settings: Any) -> None:
        super().__init__(dataset, batch_size, world, **settings)
        self.dataset, self.divided = _divide(dataset, world, self.options)
        self.has_state = has_state(self.dataset)
        length = None if self.divided else length_of(dataset)
        if length is not None:
            self.batches_per_epoch = batches_in(length, batch_size, self.options)
        if self.divided and batch_size < world.replicas:
            raise DataError(
                f"batch_size={batch_size} is less than a sample for each of the {world.replicas} "
                f"replicas that {name_of(dataset)} is divided over"
            )

    def _batches_from(self, start: Position) -> Generator[tuple[Batch, Position], None, None]:
        if not start.states:
            start = start.next
        if start.batch:
            activity.catching_up()
        with closing(_Source(self, start)) as source:
            if start.ended:  # the states are of the epoch before
                for _ in source.epoch(0):
                    pass
            skip = start.batch if self.divided and not start.states else 0
            at = start.next
            while True:
                yield from self._epoch(source, at, skip)
                at, skip = Position(at.epoch + 1), 0

    def once(self) -> Generator[Any, None, None]:
        """Yields this replica's `(inputs, targets)` of one pass, of which none is left out."""
        with closing(_Source(self, Position(), drop_last=False)) as source:
            pieces = source.epoch(0)
            piece = next(pieces, None)
            if self._world.replicas > 1:
                found = self._world.gather(0 if piece is None else piece.digest)
                self._compare(found[:: self._world.processes_per_replica])
            while piece is not None:
                if piece.samples:
                    yield piece.batch
                piece = next(pieces, None)

    def _epoch(
        self, source: _Source, start: Position, skip: int
    ) -> Generator[tuple[Batch, Position], None, None]:
        """Yields the batches of an epoch from `start` on, each with the position after it."""
        name, at = name_of(self.dataset), start
        full = self.batch_size if self.options.drop_last else 1
        with closing(source.epoch(skip)) as pieces:
            for batch, piece in agreed(
                pieces, self._world, name, at_least=full, check=self._compare
            ):
                at = replace(at, batch=at.batch + 1, ended=batch.last)
                if piece is not None and piece.state is not None:
                    # Who reads all samples is as far as any other: one state is for all workers.
                    key, worker = (piece.worker, piece.worker + 1) if self.divided else (-1, 0)
                    states = {**at.states, key: piece.state}
                    at = replace(at, states=states, worker=worker)
                yield batch, at
        if at == start:
            raise DataError(
                f"{name} gave less than one batch of samples in epoch {at.epoch}, after {at.batch} "
                f"batches (batch_size={self.batch_size}): lower it, set drop_last=False, or see "
                f"that its __iter__ starts anew"
            )
        if self.batches_per_epoch not in (None, at.batch):
            _log.warning(
                "%s has a length of %s batches, and gave %d in epoch %d",
                name, self.batches_per_epoch, at.batch, at.epoch,
            )  # fmt: skip

    def _compare(self, digests: list[int], readers: str = "replicas") -> None:
        """Checks that several readers have read the same first samples, or each its own.

        Raises:
            DataError: they have not.
        """
        name = name_of(self.dataset)
        if self.divided and len(set(digests) - {0}) < len(digests) - digests.count(0):
            raise DataError(
                f"{name} is to divide itself (divided=True), and gives several {readers} the same "
                f"samples: divide it by the rank and by torch.utils.data.get_worker_info(), or set "
                f"divided=False"
            )
        if not self.divided and len(set(digests)) > 1:
            raise DataError(
                f"the {readers} read different samples from {name}, and each is to read all of "
                f"them: if it divides itself over them, set divided=True; if it shuffles, it must "
                f"do so with its own generator, from a fixed seed and the epoch"
            )

    def _gathered(self, at: Position) -> list[Any]:
        states = {worker: pickle.loads(state) for worker, state in at.states.items()}
        if not self.divided:
            return [states.get(-1)]
        mine = {"worker": at.worker, "states": states, "workers": self.options.workers}
        return self._world.gather(mine)[:: self._world.processes_per_replica]

    def _own_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        if not self.divided:
            return {} if states[0] is None else {-1: pickle.dumps(states[0])}, 0
        now = (self._world.replicas, self.options.workers)
        then = (len(states), states[0].get("workers") if states[0] else None)
        if now != then:
            raise CheckpointError(
                f"{name_of(self.dataset)} divides itself, and its state in the checkpoint is "
                f"that of {then[0]} replicas with workers={then[1]}, not of {now[0]} with "
                f"workers={now[1]}: go on with as many, or start a new run"
            )
        own = states[self._world.replica]
        return {int(i): pickle.dumps(x) for i, x in own["states"].items()}, own["worker"]


class _Source:
    """The pieces of epoch after epoch, by a thread or by worker processes that live as long."""

    def __init__(
        self, loader: StreamLoader, start: Position, drop_last: bool | None = None
    ) -> None:
        options, name = loader.options, name_of(loader.dataset)
        self._device = loader._world.devices[0]
        self._compare = loader._compare
        part = _StreamPart(
            loader.dataset,
            loader.divided,
            loader.batch_size,
            loader._world.replica,
            loader._world.replicas,
            options.collate or default_collate,
            options.drop_last if drop_last is None else drop_last,
            loader._seed,
            start,
        )
        generator = torch.Generator()
        generator.manual_seed(loader._world.replica)
        batches: DataLoader[Any] = DataLoader(
            part,
            batch_size=None,
            num_workers=options.workers,
            timeout=options.timeout_s if options.workers else 0,
            generator=generator,
            pin_memory=self._device.type == "cuda",
            persistent_workers=options.workers > 0,
        )
        self._watched = WatchedLoader(batches, options, lambda _: f"a batch of {name}")

    def epoch(self, skip: int) -> Generator[Piece, None, None]:
        """Yields the pieces of the next epoch, without the first `skip`."""
        digests: dict[int, int] = {}  # by worker
        with closing(prefetch(self._watched, self._device)) as pieces:
            for number, piece in enumerate(pieces):
                if not isinstance(piece, Piece) or number < skip:
                    continue
                if piece.worker not in digests:
                    digests[piece.worker] = piece.digest
                    self._compare(list(digests.values()), "worker processes")
                yield piece

    def close(self) -> None:
        """Ends the worker processes."""
        self._watched.close()


@dataclass(eq=False)
class _StreamPart(IterableDataset[Any]):
    """A process's pieces of each epoch, as ready batches; runs in the workers."""

    dataset: Any
    divided: bool
    batch_size: int
    replica: int
    replicas: int
    collate: Callable[[Any], Any]
    drop_last: bool
    seed: int
    start: Position

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, Position(self.start.epoch + 1)
        return self._pieces(start)

    def _pieces(self, start: Position) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            own = (self.replica, worker) if self.divided else (0, 0)
            _seed_all(hash((self.seed, start.epoch, *own)) & 0x7FFF_FFFF)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(start.epoch)
        state = start.states.get(worker, start.states.get(-1))
        if state is not None:
            saved = pickle.loads(state)
            self.dataset.load_state_dict(saved["state"])
            if saved["ended"]:
                return  # this epoch; an iteration would begin the next
        reader = _Reader(self.dataset)
        if self.divided:
            if worker < start.worker % workers:
                yield "a turn"  # that it had taken before the state was saved
            yield from self._own_pieces(reader, worker)
        else:
            if state is None:
                reader.skip(start.batch * self.batch_size)
            yield from self._shared_pieces(reader, worker, workers)

    def _shared_pieces(self, reader: _Reader, worker: int, workers: int) -> Iterator[Any]:
        """Yields the pieces of the global batches `worker`, `worker + workers`, ..."""
        for number in itertools.count():
            mine = number % workers == worker
            samples, total = reader.take(self.batch_size, self.replica, self.replicas, mine)
            if reader.failure is not None and (mine or total == 0):
                yield reader.failure
                return
            if total == 0 or (total < self.batch_size and self.drop_last):
                return
            if mine:
                counts = len(range(self.replica, total, self.replicas))
                yield self._piece(reader, samples, counts, total, worker)

    def _own_pieces(self, reader: _Reader, worker: int) -> Iterator[Any]:
        """Yields pieces of all samples that the data set gives this process."""
        share = share_of(self.batch_size, self.replica, self.replicas)
        size = share.stop - share.start
        while True:
            samples, total = reader.take(size, 0, 1, True)
            if reader.failure is not None:
                yield reader.failure
                return
            if total == 0 or (total < size and self.drop_last):
                return
            yield self._piece(reader, samples, total, None, worker)

    def _piece(
        self, reader: _Reader, samples: list[Any], counts: int, total: int | None, worker: int
    ) -> Any:
        state = None
        if has_state(self.dataset):
            saved = {"state": self.dataset.state_dict(), "ended": reader.ended}
            state = pickle.dumps(saved)  # now, since the data set goes on
        what = f"{len(samples)} samples of {name_of(self.dataset)}, before sample {reader.read}"
        batch = collated(samples, self.collate, self.dataset, what)
        if isinstance(batch, Failure):
            return batch
        return Piece(batch, counts, total, reader.digest, worker, state)


class _Reader:
    """The samples of a data set, in order.

    Attributes:
        read: how many were read.
        first: a few of the first.
        failure: what happened when a sample could not be read.
        ended: whether the data set has been asked for more than there is.
    """

    def __init__(self, dataset: Any) -> None:
        self.read = 0
        self.first: list[Any] = []
        self.failure: Failure | None = None
        self.ended = False
        self._name = name_of(dataset)
        try:
            self._samples = iter(dataset)
        except Exception as error:
            self._samples = iter(())
            self.failure = Failure.of(f"{self._name} cannot be iterated over", error)

    @cached_property
    def digest(self) -> int:
        """The digest of the first samples, those that were read when it is first asked for."""
        return digest_of(self.first)

    def take(self, count: int, offset: int, stride: int, keep: bool) -> tuple[list[Any], int]:
        """Reads `count` samples; returns those of this replica, and how many there were.

        Where it has none of them it gets the first, so that it can take part in the step.
        """
        kept: list[Any] = []
        spare: Any = None
        for number in range(count):
            try:
                sample = next(self._samples)
            except StopIteration:
                self.ended = True
                return (kept or [spare], number)
            except Exception as error:
                what = f"sample {self.read} of {self._name} cannot be read"
                self.failure = Failure.of(what, error)
                return (kept or [spare], number)
            self.read += 1
            if len(self.first) < min(_DIGESTED_SAMPLES, count):
                self.first.append(sample)
            if keep and number % stride == offset:
                kept.append(sample)
            elif keep and number == 0:
                spare = sample
        return (kept or [spare], count)

    def skip(self, count: int) -> None:
        """Reads `count` samples."""
        while count > 0:
            _, there = self.take(min(count, 1024), 0, 1, False)
            if there == 0:
                return
            count -= there


def _divide(dataset: Any, world: World, options: LoaderOptions) -> tuple[Any, bool]:
    """Returns the data set as this replica iterates over it, and whether it divides itself.

    Raises:
        DataError: it can be iterated over only once, or not at all.
    """
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            f"{name_of(dataset)} is not a data set: it needs `__getitem__` and `__len__`, or an "
            f"`__iter__`"
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{name_of(dataset)} can be read only once: pass an object whose __iter__ starts anew, "
            f"such as an IterableDataset"
        )
    if type(dataset).__module__.partition(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        mine = split_dataset_by_node(dataset, rank=world.replica, world_size=world.replicas)
        return mine, True  # over the worker processes it divides itself too
    return dataset, options.divided


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
