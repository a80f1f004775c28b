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
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hybridtrain.data.agreement import Piece, agreed
from hybridtrain.data.batch import Batch, length_of
from hybridtrain.data.faults import name_of, unless_failed
from hybridtrain.data.fetch import WatchedLoader, collated, prefetch, whole_batch
from hybridtrain.data.stream_part import Reader, Start, StreamPart, has_state
from hybridtrain.errors import CheckpointError, DataError
from hybridtrain.launch.activity import activity
from hybridtrain.options import LoaderOptions, check_batch_size
from hybridtrain.world import World

_log = logging.getLogger(__name__)


def is_stream(dataset: Any) -> bool:
    """Returns whether a data set can only be iterated over: it has no samples by number."""
    if isinstance(dataset, IterableDataset):
        return True
    return not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


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
    reader = Reader(dataset)
    items, total = reader.take(samples, 0, 1, keep=True)
    if before is not None:
        dataset.load_state_dict(before)  # training begins where the data set stood
    unless_failed(reader.failure)
    if total == 0:
        raise DataError(f"{name_of(dataset)} has no samples")
    what = f"the first {total} samples of {name_of(dataset)}"
    return unless_failed(collated(items, collate or default_collate, dataset, what))


class StreamLoader:
    """An endless stream of batches from an iterable data set, epoch after epoch.

    `dataset` is anything whose `iter()` starts anew and yields `(inputs, target)`. `set_epoch(e)`
    is called before each epoch if it is there. With `state_dict` and `load_state_dict` a resumed
    run continues where it was; without them it reads up to there again, so the samples must come in
    the same order.

    Args:
        dataset: iterable; or a Hugging Face `IterableDataset`, which is divided by its own means.
        batch_size: samples of a global batch, over all replicas.
        world: tells which replica this process belongs to.
        seed: the default generators of worker processes start from it and the epoch.
        options: how batches are loaded, and whether `dataset` divides itself.

    Attributes:
        batches_per_epoch: None where `dataset` has no length.

    Raises:
        ConfigError: `batch_size` is not a positive number.
        DataError: `dataset` can be iterated over only once, or there are fewer samples in a batch
            than replicas that `dataset` is divided over.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        seed: int = 0,
        options: LoaderOptions | None = None,
    ) -> None:
        check_batch_size(batch_size)
        self.dataset, self.divided = _divide(dataset, world, options or LoaderOptions())
        self.batch_size = batch_size
        self._world = world
        self._seed = seed
        self._options = options or LoaderOptions()
        self.batches_per_epoch: int | None = None
        length = None if self.divided else length_of(dataset)
        if length is not None:
            full, rest = divmod(length, batch_size)
            self.batches_per_epoch = full + (rest > 0 and not self._options.drop_last)
        if self.divided and batch_size < world.replicas:
            raise DataError(
                f"batch_size={batch_size} is less than a sample for each of the {world.replicas} "
                f"replicas that {name_of(dataset)} is divided over"
            )
        self._position = (0, 0)  # of the last batch that was handed out
        self._states: dict[int, bytes | None] = {}  # by worker, after its last batch in use
        self._next_worker = 0
        self._loaded: dict[str, Any] | None = None

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on, fetched ahead of time.

        Raises:
            DataError: a sample cannot be read, the stream has less than one batch, or it differs
                between processes that should read the same.
        """
        loaded, self._loaded = self._loaded, None
        start = Start(epoch, batch)
        finish = False
        if loaded is not None:
            at = (loaded["epoch"], loaded["batch"])
            # at the end of an epoch its state is still that of the epoch before
            finish = (epoch, batch) == (at[0] + 1, 0)
            if finish or at == (epoch, batch):
                start = Start(*at, *_unpacked(loaded["states"], self.divided, self._world))
        self._states, self._next_worker = dict(start.states), start.worker
        self._position = (start.epoch, start.batch)
        if loaded is not None or batch > 0:
            activity.catching_up()
        source = _Source(self, start)
        try:
            if finish:
                for _ in source.epoch(0):
                    pass
            skip = batch if self.divided and not start.states else 0
            for number in itertools.count(epoch):
                first = batch if number == epoch else 0
                yield from self._epoch(source, number, first, skip)
                skip = 0
        finally:
            source.close()

    def once(self) -> Generator[Any, None, None]:
        """Yields this replica's `(inputs, targets)` of one pass, of which none is left out."""
        source = _Source(self, Start(0, 0), drop_last=False)
        try:
            pieces = source.epoch(0)
            piece = next(pieces, None)
            if self._world.replicas > 1:
                found = self._world.gather(0 if piece is None else piece.digest)
                self._compare(found[:: self._world.processes_per_replica])
            while piece is not None:
                if piece.samples:
                    yield piece.batch
                piece = next(pieces, None)
        finally:
            source.close()

    def _epoch(
        self, source: _Source, epoch: int, batch: int, skip: int
    ) -> Generator[Batch, None, None]:
        """Yields the batches of an epoch, of which the first is number `batch`."""
        pieces = source.epoch(skip)
        name = name_of(self.dataset)
        full = self.batch_size if self._options.drop_last else 1
        number = batch
        try:
            for each, piece in agreed(
                pieces, self._world, name, at_least=full, check=self._compare
            ):
                number += 1
                self._position = epoch, number
                if piece is not None:
                    self._states[piece.worker] = piece.state
                    self._next_worker = piece.worker + 1
                yield each
        finally:
            pieces.close()
        if number == batch:
            raise DataError(
                f"{name} gave less than one batch of samples in epoch {epoch}, after {batch} "
                f"batches (batch_size={self.batch_size}): lower it, set drop_last=False, or see "
                f"that its __iter__ starts anew"
            )
        if self.batches_per_epoch not in (None, number):
            _log.warning(
                "%s has a length of %s batches, and gave %d in epoch %d",
                name, self.batches_per_epoch, number, epoch,
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

    @property
    def has_state(self) -> bool:
        """True if the data set can save and load its state."""
        return has_state(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Returns where the data set stands after the last batch in use.

        A collective call if the data set divides itself.
        """
        own = {worker: pickle.loads(x) for worker, x in self._states.items() if x is not None}
        # the worker that made the last batch has read the furthest, as far as all have
        states: list[Any] = [own.get(self._next_worker - 1)]
        if self.divided:
            mine = {"worker": self._next_worker, "states": own, "workers": self._options.workers}
            states = self._world.gather(mine)[:: self._world.processes_per_replica]
        return {"epoch": self._position[0], "batch": self._position[1], "states": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next `stream` continue from a `state_dict`.

        Raises:
            CheckpointError: the data set divides itself, and there were other replicas or workers.
        """
        states = state_dict["states"]
        if self.divided:
            now = (self._world.replicas, self._options.workers)
            then = (len(states), states[0].get("workers") if states[0] else None)
            if now != then:
                raise CheckpointError(
                    f"{name_of(self.dataset)} divides itself, and its state in the checkpoint is "
                    f"that of {then[0]} replicas with workers={then[1]}, not of {now[0]} with "
                    f"workers={now[1]}: go on with as many, or start a new run"
                )
        self._loaded = dict(state_dict)


def _unpacked(
    states: list[Any], divided: bool, world: World
) -> tuple[dict[int, bytes | None], int]:
    """Returns this replica's states by worker, -1 for any, and the worker that is next."""
    if not divided:
        return {} if states[0] is None else {-1: pickle.dumps(states[0])}, 0
    own = states[world.replica]
    return {int(i): pickle.dumps(x) for i, x in own["states"].items()}, own["worker"]


class _Source:
    """The pieces of epoch after epoch, by a thread or by worker processes that live as long."""

    def __init__(self, loader: StreamLoader, start: Start, drop_last: bool | None = None) -> None:
        options, name = loader._options, name_of(loader.dataset)
        self._device = loader._world.devices[0]
        self._compare = loader._compare
        part = StreamPart(
            loader.dataset, loader.divided, loader.batch_size, loader._world, options,
            loader._seed, start, drop_last,
        )  # fmt: skip
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
        pieces = prefetch(self._watched, self._device)
        try:
            for number, piece in enumerate(pieces):
                if not isinstance(piece, Piece) or number < skip:
                    continue
                if piece.worker not in digests:
                    digests[piece.worker] = piece.digest
                    self._compare(list(digests.values()), "worker processes")
                yield piece
        finally:
            pieces.close()

    def close(self) -> None:
        """Ends the worker processes."""
        self._watched.close()


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
