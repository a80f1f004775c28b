"""A process's part of an iterable data set, as ready batches; runs in the worker processes."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from hybridtrain.data.agreement import Piece, digest_of
from hybridtrain.data.batch import share_of
from hybridtrain.data.faults import Failure, name_of
from hybridtrain.data.fetch import collated
from hybridtrain.options import LoaderOptions
from hybridtrain.world import World

# as many samples tell two streams apart
_DIGESTED_SAMPLES = 16


@dataclass(frozen=True)
class Start:
    """The beginning of a stream: at a batch, or at states of the data set, pickled, by worker."""

    epoch: int
    batch: int
    states: Mapping[int, bytes | None] = field(default_factory=dict)
    worker: int = 0


class StreamPart(IterableDataset[Any]):
    """A process's pieces of each epoch; runs in the workers."""

    def __init__(
        self,
        dataset: Any,
        divided: bool,
        batch_size: int,
        world: World,
        options: LoaderOptions,
        seed: int,
        start: Start,
        drop_last: bool | None = None,
    ) -> None:
        self._dataset = dataset
        self._divided = divided
        self._batch_size = batch_size
        self._replica, self._replicas = world.replica, world.replicas
        self._collate = options.collate or default_collate
        self._drop_last = options.drop_last if drop_last is None else drop_last
        self._seed = seed
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, Start(self._start.epoch + 1, 0)
        return self._pieces(start)

    def _pieces(self, start: Start) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if info is not None:
            own = (self._replica, worker) if self._divided else (0, 0)
            _seed_all(hash((self._seed, start.epoch, *own)) & 0x7FFF_FFFF)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(start.epoch)
        state = start.states.get(worker, start.states.get(-1))
        if state is not None:
            saved = pickle.loads(state)
            self._dataset.load_state_dict(saved["state"])
            if saved["ended"]:
                return  # this epoch; an iteration would begin the next
        reader = Reader(self._dataset)
        if self._divided:
            if worker < start.worker % workers:
                yield "a turn"  # that it had taken before the state was saved
            yield from self._own_pieces(reader, worker)
        else:
            if state is None:
                reader.skip(start.batch * self._batch_size)
            yield from self._shared_pieces(reader, worker, workers)

    def _shared_pieces(self, reader: Reader, worker: int, workers: int) -> Iterator[Any]:
        """Yields the pieces of the global batches `worker`, `worker + workers`, ..."""
        for number in itertools.count():
            mine = number % workers == worker
            samples, total = reader.take(self._batch_size, self._replica, self._replicas, mine)
            if reader.failure is not None and (mine or total == 0):
                yield reader.failure
                return
            if total == 0 or (total < self._batch_size and self._drop_last):
                return
            if mine:
                counts = len(range(self._replica, total, self._replicas))
                yield self._piece(reader, samples, counts, total, worker)

    def _own_pieces(self, reader: Reader, worker: int) -> Iterator[Any]:
        """Yields pieces of all samples that the data set gives this process."""
        share = share_of(self._batch_size, self._replica, self._replicas)
        size = share.stop - share.start
        while True:
            samples, total = reader.take(size, 0, 1, True)
            if reader.failure is not None:
                yield reader.failure
                return
            if total == 0 or (total < size and self._drop_last):
                return
            yield self._piece(reader, samples, total, None, worker)

    def _piece(
        self, reader: Reader, samples: list[Any], counts: int, total: int | None, worker: int
    ) -> Any:
        state = None
        if has_state(self._dataset):
            saved = {"state": self._dataset.state_dict(), "ended": reader.ended}
            state = pickle.dumps(saved)  # now, since the data set goes on
        what = f"{len(samples)} samples of {name_of(self._dataset)}, before sample {reader.read}"
        batch = collated(samples, self._collate, self._dataset, what)
        if isinstance(batch, Failure):
            return batch
        return Piece(batch, counts, total, reader.digest, worker, state)


class Reader:
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


def has_state(dataset: Any) -> bool:
    """Returns whether a data set can save and load where it stands."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
