"""Loaders for replicas that do not know each other's sample counts and agree batch by batch.

`AgreedLoader` implements the agreement. Its subclasses are `OwnLoader`, for a user's loader, and
`StreamLoader`.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from abc import abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.microbatch import Unread, batch_size
from hybridtrain.data.fetch import check_pair, name_of
from hybridtrain.data.loader import (
    Batch,
    Loader,
    Position,
    all_read,
    batch_of_shares,
    has_state,
    reads_here,
)
from hybridtrain.data.same_data import digest_of
from hybridtrain.data.splits import length_of
from hybridtrain.errors import CheckpointError, DataError, argument, phrase, setting
from hybridtrain.launch import activity
from hybridtrain.world import World

_log = logging.getLogger(__name__)


# the keys of the states of generators in a checkpoint
_GENERATORS = {"torch", "python", "numpy"}


class Piece(NamedTuple):
    """A process's part of a global batch.

    Attributes:
        batches: `(inputs, targets)` for each logical replica of the process.
        samples: for each replica the number of samples that count; 0 for a padding batch.
        total: the number of samples of the global batch, if this replica knows it.
        digest: the digest of the first samples read, to compare with other readers.
        worker: the index of the worker process that made it.
        state: the pickled state of the data set after this batch, if it has one.
    """

    batches: Sequence[Any]
    samples: Sequence[int]
    total: int | None = None
    digest: int = 0
    worker: int = 0
    state: bytes | None = None


class AgreedLoader(Loader):
    """A `Loader` for replicas that do not know each other's sample counts.

    Attributes:
        divided: whether each replica and worker reads different samples, with a separate state.
    """

    divided = True
    _how_to_divide: str

    @abstractmethod
    def _epochs(self, start: Position) -> Generator[Generator[Piece, None, None], None, None]:
        """Yields, for each epoch from `start.epoch` on, a generator of its pieces.

        The first epoch starts from the states of `start` or, without states, from its batch.
        """

    def _gather_by_replica(self, value: Any) -> list[Any]:
        """Returns the value of the first process of each replica, which reads the data."""
        values, world = self._world.gather(value), self._world
        return [values[world.rank_of(replica, 0)] for replica in range(world.data_parallel_size)]

    def _compare(self, digests: list[int], noun: str = "replicas") -> None:
        """Checks that the readers' first samples are equal, or all different if divided.

        Args:
            digests: the digest of each reader's first samples; 0 for a reader without samples.
            noun: the noun for the readers in messages.

        Raises:
            DataError: they are not.
        """
        name = name_of(self.dataset)
        # Zeros are readers without samples, and may be several.
        if self.divided and len(set(digests) - {0}) < len(digests) - digests.count(0):
            raise DataError(
                f"several {noun} read the same samples from {name}: {self._how_to_divide}"
            )
        if not self.divided and len(set(digests)) > 1:
            raise DataError(
                f"the {noun} read different samples from {name}, but each must read all of "
                f"them. If the data set shards itself, set {setting('divided', True)}; if it "
                "shuffles, use its own generator, seeded from a fixed seed and the epoch"
            )

    def _batches_from(
        self, start: Position, readers: Collection[int] | None
    ) -> Generator[tuple[Batch, Position], None, None]:
        reads = reads_here(readers, self._world)
        if not reads:  # only a reader can follow the states
            start = replace(start, states={}, worker=0)
        if not start.states or (start.ended and self._state_begins_epoch):
            start = start.next
        if start.batch:
            activity.catching_up()
        name, at = name_of(self.dataset), start.next
        with closing(self._epochs(start) if reads else epochs_without_pieces()) as epochs:
            if start.ended:  # its states are at the end of the previous epoch
                for _ in next(epochs):
                    pass
            for epoch in epochs:
                first = at.batch
                with closing(epoch):
                    for batch, piece in self._agreed(epoch, readers):
                        at = replace(at, batch=at.batch + 1, ended=batch.last)
                        if piece is not None and piece.state is not None:
                            at = self._with_state(at, piece.worker, piece.state)
                        yield batch, at
                # On all replicas alike, since they agree on the number of batches. Otherwise this
                # would loop forever.
                if at.batch == first:
                    raise DataError(
                        f"{name} yielded less than one batch of samples in epoch {at.epoch}, after "
                        f"{first} batches: make sure that its __iter__ starts again from the "
                        f"beginning, lower {argument('batch_size')} ({self.batch_size}), or set "
                        f"{setting('drop_last', False)}"
                    )
                if self.batches_per_epoch not in (None, at.batch):
                    _log.warning(
                        "%s has a length of %s batches, but yielded %d in epoch %d",
                        name, self.batches_per_epoch, at.batch, at.epoch,
                    )  # fmt: skip
                at = Position(at.epoch + 1)

    def _with_state(self, at: Position, worker: int, state: bytes) -> Position:
        """Returns `at` with the state of the data set after a batch that `worker` made."""
        if self.divided:
            return replace(at, states={**at.states, worker: state}, worker=worker + 1)
        return replace(at, states={-1: state})  # every reader reads all samples up to this state

    def _agreed(
        self, pieces: Iterator[Piece], readers: Collection[int] | None
    ) -> Iterator[tuple[Batch, Piece | None]]:
        """Yields this replica's batches of one epoch, the same number on every replica.

        Each batch comes with the piece it was made from, or None once this replica has run out, and
        in a process that does not read.

        The replicas exchange their sample counts for this batch and the next in one message of a
        few bytes, which overlaps with the use of the previous batch. A replica that has run out
        continues with padding batches until all have run out, so no sample is lost or repeated.
        Processes that do not read learn the counts from the same message.

        Raises:
            DataError: the replicas have read different streams.
        """
        # with drop_last, the epoch ends before an incomplete batch
        at_least = self.batch_size if self.options.drop_last else 1
        owned = self._world.owned_replicas
        reads, every = reads_here(readers, self._world), all_read(readers, self._world)
        is_alone = every and self._world.data_parallel_size == 1
        begin = None if is_alone else self._world.begin_max
        exchange = partial(begin_exchange, self._world, begin, not every)
        # Two pieces ahead: a batch must know whether it is the last one of its epoch.
        piece = next(pieces, None)
        following = next(pieces, None) if piece else None
        # In the same order in all processes: this is a collective of the group of objects.
        message = exchange(piece, following)
        spare: Any = None
        first = True
        while True:
            after_following = next(pieces, None) if following else None
            if piece is not None:
                # A replica that runs out later pads with its own last batch.
                counted = [b for b, n in zip(piece.batches, piece.samples, strict=True) if n]
                spare = counted[0] if counted else spare
            # Started before the wait for the last one, so that it overlaps with the step that uses
            # this batch.
            next_message = exchange(following, after_following, spare)
            counts, next_counts, digests, sizes = message()
            total = sum(counts)
            if first:
                self._compare(digests)
                # All processes have the same counts, so all of them call `gather`, or none. The
                # exchange above was started before it everywhere.
                if total >= at_least and 0 in counts and self.divided:
                    sends = piece is not None and not any(counts[: owned.start])  # the first one
                    others = self._world.gather(piece.batches[0] if piece and sends else None)
                    padding = next(batch for batch in others if batch is not None)
                    spare = padding if spare is None else spare
            if piece is not None and piece.total not in (None, total):
                raise DataError(
                    f"the replicas read different samples from {name_of(self.dataset)}: the order "
                    f"must be the same in every process (shuffle with its own generator and a "
                    f"fixed seed)"
                )
            if total < at_least:
                return
            if piece is not None:
                batches, samples = piece.batches, piece.samples
            elif not reads:
                # Without a size, the replica has had no batch, and pads with the one sent.
                sent = batch_size(*spare) if spare is not None else 1
                sizes = [size or sent for size in sizes]
                batches, samples = unread_batches(sizes, owned), [counts[i] for i in owned]
            else:
                # It counts for nothing, but the replica must take part in the step's collectives.
                # Whole, because batch norm needs several samples, and only a collate function
                # knows which values of a batch have samples.
                batches, samples = [spare] * len(owned), [0] * len(owned)
            last = sum(next_counts) < at_least
            yield batch_of_shares(batches, samples, owned, total, last), piece
            if last:
                next_message()  # every replica has sent it
                return
            piece, following, message, first = following, after_following, next_message, False


def epochs_without_pieces() -> Generator[Generator[Piece, None, None], None, None]:
    """Yields the epochs of a process that does not read."""

    def pieces() -> Generator[Piece, None, None]:
        yield from ()

    while True:
        yield pieces()


def begin_exchange(
    world: World,
    begin: Callable[[Tensor], Any] | None,
    with_sizes: bool,
    piece: Piece | None,
    following: Piece | None = None,
    spare: Any = None,
) -> Callable[[], list[list[int]]]:
    """Starts exchanging the sample counts of two pieces with other processes.

    Args:
        world: the processes.
        begin: `World.begin_max` or `World.begin_max_in_pipeline`; None: exchange nothing.
        with_sizes: also exchange the sizes of the first piece's batches.
        piece: this process's next piece, if any.
        following: the piece after it, if any.
        spare: the batch that pads without a piece, if it is known.

    Returns:
        a function that waits and returns lists of a value for each logical replica: the sample
        counts of the first piece and of the second piece, the digests, and the number of samples in
        the first piece's batches, which include padding. 0 where no process has a piece or spare.
    """
    rows = [[0] * 4 for _ in range(world.logical_replicas)]
    for number, replica in enumerate(world.owned_replicas):
        count = piece.samples[number] if piece else 0
        next_count = following.samples[number] if following else 0
        # a collate function may return more or fewer samples than it gets
        batch = piece.batches[number] if piece else spare
        size = batch_size(*batch) if batch is not None and with_sizes else 0
        rows[replica] = [count, next_count, piece.digest if piece else 0, size]
    # On the CPU: gloo's thread reduces it in place while the step runs.
    values = torch.tensor(rows)
    # A maximum: each row is filled by its own replica, and zero elsewhere.
    work = begin(values) if begin is not None else None

    def received() -> list[list[int]]:
        if work is not None:
            work.wait()
        return values.T.tolist()

    return received


def unread_batches(sizes: Sequence[int], owned: Iterable[int]) -> list[tuple[Unread, Unread]]:
    """Returns the batches of the `owned` replicas in a process that does not read.

    Args:
        sizes: the number of samples for each logical replica; 0: one padding sample.
        owned: the logical replicas of this process.
    """
    batches = [Unread(sizes[replica] or 1) for replica in owned]
    return [(batch, batch) for batch in batches]


class OwnLoader(AgreedLoader):
    """Wraps a user's loader: any iterable of `(inputs, targets)`, iterated once per epoch.

    Each replica's loader must yield different samples, for example through a DistributedSampler or
    batches of similar length. `set_epoch(epoch)` is called before each epoch on the loader, its
    samplers and its data set, if they define it. If the loader has `state_dict` and
    `load_state_dict`, like torchdata's StatefulDataLoader, a resumed run continues from its state;
    otherwise it iterates over the earlier batches of the epoch again and skips them, with the
    random generators as they were at the start of the epoch: the default ones of PyTorch, Python
    and NumPy, and each `torch.Generator` of the loader, its samplers and data sets.

    The constructor is a collective call.

    Args:
        loader: an iterable that can be iterated over repeatedly.
        world: determines the replica of this process.

    Attributes:
        batch_size: 1; the position in an epoch is counted in batches.
        batches_per_epoch: the largest length over the replicas; None if no loader has a length.
        optional: whether a checkpoint may lack the state, as an older one lacks that of generators.

    Raises:
        DataError: the loader can be iterated over only once, or gives all replicas the same
            samples.
    """

    _how_to_divide = (
        "divide the data by world.data_parallel_rank and world.data_parallel_size, for example "
        "with a DistributedSampler"
    )

    def __init__(self, loader: Iterable[Any], world: World) -> None:
        if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
            raise DataError(
                f"{name_of(loader)} is not a loader: pass an object with an __iter__ that starts "
                f"from the beginning and yields batches `(inputs, targets)`"
            )
        if world.logical_replicas > world.data_parallel_size:
            raise DataError(
                f"{name_of(loader)} yields one batch per process at a time, but some processes run "
                f"several of the {world.logical_replicas} replicas: use TrainLoader(dataset, "
                f"batch_size, world), which divides samples, or start one process per replica"
            )
        if world.replica_shares is not None:
            raise DataError(
                f"{name_of(loader)} gives each replica its own batches, so that "
                f"{setting('replica_shares', list(world.replica_shares))} has no effect: use "
                f"TrainLoader(dataset, batch_size, world), which divides samples by it, or leave "
                f"it out"
            )
        if world.data_parallel_size > 1 and isinstance(loader, DataLoader):
            whole = type(loader.sampler) in (RandomSampler, SequentialSampler)
            batched = getattr(loader.batch_sampler, "sampler", None) is loader.sampler
            if whole and batched and not isinstance(loader.dataset, IterableDataset):
                raise DataError(
                    f"this DataLoader yields all samples to each of the "
                    f"{world.data_parallel_size} replicas: pass "
                    f"sampler=DistributedSampler(dataset, world.data_parallel_size, "
                    f"world.data_parallel_rank), or use TrainLoader(dataset, batch_size, world), "
                    "which divides them"
                )
        super().__init__(loader, 1, world)
        self.has_state = True  # the loader's own state, or the states of generators
        self._state_begins_epoch = not has_state(loader)
        self.optional = self._state_begins_epoch
        size = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        samples = length_of(getattr(loader, "dataset", None))
        facts = world.gather((length_of(loader), {"batch_size": size, "samples": samples}))
        # an epoch lasts until the last replica has run out
        lengths = [length for length, _ in facts if length is not None]
        self.batches_per_epoch = max(lengths, default=None)
        # The first replica's, because another may have other samples.
        known = {name: value for name, value in facts[0][1].items() if type(value) is int}
        self.order = {"replicas": world.data_parallel_size, **known}

    def _epochs(self, start: Position) -> Generator[Generator[Piece, None, None], None, None]:
        skip, generators = start.batch, None
        if start.states:
            state = pickle.loads(start.states[0])
            if self._state_begins_epoch:
                generators = state
            else:
                _set_epoch(self.dataset, start.epoch)
                self.dataset.load_state_dict(state)
                skip = 0
        for epoch in itertools.count(start.epoch):
            _set_epoch(self.dataset, epoch)
            yield self._pieces(skip, generators)
            skip, generators = 0, None

    def _pieces(self, skip: int, generators: Any) -> Generator[Piece, None, None]:
        digest, state = None, None
        if self._state_begins_epoch:
            # They stay as the loader leaves them, as in a run that was not interrupted.
            if generators is not None:
                _rewind(self.dataset, generators)
            state = pickle.dumps(_generator_states(self.dataset))
        for number, batch in enumerate(self.dataset):
            check_pair(batch, self.dataset)
            if digest is None:
                digest = digest_of(batch)
            if number >= skip:
                if not self._state_begins_epoch:
                    # Right after the batch: the loader advances with the next one.
                    state = pickle.dumps(self.dataset.state_dict())
                yield Piece([tuple(batch)], [batch_size(*batch)], digest=digest, state=state)

    def _gathered_states(self, at: Position) -> list[Any]:
        state = pickle.loads(at.states[0]) if at.states else None
        if state is None and self._state_begins_epoch:
            state = _generator_states(self.dataset)  # the next batch begins an epoch
        return self._gather_by_replica(state)

    def _local_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        is_of_generators = any(isinstance(x, dict) and x.keys() == _GENERATORS for x in states)
        if is_of_generators is not self._state_begins_epoch:
            return {}, 0  # the loader has got or lost its own state: read again
        if len(states) != self._world.data_parallel_size:
            if self._state_begins_epoch:
                return {}, 0
            raise CheckpointError(
                f"the checkpoint has the state of {name_of(self.dataset)} for {len(states)} "
                f"replicas, not for {self._world.data_parallel_size}: resume with the same number, "
                f"or {phrase('start a new run')}"
            )
        state = states[self._world.data_parallel_rank]
        return {} if state is None else {0: pickle.dumps(state)}, 0


def as_loader(train: Loader | Iterable[Any], world: World) -> Loader:
    """Returns a copy of the loader `train` at its first batch, or an `OwnLoader` of an iterable."""
    return train.at_start() if isinstance(train, Loader) else OwnLoader(train, world)


def _parts(loader: Any) -> list[Any]:
    """Returns a loader, its samplers and data set, and theirs, each once."""
    parts: list[Any] = []
    queue = [loader]
    for part in queue:
        if len(parts) == 32:  # a proxy may make a new part each time
            break
        if part is not None and not any(part is other for other in parts):
            parts.append(part)
            queue += [getattr(part, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    return parts


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in _parts(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators that the parts of a loader hold, each once."""
    values = [value for part in _parts(loader) for value in getattr(part, "__dict__", {}).values()]
    held = [value for value in values if isinstance(value, torch.Generator)]
    return list({id(generator): generator for generator in held}.values())


def _generator_states(loader: Any) -> dict[str, Any]:
    """Returns the states of the default generators and of a loader's generators, as JSON types."""
    of_torch, (version, numbers, gauss), (name, keys, *rest) = default_generators()
    of_loader = [generator.get_state() for generator in _generators(loader)]
    return {
        "torch": [state.numpy().tobytes().hex() for state in (of_torch, *of_loader)],
        "python": [version, np.array(numbers, np.uint32).tobytes().hex(), gauss],
        "numpy": [name, keys.tobytes().hex(), *rest],
    }


def _rewind(loader: Any, states: Mapping[str, Any]) -> None:
    """Restores the generators to states from `_generator_states`."""
    of_torch, *of_loader = [
        torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states["torch"]
    ]
    version, numbers, gauss = states["python"]
    name, keys, *rest = states["numpy"]
    of_python = version, tuple(_words(numbers).tolist()), gauss
    rewind((of_torch, of_python, (name, _words(keys), *rest)))
    # A loader may have got or lost a generator since, at the end of an epoch.
    for generator, state in zip(_generators(loader), of_loader, strict=False):
        generator.set_state(state)


def _words(text: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(text), np.uint32)
