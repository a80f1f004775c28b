"""Loaders of training and evaluation batches: their order, each replica's share, their position.

The order of an epoch is one permutation of the whole data set, drawn from (seed, epoch) alone. It
is cut into global batches, and each of these into one share per replica. So the same samples meet
in the same optimizer step whatever the number of replicas, and every replica takes equally many
steps, whatever the length of the data set.

A loader is the only one that knows where a run is in its data: `Loader.position` moves with each
batch that is handed out, not with those that are fetched ahead.

    batches     0 1 2 | 0 1 2 | 0 ...            3 in an epoch
    position  ^ (0, 0)                           before the first
                  ^ (0, 2)                       batch 2 is next
                      ^ (0, 3, ended)            the next is batch 0 of epoch 1; the states of the
                                                 data set are still those of epoch 0
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hybridtrain._base.values import leaves_of
from hybridtrain.data.fetch import Request, fetch, name_of
from hybridtrain.data.same_data import check_same_data
from hybridtrain.data.splits import WithoutTargets, already_batched
from hybridtrain.errors import BatchError, DataError
from hybridtrain.options import LoaderOptions, check_batch_size, with_settings
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.loss import BatchWeight, LossFn
    from hybridtrain.model import HybridModel

__all__ = ["Batch", "EvalLoader", "Loader", "LoaderOptions", "Position", "TrainLoader"]


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

    @property
    def tokens(self) -> int:
        """The tokens of the global batch: its samples times their length; 0 where they have none.

        Samples have a length if a tensor of the inputs has int32 or int64 values, as token ids
        are, and the shape (samples, length); the first one counts. So padding counts, and where
        each replica pads its own share, this replica's length is taken for all.
        """
        for leaf in (self.inputs,) if isinstance(self.inputs, Tensor) else leaves_of(self.inputs):
            ids = isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64)
            if ids and leaf.dim() == 2 and leaf.shape[1] > 1:
                return self.total * int(leaf.shape[1])
        return 0


@dataclass(frozen=True)
class Position:
    """A place in the data, after the first `batch` batches of `epoch`.

    Attributes:
        epoch: the epoch.
        batch: its batches that were handed out.
        ended: it has no further batch, and the next one is the first of the next epoch.
        states: where the data set stood, pickled, by the number of the worker process; -1: in any.
        worker: the process that makes the next batch.
    """

    epoch: int = 0
    batch: int = 0
    ended: bool = False
    states: Mapping[int, bytes] = field(default_factory=dict)
    worker: int = 0

    @property
    def next(self) -> Position:
        """The place of the next batch; at the end of an epoch without the states."""
        return Position(self.epoch + 1) if self.ended else self


class Loader:
    """Batches `(inputs, targets)` of this replica; each `iter()` is the next epoch.

        loader = Loader(dataset, batch_size=64, world=world)
        for inputs, targets in loader:
            weight = loader.weight(model, loss_fn)
            model.train_step(inputs, targets, loss_fn, weight=weight)

    It is a `TrainLoader`, or for an iterable data set a `StreamLoader`. A `Trainer` trains on the
    same batches: the order is drawn from (seed, epoch), the same samples meet in a step whatever
    the number of replicas, and every sample comes once per epoch. Every replica gets equally many
    batches. Where a global batch has fewer samples than there are replicas, some get a sample that
    must not count; `weight` knows. To evaluate, an `EvalLoader` gives every sample once without
    such places.

    Args:
        dataset: map-style, or iterable (see `StreamLoader`); items are `(inputs, target)`.
        batch_size: samples of a global batch, over all replicas.
        world: tells which replica this process belongs to.
        shuffle: False for the order of the data set. An iterable one keeps its own order.
        seed: the order is drawn from it, and so is what the samples of a map-style data set draw by
            PyTorch, such as random transforms: the numbers of a sample depend on the seed, the
            epoch and the sample alone. In worker processes that goes for Python's and NumPy's
            default generators too. Those of an iterable data set start there from the seed and the
            epoch.
        options: how batches are loaded.
        **settings: fields of `options` to change.

    Attributes:
        batches_per_epoch: None if it is not known.
        has_state: whether the data set can save and load where it stands.
        position: of the next batch. The loop after one that was left early begins the next epoch; a
            run that loads the state of then goes on in the epoch that was left, as this one would
            have without the break.
        current: the batch that a loop was handed last.

    Raises:
        ConfigError: `batch_size` is not a positive number.
        DataError: the data set does not fit; see `TrainLoader` and `StreamLoader`.
    """

    def __new__(cls, dataset: Any = None, *args: Any, **settings: Any) -> Self:
        """Makes the loader for the kind of `dataset`."""
        kind: Any = cls
        if cls is Loader:
            from hybridtrain.data.stream import StreamLoader

            kind = StreamLoader if is_stream(dataset) else TrainLoader
        return object.__new__(kind)  # type: ignore[no-any-return]

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        shuffle: bool = True,
        seed: int = 0,
        options: LoaderOptions | None = None,
        **settings: Any,
    ) -> None:
        check_batch_size(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.options = with_settings(options or LoaderOptions(), settings)
        self.batches_per_epoch: int | None = None
        self.has_state = False
        self.position = Position()
        self.current: Batch | None = None
        self._world = world
        self._shuffle = shuffle
        self._seed = seed
        self._left_early = False

    def __len__(self) -> int:
        if self.batches_per_epoch is None:
            raise TypeError("the data set has no length")
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.batches():
            yield batch.inputs, batch.targets

    def batches(self) -> Generator[Batch, None, None]:
        """Yields the `Batch`es of the next epoch."""
        if self._left_early:
            self.position = Position(self.position.epoch + 1)
        self._left_early = False
        with closing(self.stream()) as stream:
            for batch in stream:
                self.current, self._left_early = batch, not batch.last
                yield batch
                if batch.last:
                    return

    def stream(self) -> Generator[Batch, None, None]:
        """Yields the batches from `position` on, epoch after epoch, fetched ahead of time.

        Raises:
            DataError: a sample cannot be read, or the batches of the replicas do not fit together.
        """
        with closing(self._batches_from(self.position)) as found:
            for batch, after in found:
                self.position = after
                yield batch

    def _batches_from(self, start: Position) -> Generator[tuple[Batch, Position], None, None]:
        """Yields batches, each with the position after it."""
        raise NotImplementedError

    def at_start(self) -> Self:
        """Returns a loader of the same batches with its own position, before the first."""
        loader = copy.copy(self)
        loader.position, loader._left_early = Position(), False
        return loader

    def weight(self, model: HybridModel, loss_fn: LossFn) -> BatchWeight:
        """Returns the `weight` of the batch that was handed out last, for `train_step`.

        All replicas call it together.

        Raises:
            BatchError: there is no such batch.
        """
        batch = self.current
        if batch is None:
            raise BatchError("weight() is of the batch that is in use: call it inside the loop")
        return model.step_weights(
            [(batch.inputs, batch.targets)],
            loss_fn,
            samples=[batch.samples],
            total=batch.total,
        )[0]

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.position.next.epoch

    @property
    def batch(self) -> int:
        """The number of the next batch in its epoch."""
        return self.position.next.batch

    @property
    def sample(self) -> int:
        """The first sample of the next batch in the order of its epoch."""
        return self.batch * self.batch_size

    def seek(self, epoch: int, sample: int) -> None:
        """Has the next batch begin at `sample` of the order of `epoch`, or just before it."""
        batch = sample // self.batch_size
        if batch >= (self.batches_per_epoch or math.inf):  # what drop_last leaves out
            epoch, batch = epoch + 1, 0
        self.position, self._left_early = Position(epoch, batch), False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch in use, and where the data set stands if it says so.

        Every process calls it.
        """
        at, source = self.position, None
        if self.has_state:
            # Of the last batch: at the end of an epoch the data set is not in the next one yet.
            source = {"epoch": at.epoch, "batch": at.batch, "states": self._gathered(at)}
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batch_size": self.batch_size,
            "source": source,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`.

        With another batch size it continues at the same sample, or just before it.

        Raises:
            CheckpointError: the states of the data set are of other replicas or workers.
        """
        sample = state_dict["batch"] * state_dict["batch_size"]
        self.seek(state_dict["epoch"], sample)
        source: Any = state_dict["source"]
        if source is None or not self.has_state:
            return
        states, worker = self._own_states(source["states"])
        if self.sample == sample:  # else the data set is read again up to there
            ended = source["epoch"] < state_dict["epoch"]
            here = Position(source["epoch"], source["batch"], True) if ended else self.position
            self.position = replace(here, states=states, worker=worker)

    def _gathered(self, at: Position) -> list[Any]:
        """Returns the data set's states there, of all replicas if each has its own."""
        raise NotImplementedError

    def _own_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        """Returns this replica's part of what `_gathered` returned: see `Position`."""
        raise NotImplementedError


class TrainLoader(Loader):
    """A `Loader` of a map-style data set; see there.

    Making one is a collective call: the data sets and settings of all ranks are compared once.

    Attributes:
        samples: of the data set.

    Raises:
        ConfigError: a setting differs between the ranks.
        DataError: the data set has less than one batch, can only be iterated over, or differs
            between the ranks.
    """

    batches_per_epoch: int

    def __init__(self, dataset: Any, batch_size: int, world: World, **settings: Any) -> None:
        if is_stream(dataset):
            raise DataError(
                f"{name_of(dataset)} has no samples by number (`__getitem__` and `__len__`): pass "
                f"StreamLoader(dataset, batch_size, world) from hybridtrain.data.stream"
            )
        super().__init__(dataset, batch_size, world, **settings)
        check_same_data(
            dataset,
            world,
            type(self).__name__,
            batch_size=batch_size,
            shuffle=self._shuffle,
            seed=self._seed,
            drop_last=self.options.drop_last,
            first_batches=self.options.first_batches,
        )
        self.samples = first_samples(len(dataset), batch_size, self.options)
        self.batches_per_epoch = batches_in(self.samples, batch_size, self.options)
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the training data has {self.samples} samples, less than one batch of "
                f"batch_size={batch_size}: lower it, or set drop_last=False"
            )

    def _batches_from(self, start: Position) -> Generator[tuple[Batch, Position], None, None]:
        # The plan is read twice: ahead of time by those who fetch, and with each batch in use.
        requests = self._requests(start.next)
        with closing(fetch(self.dataset, requests, self.options, self._world)) as fetched:
            plan = self._plan(start.next)
            for (inputs, targets), (after, total, share) in zip(fetched, plan, strict=False):
                samples = share.stop - share.start
                yield Batch(inputs, targets, samples, total, after.ended), after

    def _plan(self, start: Position) -> Iterator[tuple[Position, int, slice]]:
        """Yields the position after each global batch, its samples, and this replica's of them."""
        first = start.batch
        for epoch in itertools.count(start.epoch):
            for batch in range(first, self.batches_per_epoch):
                total = min(self.batch_size, self.samples - batch * self.batch_size)
                share = share_of(total, self._world.replica, self._world.replicas)
                yield Position(epoch, batch + 1, batch + 1 == self.batches_per_epoch), total, share
            first = 0

    def _requests(self, start: Position) -> Iterator[Request]:
        """Yields this replica's batches."""
        epoch, order = -1, torch.arange(self.samples)
        for after, total, share in self._plan(start):
            if self._shuffle and after.epoch != epoch:
                epoch, order = after.epoch, permutation(self.samples, self._seed, after.epoch)
            whole = order[(after.batch - 1) * self.batch_size :][:total]
            mine = whole[share] if share.stop > share.start else whole[:1]
            yield Request(mine, after.epoch, self._seed)


class EvalLoader:
    """Every sample of `dataset` once over all replicas; shares may differ in length.

    Making one is a collective call: map-style data sets of all ranks are compared once.

    Args:
        dataset: map-style, each replica takes a stretch of it; or iterable, see `StreamLoader`.
        batch_size: samples over all replicas.
        world: tells which replica this process belongs to.
        options: how batches are loaded.
        inputs_alone: the data set gives inputs without targets, for `predict`.
        classes: the names of the classes in the order of their numbers, which name the values of
            metrics that have one per class.

    Attributes:
        dataset: the data set.
        classes: as given.
        samples: of this replica; None if it is not known.

    Raises:
        ConfigError: `batch_size` is not a positive number, or a setting differs between the ranks.
        DataError: the data set differs between the ranks.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        world: World,
        *,
        options: LoaderOptions | None = None,
        inputs_alone: bool = False,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_batch_size(batch_size)
        self.dataset = dataset
        self.classes = classes
        self._batch_size = max(1, batch_size // world.replicas)
        self._world = world
        self._options = options or LoaderOptions()
        if inputs_alone:
            pairs = WithoutTargets(self._options.collate or already_batched)
            self._options = replace(self._options, collate=pairs)
        self._share = slice(0)
        self.samples: int | None = None
        if not is_stream(dataset):
            first = self._options.first_batches
            check_same_data(
                dataset, world, type(self).__name__, batch_size=batch_size, first_batches=first
            )
            samples = first_samples(len(dataset), batch_size, self._options)
            self._share = share_of(samples, world.replica, world.replicas)
            self.samples = self._share.stop - self._share.start

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if self.samples is None:
            from hybridtrain.data.stream import StreamLoader

            size, options = self._batch_size * self._world.replicas, self._options
            yield from StreamLoader(self.dataset, size, self._world, options=options).once()
        elif self.samples:
            batches = torch.arange(self._share.start, self._share.stop).split(self._batch_size)
            requests = map(Request, batches)
            yield from fetch(self.dataset, requests, self._options, self._world)


def first_samples(samples: int, batch_size: int, options: LoaderOptions) -> int:
    """Returns how many samples a loader takes of a data set: see `LoaderOptions`."""
    limit = options.first_batches
    return samples if limit is None else min(samples, limit * batch_size)


def is_stream(dataset: Any) -> bool:
    """Returns whether a data set can only be iterated over: it has no samples by number."""
    if isinstance(dataset, IterableDataset):
        return True
    return not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def has_state(dataset: Any) -> bool:
    """Returns whether a data set or a loader can save and load where it stands."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def batches_in(samples: int, batch_size: int, options: LoaderOptions) -> int:
    """Returns the batches of an epoch."""
    return samples // batch_size if options.drop_last else -(-samples // batch_size)


def share_of(total: int, replica: int, replicas: int) -> slice:
    """Returns the part of `total` samples that `replica` takes; shares differ by 1 at most."""
    small, larger = divmod(total, replicas)
    start = replica * small + min(replica, larger)
    return slice(start, start + small + (replica < larger))


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns the order of an epoch, a function of the arguments alone."""
    generator = torch.Generator()
    # An odd multiplier keeps neighbouring seeds from sharing orders of neighbouring epochs.
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randperm(samples, generator=generator)


def take(stream: Iterator[Batch], count: int) -> list[Batch]:
    """Returns the next `count` batches, or fewer if their epoch ends; none at the end of all."""
    batches: list[Batch] = []
    for batch in stream:
        batches.append(batch)
        if len(batches) == count or batch.last:
            break
    return batches
