"""Loaders of iterable data sets, divided over replicas and workers, with exact resume.

Every process that needs batches reads the same stream and keeps its own samples of each global
batch:

    stream     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13      batch_size=4, the last batch is short
    replica 0  0   2   | 4   6   | 8   10    | 12
    replica 1    1   3 |   5   7 |   9    11 |    13

With W worker processes, worker w loads the global batches w, w + W, ... for its replica. So the
batches are the same for any number of replicas and workers, and each process knows the length of
the stream. The cost is that every replica reads every sample. A data set that shards itself
(`divided=True`) avoids that, but then the replicas must agree on each batch (`agreement`). The
processes of a pipeline that have neither the first nor the last stage do not read: a message for
each batch tells them its number of samples.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import random
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hybridtrain._base.replica_shares import replica_of_samples
from hybridtrain._base.values import leaves_of
from hybridtrain.data.agreement import (
    AgreedLoader,
    Piece,
    begin_exchange,
    epochs_without_pieces,
    unread_batches,
)
from hybridtrain.data.fetch import (
    Failure,
    WatchedLoader,
    collated,
    name_of,
    prefetch,
    unless_failed,
    whole_batch,
)
from hybridtrain.data.loader import (
    Loader,
    Position,
    all_read,
    batches_in,
    has_shuffle_buffer,
    has_state,
    is_stream,
    reads_here,
)
from hybridtrain.data.same_data import digest_of
from hybridtrain.data.splits import length_of
from hybridtrain.errors import CheckpointError, DataError, argument, phrase, setting
from hybridtrain.world import World

_log = logging.getLogger(__name__)

# the number of samples that a stream's digest covers
_DIGESTED_SAMPLES = 16


def example_batch(dataset: Any, samples: int, collate: Callable[[Any], Any] | None) -> Any:
    """Returns the first `samples` of a data set as a batch `(inputs, targets)`.

    Raises:
        DataError: the data set has no samples, or they cannot be collated.
    """
    if not is_stream(dataset):
        indices = range(min(samples, len(dataset)))
        if len(indices):
            return whole_batch(dataset, indices, collate)
        raise DataError(f"{name_of(dataset)} has no samples")
    state_before = dataset.state_dict() if has_state(dataset) else None
    reader = _Reader(dataset)
    (items,), total = reader.take(samples, range(1), [0] * samples)
    if state_before is not None:
        dataset.load_state_dict(state_before)  # training must start from the original state
    unless_failed(reader.failure)
    if total == 0:
        raise DataError(f"{name_of(dataset)} has no samples")
    what = f"the first {total} samples of {name_of(dataset)}"
    return unless_failed(collated(items, collate or default_collate, dataset, what))


# The number of batches to compare if they differ in size.
_MOST_LOOKED_AT = 16


def largest_batch(
    dataset: Any, samples: int, collate: Callable[[Any], Any] | None, first: Any
) -> Any:
    """Returns the batch with the most bytes among batches from all parts of a data set.

    If samples differ in length, batches are padded to their longest sample, and the largest batch
    determines the memory of a run. If the first and the last batch have the same size, no further
    batches are read; otherwise about 16 are.

    Args:
        dataset: the data set; an iterable one is not read.
        samples: the number of samples of a batch.
        collate: the `collate_fn`; None: the default.
        first: the batch of the first samples, returned unless another batch is larger.

    Raises:
        DataError: a sample cannot be read.
    """
    if is_stream(dataset):
        return first
    starts = range(0, len(dataset) - samples + 1, max(1, len(dataset) // _MOST_LOOKED_AT))
    batches = [first]
    for number, start in enumerate(reversed(starts)):
        batches.append(whole_batch(dataset, range(start, start + samples), collate))
        if number == 0 and _bytes_of(batches[-1]) == _bytes_of(first):
            break
    return max(batches, key=_bytes_of)


def _bytes_of(batch: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))


class StreamLoader(AgreedLoader):
    """An endless stream of batches from an iterable data set, epoch after epoch: a `Loader`.

    Each `iter(dataset)` must start from the beginning and yield `(inputs, target)`. `set_epoch(e)`
    is called before each epoch if the data set defines it. If the data set has `state_dict` and
    `load_state_dict`, a resumed run continues from its state; otherwise, and if a Hugging Face
    stream has a shuffle buffer, the run reads the stream again up to its position, so the order of
    samples must be reproducible.

    Args:
        dataset: an iterable data set. A Hugging Face `IterableDataset` is divided by
            `split_dataset_by_node`, unless the caller has done so for the same replicas.
        batch_size: the number of samples of a global batch, over all replicas.
        world: determines the replica of this process.
        **settings: further arguments of `Loader`; `divided=True` if `dataset` shards itself.

    Attributes:
        batches_per_epoch: the number of batches per epoch; None if `dataset` has no length.

    Raises:
        DataError: `dataset` can be iterated over only once, or is divided for other replicas, or a
            batch has fewer samples than there are replicas that share `dataset`.
    """

    def __init__(self, dataset: Any, batch_size: int, world: World, **settings: Any) -> None:
        super().__init__(dataset, batch_size, world, **settings)
        if self.options.group_by_length:
            raise DataError(
                f"{setting('group_by_length', True)} needs a data set with access by index, and "
                f"{name_of(dataset)} is a stream: set {setting('group_by_length', False)}"
            )
        if not hasattr(dataset, "__iter__"):
            raise DataError(
                f"{name_of(dataset)} is not a data set: it needs `__getitem__` and `__len__`, or "
                f"`__iter__`"
            )
        if isinstance(dataset, Iterator):
            raise DataError(
                f"{name_of(dataset)} can be read only once: pass an object with an __iter__ that "
                f"starts from the beginning, such as an IterableDataset"
            )
        self._how_to_divide = (
            f"{setting('divided', True)} requires a data set that shards itself by the rank and by "
            f"torch.utils.data.get_worker_info(); do so, or set {setting('divided', False)}"
        )
        self.divided = self.options.divided
        if (limit := self.options.first_batches) is not None:
            if self.divided:
                raise DataError(
                    f"{setting('first_batches', limit)} requires a data set that does not shard "
                    f"itself, but {name_of(dataset)} does ({setting('divided', True)})"
                )
            dataset = self.dataset = _First(dataset, limit * batch_size)
        if self.divided and world.logical_replicas > world.data_parallel_size:
            raise DataError(
                f"{name_of(dataset)} shards itself over the processes "
                f"({setting('divided', True)}), but some of them run several of the "
                f"{world.logical_replicas} replicas: set {setting('divided', False)}, or start "
                f"one process per replica"
            )
        if self.divided and world.replica_shares is not None:
            raise DataError(
                f"{name_of(dataset)} shards itself equally over the replicas "
                f"({setting('divided', True)}), but "
                f"{setting('replica_shares', list(world.replica_shares))} gives them unequal "
                f"shares: set {setting('divided', False)}"
            )
        reads_all = bool(world.fixed_replicas or world.replica_shares)
        is_of_hub = type(dataset).__module__.partition(".")[0] == "datasets"
        if is_of_hub and reads_all and self.options.workers > 1:
            name = "replicas" if world.fixed_replicas else "replica_shares"
            raise DataError(
                f"{name_of(dataset)} shards itself over worker processes, but with "
                f"{argument(name)} each must read all samples: set {setting('workers', 1)}"
            )
        part = (0, 1) if reads_all else (world.data_parallel_rank, world.data_parallel_size)
        is_split = is_of_hub and self._is_split(part)
        # with a fixed number of replicas, or unequal ones, each process keeps its share of all
        if is_of_hub and not reads_all:
            from datasets.distributed import split_dataset_by_node

            self.divided = True  # it also shards itself over worker processes
            if not is_split:
                self.dataset = split_dataset_by_node(dataset, rank=part[0], world_size=part[1])
        self.has_state = has_state(self.dataset)
        if self.divided:
            # With several workers, the batches come from their parts by turns.
            batch = {"batch_size": batch_size} if self.options.workers > 1 else {}
            replicas, workers = world.data_parallel_size, self.options.workers
            self.order = {"replicas": replicas, "workers": workers, **batch}
        length = None if self.divided else length_of(dataset)
        if length is not None:
            self.batches_per_epoch = batches_in(length, batch_size, self.options)
        if self.divided and batch_size < world.data_parallel_size:
            raise DataError(
                f"{setting('batch_size', batch_size)} is less than one sample for each of the "
                f"{world.data_parallel_size} replicas that share {name_of(dataset)}: raise it"
            )

    def order_of_shares(self, total: int) -> Tensor | None:
        """See `Loader.order_of_shares`."""
        if self.divided or self._world.logical_replicas == 1:
            return None
        replica_of = torch.tensor(replica_of_samples(total, self._world.shares))
        return replica_of.argsort(stable=True).argsort()

    def _is_split(self, part: tuple[int, int]) -> bool:
        """Returns whether `split_dataset_by_node` has divided the data set, into the same parts.

        Raises:
            DataError: the data set is another part than `part`, the rank and the number of parts.
        """
        split = getattr(self.dataset, "_distributed", None)
        if split is None or split.world_size == 1:
            return False
        if (split.rank, split.world_size) != part:
            raise DataError(
                f"{name_of(self.dataset)} is part {split.rank} of {split.world_size} by "
                f"split_dataset_by_node, but this replica must read part {part[0]} of {part[1]}: "
                f"pass the data set that is not divided"
            )
        return True

    def _epochs(
        self, start: Position, drop_last: bool | None = None
    ) -> Generator[Generator[Piece, None, None], None, None]:
        # The same thread or worker processes load the batches of all epochs.
        options, name = self.options, name_of(self.dataset)
        part = _StreamPart(
            self.dataset,
            self.divided,
            self.batch_size,
            self._world.owned_replicas,
            replica_of_samples(self.batch_size, self._world.shares),
            options.collate or default_collate,
            options.drop_last if drop_last is None else drop_last,
            self._seed,
            start,
        )
        # One for all epochs: a worker keeps its data set, and so its state.
        watched = WatchedLoader(
            part, options, self._world, lambda _: f"a batch of {name}",
            batch_size=None, persistent_workers=options.workers > 0,
        )  # fmt: skip
        if start.batch and has_shuffle_buffer(self.dataset) and self._world.is_main:
            _log.info(
                "reading %s again up to batch %d, because its state lacks its shuffle buffer; to "
                "avoid this, shuffle the list of its files instead of calling shuffle(), or use a "
                "map-style data set",
                name, start.batch,
            )  # fmt: skip
        # A data set that is not divided is skipped in the workers, which then need not collate.
        skip = start.batch if self.divided and not start.states else 0
        try:
            while True:
                yield self._pieces(watched, skip)
                skip = 0
        finally:
            watched.close()

    def _pieces(self, watched: WatchedLoader, skip: int) -> Generator[Piece, None, None]:
        digests: dict[int, int] = {}  # by worker
        with closing(prefetch(watched)) as pieces:
            for number, piece in enumerate(pieces):
                # A text stands for a turn of a worker, see `_StreamPart`.
                if not isinstance(piece, Piece) or number < skip:
                    continue
                # Only the first piece of each worker has read the samples that a digest covers.
                if piece.worker not in digests:
                    digests[piece.worker] = piece.digest
                    self._compare(list(digests.values()), "worker processes")
                yield piece

    def once(
        self, readers: Collection[int] | None = None
    ) -> Generator[tuple[int, Any], None, None]:
        """Yields `(inputs, targets)` of one epoch with their replica, without dropping any.

        Replicas may have different numbers of batches. For `readers` see `Loader.stream`.
        """
        if reads_here(readers, self._world):
            epochs = self._epochs(Position(), drop_last=False)
        else:
            epochs = epochs_without_pieces()
        with closing(epochs):
            pieces = next(epochs)
            piece = next(pieces, None)
            # A collective call: also of processes that do not read, and of those without samples.
            if self._world.data_parallel_size > 1:
                self._compare(self._gather_by_replica(0 if piece is None else piece.digest))
            while (part := self._known_piece(piece, readers)) is not None:
                owned = zip(self._world.owned_replicas, part.batches, part.samples, strict=True)
                for replica, batch, samples in owned:
                    if samples:
                        yield replica, batch
                piece = next(pieces, None)

    def _known_piece(self, piece: Piece | None, readers: Collection[int] | None) -> Piece | None:
        """Returns `piece`, or, in a process that does not read, one of equal `Unread` batches."""
        # The same answer in all processes, so all exchange, or none.
        if all_read(readers, self._world):
            return piece
        begin, owned = self._world.begin_max_in_pipeline, self._world.owned_replicas
        counts, _, _, sizes = begin_exchange(self._world, begin, True, piece)()
        if reads_here(readers, self._world) or not any(sizes):
            return piece
        return Piece(unread_batches(sizes, owned), [counts[i] for i in owned])

    def _gathered_states(self, at: Position) -> list[Any]:
        states = {worker: pickle.loads(state) for worker, state in at.states.items()}
        # Every reader has read the same samples, so one state stands for all.
        if not self.divided:
            return [states.get(-1)]
        local_state = {"worker": at.worker, "states": states, "workers": self.options.workers}
        return self._gather_by_replica(local_state)

    def _local_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        if not self.divided:
            return {} if states[0] is None else {-1: pickle.dumps(states[0])}, 0
        current = (self._world.data_parallel_size, self.options.workers)
        saved = (len(states), states[0].get("workers") if states[0] else None)
        if current != saved:
            raise CheckpointError(
                f"{name_of(self.dataset)} shards itself, and the checkpoint has its state for "
                f"{saved[0]} replicas with {setting('workers', saved[1])}, not for {current[0]} "
                f"with {setting('workers', current[1])}: resume with the same numbers, or "
                f"{phrase('start a new run')}"
            )
        local_state = states[self._world.data_parallel_rank]
        return {int(i): pickle.dumps(x) for i, x in local_state["states"].items()}, local_state[
            "worker"
        ]


Loader.for_streams = StreamLoader


@dataclass(eq=False)
class _First(IterableDataset[Any]):
    """The first samples of a stream."""

    dataset: Any
    samples: int

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.dataset), self.samples)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


@dataclass(eq=False)
class _StreamPart(IterableDataset[Any]):
    """Creates a process's pieces of each epoch; runs in the worker processes."""

    dataset: Any
    divided: bool
    batch_size: int
    owned: range
    replica_of: Sequence[int]
    collate: Callable[[Any], Any]
    drop_last: bool
    seed: int
    start: Position

    def __iter__(self) -> Iterator[Any]:
        # Called once per epoch, in the worker: PyTorch sends the data set only when a worker
        # starts.
        start, self.start = self.start, Position(self.start.epoch + 1)
        return self._pieces(start)

    def _pieces(self, start: Position) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            reader_id = (self.owned.start, worker) if self.divided else (0, 0)
            # Of integers, so it is the same in every process.
            seed = hash((self.seed, start.epoch, *reader_id)) & 0x7FFF_FFFF
            for seed_generator in (torch.manual_seed, random.seed, np.random.seed):
                seed_generator(seed)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(start.epoch)
        state = start.states.get(worker, start.states.get(-1))
        if state is not None:
            saved = pickle.loads(state)
            self.dataset.load_state_dict(saved["state"])
            if saved["ended"]:
                return  # the epoch is over; iterating would begin the next one
        reader = _Reader(self.dataset)
        if not self.divided and state is None:
            reader.take(start.batch * self.batch_size)
        # PyTorch asks worker 0 first; worker `start.worker` has the next batch.
        if self.divided and worker < start.worker % workers:
            yield "a turn"  # this worker had its turn before the state was saved
        # A data set that shards itself gives this worker only its samples. From any other, the
        # worker makes this replica's share of the global batches `worker`, `worker + workers`, ...
        size, owned, replica_of = self.batch_size, self.owned, self.replica_of
        turns = workers
        if self.divided:
            size = replica_of.count(owned.start)
            owned, replica_of, turns = range(1), [0] * size, 1
        for number in itertools.count():
            is_mine = number % turns == worker % turns
            samples, total = reader.take(size, owned if is_mine else range(0), replica_of)
            # Only in the worker whose batch it is, so that one error is reported once, in its
            # place.
            if reader.failure is not None and (is_mine or total == 0):
                yield reader.failure
                return
            if total == 0 or (total < size and self.drop_last):
                return
            if is_mine:
                counts = [replica_of[:total].count(replica) for replica in owned]
                yield self._piece(reader, samples, counts, None if self.divided else total, worker)

    def _piece(
        self,
        reader: _Reader,
        samples: list[list[Any]],
        counts: list[int],
        total: int | None,
        worker: int,
    ) -> Any:
        state = None
        if has_state(self.dataset):
            saved = {"state": self.dataset.state_dict(), "ended": reader.ended}
            state = pickle.dumps(saved)  # pickle now, because the data set advances
        batches = []
        for part in samples:
            what = f"{len(part)} samples of {name_of(self.dataset)}, before sample {reader.read}"
            batches.append(collated(part, self.collate, self.dataset, what))
            if isinstance(batches[-1], Failure):
                return batches[-1]
        return Piece(batches, counts, total, reader.digest, worker, state)


class _Reader:
    """Reads the samples of a data set in order.

    Attributes:
        read: the number of samples read so far.
        first: the first few samples.
        failure: the failure of a sample that could not be read, or None.
        ended: whether the data set is exhausted.
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
            self.failure = Failure.of(f"cannot iterate over {self._name}", error)

    @cached_property
    def digest(self) -> int:
        """The digest of the first samples that were read before the first access."""
        return digest_of(self.first)

    def take(
        self, count: int, owned: range = range(0), replica_of: Sequence[int] = ()
    ) -> tuple[list[list[Any]], int]:
        """Reads samples of a global batch.

        Args:
            count: the number of samples to read.
            owned: the replicas to keep samples of.
            replica_of: the replica of each sample; without `owned` not needed.

        Returns:
            the samples of each replica, and the number of samples read. A replica without samples
            gets the first one as padding.
        """
        samples: dict[int, list[Any]] = {replica: [] for replica in owned}
        spare: Any = None
        number = 0
        while number < count:
            try:
                sample = next(self._samples)
            except Exception as error:
                self.ended = isinstance(error, StopIteration)
                if not self.ended:
                    what = f"sample {self.read} of {self._name} cannot be read"
                    self.failure = Failure.of(what, error)
                break
            self.read += 1
            if len(self.first) < min(_DIGESTED_SAMPLES, count):
                self.first.append(sample)
            if samples and replica_of[number] in samples:
                samples[replica_of[number]].append(sample)
            if number == 0:
                spare = sample
            number += 1
        return [part or [spare] for part in samples.values()], number
