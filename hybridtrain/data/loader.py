"""Loaders of training batches: order, each replica's share, and position.

The order of an epoch is a permutation of the whole data set that depends only on (seed, epoch). The
loader splits it into global batches, and each global batch into one share per replica, equal unless
`world.replica_shares` is set. With `group_by_length`, the permutation is rearranged within pools of
batches (`grouped`). So an optimizer step has the same samples for any number of
replicas, and every replica takes the same number of steps. Only the loader tracks where a run is in
its data: `Loader.position` advances when a batch is handed out, not when it is fetched.

    batches     0 1 2 | 0 1 2 | 0 ...            3 per epoch
    position  ^ (0, 0)                           before the first
                  ^ (0, 2)                       batch 2 is next
                      ^ (0, 3, ended)            batch 0 of epoch 1 is next; the states of the data
                                                 set still belong to epoch 0
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hybridtrain._base.microbatch import first_share
from hybridtrain._base.shares import Share, Shares
from hybridtrain._base.values import leaves_of
from hybridtrain.data.fetch import Request, fetch, name_of
from hybridtrain.data.same_data import check_same_data
from hybridtrain.errors import BatchError, CheckpointError, DataError, setting
from hybridtrain.options import LoaderOptions, check_batch_size, with_settings
from hybridtrain.world import World

# The number of batches whose samples are sorted by length together, as in transformers.
_POOL = 50

if TYPE_CHECKING:
    from hybridtrain.loss import BatchWeight, LossFn
    from hybridtrain.model import HybridModel

__all__ = ["Batch", "Loader", "LoaderOptions", "Position", "TrainLoader"]


@dataclass(frozen=True)
class Batch:
    """One replica's share of a global batch.

    Attributes:
        inputs: a pytree of tensors with the batch in dim 0; `Shares` of them if this copy of the
            model runs several logical replicas.
        targets: as `inputs`.
        samples: the number of samples of the share that count. It is 0 if the global batch has
            fewer samples than there are replicas, or this replica has run out: the share is then
            only padding, because every replica must take part in the step.
        total: the number of samples of the global batch.
        last: whether it is the last batch of its epoch.
    """

    inputs: Any
    targets: Any
    samples: int
    total: int
    last: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of the global batch, samples x length; 0 without a length.

        The length comes from the first int32 or int64 tensor of the inputs (token ids) with shape
        (samples, length). Padding counts. If replicas pad their shares differently, this replica's
        length is used for all.
        """
        inputs = first_share(self.inputs)
        for leaf in (inputs,) if isinstance(inputs, Tensor) else leaves_of(inputs):
            ids = isinstance(leaf, Tensor) and leaf.dtype in (torch.int32, torch.int64)
            if ids and leaf.dim() == 2 and leaf.shape[1] > 1:
                return self.total * int(leaf.shape[1])
        return 0


@dataclass(frozen=True)
class Position:
    """A position in the data, after the first `batch` batches of `epoch`.

    Attributes:
        epoch: the epoch.
        batch: the number of its batches that have been handed out.
        ended: whether the epoch has no further batch, so that the next batch is in the next epoch.
        states: the pickled states of the data set, by worker process; key -1: for all processes.
        worker: the index of the worker process that makes the next batch.
    """

    epoch: int = 0
    batch: int = 0
    ended: bool = False
    states: Mapping[int, bytes] = field(default_factory=dict)
    worker: int = 0

    @property
    def next(self) -> Position:
        """The position of the next batch; at the end of an epoch, without states."""
        return Position(self.epoch + 1) if self.ended else self


class Loader:
    """Yields the batches `(inputs, targets)` of this replica; each `iter()` is the next epoch.

        loader = Loader(dataset, batch_size=64, world=world)
        for inputs, targets in loader:
            weight = loader.weight(model, loss_fn)
            model.train_step(inputs, targets, loss_fn, weight=weight)

    `Loader(...)` returns a `TrainLoader` or, for an iterable data set, a `StreamLoader`. A
    `Trainer` trains on the same batches: the order depends only on (seed, epoch), a step has the
    same samples for any number of replicas, and every sample comes once per epoch. Every replica
    gets the same number of batches. If a global batch has fewer samples than there are replicas,
    some replicas get a padding sample, which `weight` excludes from the loss. For evaluation, an
    `EvalLoader` yields every sample once, without padding samples.

    Args:
        dataset: a map-style or iterable data set; items are `(inputs, target)`.
        batch_size: the number of samples of a global batch, over all replicas.
        world: determines the replica of this process.
        shuffle: False for the order of the data set. An iterable data set always keeps its order.
        seed: the seed of the order, and of PyTorch's random numbers in a map-style data set, such
            as for random transforms: a sample's numbers depend only on the seed, the epoch and the
            sample. In worker processes, this includes Python's and NumPy's default generators. For
            an iterable data set, the seed and the epoch seed the workers' generators.
        options: how to load batches.
        **settings: fields of `options` to change.

    Attributes:
        batches_per_epoch: the number of batches per epoch; None if it is unknown.
        has_state: whether a `state_dict` has more than the position: the state of the data set, or
            of generators.
        order: what the order of an epoch depends on, as JSON types by name. A position in the
            middle of an epoch is refused with other values.
        refuses_other_order: False to load such a position all the same: some samples are then
            repeated and others left out.
        position: the position of the next batch. If a loop exits early, the next loop starts the
            next epoch; a run that loads a state saved at the break continues in the interrupted
            epoch.
        current: the last batch that was handed out.

    Raises:
        ConfigError: `batch_size` is not a positive number.
        DataError: the data set is unsuitable; the message says why.
    """

    # `stream` sets it: it imports this module, so that this module cannot import it
    for_streams: ClassVar[type[Loader]]

    def __new__(cls, dataset: Any = None, *args: Any, **settings: Any) -> Self:
        """Creates the loader for the type of `dataset`."""
        kind: Any = cls
        if cls is Loader:
            kind = Loader.for_streams if is_stream(dataset) else TrainLoader
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
        # A state may be from the start of its epoch, which is then read again up to the batch.
        self._state_begins_epoch = False
        self.order: dict[str, Any] = {}
        self.refuses_other_order = True
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

    def batches(self, readers: Collection[int] | None = None) -> Generator[Batch, None, None]:
        """Yields the `Batch`es of the next epoch; see `stream` for `readers`."""
        if self._left_early:
            # Here and not at the exit: a state that is saved after the break must still be in the
            # epoch.
            self.position = Position(self.position.epoch + 1)
        self._left_early = False
        with closing(self.stream(readers)) as stream:
            for batch in stream:
                # Before the yield, because a loop that breaks never comes back.
                self.current, self._left_early = batch, not batch.last
                yield batch
                if batch.last:
                    return

    def stream(self, readers: Collection[int] | None = None) -> Generator[Batch, None, None]:
        """Yields the batches from `position` on, epoch after epoch, fetched ahead of time.

        Args:
            readers: the processes of a pipeline that read the data, `HybridModel.readers`; the same
                value in all processes. In the others, the inputs and targets are `Unread`, which
                only has the number of samples. None: all processes read.

        Raises:
            DataError: a sample cannot be read, or the replicas' batches do not match.
        """
        with closing(self._batches_from(self.position, readers)) as batches:
            for batch, position in batches:
                # Also before the yield: a checkpoint in the step has the position after its batch.
                self.position = position
                yield batch

    def _batches_from(
        self, start: Position, readers: Collection[int] | None
    ) -> Generator[tuple[Batch, Position], None, None]:
        """Yields batches, each with the position after it; for `readers` see `stream`."""
        raise NotImplementedError

    def at_start(self) -> Self:
        """Returns a loader of the same batches with its own position, before the first batch."""
        loader = copy.copy(self)
        loader.position, loader._left_early = Position(), False
        return loader

    def order_of_shares(self, total: int) -> Tensor | None:
        """Returns the order of the data in the joined shares of a global batch of `total` samples.

        Returns their indices; None: the shares, one after the other, are in the order of the data.
        """
        return None

    def weight(self, model: HybridModel, loss_fn: LossFn) -> BatchWeight:
        """Returns the `weight` of the current batch, for `train_step`; a collective call.

        Raises:
            BatchError: no batch has been handed out.
        """
        batch = self.current
        if batch is None:
            raise BatchError("weight() belongs to the current batch: call it inside the loop")
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
        """The index of the next batch in its epoch."""
        return self.position.next.batch

    @property
    def sample(self) -> int:
        """The index of the next batch's first sample in the order of its epoch."""
        return self.batch * self.batch_size

    def seek(self, epoch: int, sample: int) -> None:
        """Moves to the batch that contains `sample` in the order of `epoch`."""
        batch = sample // self.batch_size
        if batch >= (self.batches_per_epoch or math.inf):  # in the part that drop_last drops
            epoch, batch = epoch + 1, 0
        self.position, self._left_early = Position(epoch, batch), False

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the current batch, and the data set's state if it has one.

        A collective call.
        """
        at, source = self.position, None
        if self.has_state:
            # The position of the last batch: at the end of an epoch, the data set is still in it.
            at = at.next if self._state_begins_epoch else at
            source = {"epoch": at.epoch, "batch": at.batch, "states": self._gathered_states(at)}
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batch_size": self.batch_size,
            "source": source,
            **({"order": self.order} if self.order else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Continues from a `state_dict`; with another batch size, at the batch with its sample.

        Raises:
            CheckpointError: the data set's states are for other numbers of replicas or workers, or
                the epoch has a different order, see `check_order`.
        """
        if state_dict is None:  # an older checkpoint, whose trainer restores the position
            return
        sample = state_dict["batch"] * state_dict["batch_size"]
        is_grouped = state_dict.get("grouped", False)  # in an older checkpoint
        size = {"batch_size": state_dict["batch_size"]} if is_grouped else {}
        self.check_order(sample, state_dict.get("order", {"group_by_length": is_grouped, **size}))
        self.seek(state_dict["epoch"], sample)
        source: Any = state_dict["source"]
        if source is None or not self.has_state:
            return
        states, worker = self._local_states(source["states"])
        if self.sample == sample:  # else read the data set again up to there
            ended = source["epoch"] < state_dict["epoch"]
            position = Position(source["epoch"], source["batch"], True) if ended else self.position
            self.position = replace(position, states=states, worker=worker)

    def check_order(self, sample: int, order: Mapping[str, Any]) -> None:
        """Checks that a position that was saved with `order` has the same samples before it here.

        Raises:
            CheckpointError: it is in the middle of an epoch, and a value differs.
        """
        if not isinstance(order, Mapping):
            raise CheckpointError("the checkpoint is damaged: its `order` is no table of values")
        for name, value in order.items() if sample and self.refuses_other_order else ():
            now = self.order.get(name, value)  # unknown to this loader or to an older version
            if now != value:
                before, after = _order_in_words(name, value), _order_in_words(name, now)
                raise CheckpointError(
                    f"the checkpoint is in the middle of an epoch in an order that depends on "
                    f"{before}, but this run has {after}: resume with {before}, change it at the "
                    f"end of an epoch, or set {setting('allow_changes', True)}"
                )

    def _gathered_states(self, at: Position) -> list[Any]:
        """Returns the data set's states at this position, from all replicas if they differ."""
        raise NotImplementedError

    def _local_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        """Returns this replica's `Position.states` and `worker` from the gathered states."""
        raise NotImplementedError


class TrainLoader(Loader):
    """A `Loader` of a map-style data set.

    The constructor is a collective call: it compares the data sets and settings of all ranks.

    Attributes:
        samples: the number of samples per epoch.

    Raises:
        ConfigError: a setting differs between the ranks.
        DataError: the data set has less than one batch, is iterable only, or differs between the
            ranks.
    """

    batches_per_epoch: int

    def __init__(self, dataset: Any, batch_size: int, world: World, **settings: Any) -> None:
        if is_stream(dataset):
            raise DataError(
                f"{name_of(dataset)} has no access by index (`__getitem__` and `__len__`): use "
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
            group_by_length=self.options.group_by_length,
            replica_shares=world.replica_shares,
        )
        self.samples = first_samples(len(dataset), batch_size, self.options)
        self.batches_per_epoch = batches_in(self.samples, batch_size, self.options)
        # Not the batch size, because a position counts samples.
        groups = self.options.group_by_length
        self.order = {
            "samples": len(dataset),
            "shuffle": bool(self._shuffle),
            **({"seed": int(self._seed)} if self._shuffle else {}),
            "group_by_length": groups,
            **({"batch_size": batch_size} if groups else {}),
        }
        self._lengths: Tensor | None = None
        if self.options.group_by_length:
            self._lengths = _lengths_of(dataset, self._shuffle)[: self.samples]
        self._shares_of = cache(partial(shares_in, world=world))  # all batches but one are equal
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the training data has {self.samples} samples, less than one batch of "
                f"{setting('batch_size', batch_size)}: lower it, or set "
                f"{setting('drop_last', False)}"
            )

    def _batches_from(
        self, start: Position, readers: Collection[int] | None
    ) -> Generator[tuple[Batch, Position], None, None]:
        requests = self._requests(start.next)
        reads = reads_here(readers, self._world)
        # Closed with this generator, which ends the thread and the workers.
        with closing(fetch(self.dataset, requests, self.options, self._world, reads)) as fetched:
            # The same walk as in `_requests`, which runs ahead of it in the thread.
            for epoch, batch, total, slices in self._plan(start.next):
                pairs = list(itertools.islice(fetched, len(slices)))
                if len(pairs) < len(slices):
                    return
                samples = [share.stop - share.start for share in slices]
                owned = self._world.owned_replicas
                position = Position(epoch, batch + 1, batch + 1 == self.batches_per_epoch)
                yield batch_of_shares(pairs, samples, owned, total, position.ended), position

    def _plan(self, start: Position) -> Iterator[tuple[int, int, int, list[slice]]]:
        """Yields the epoch and index of each global batch, its number of samples and its shares."""
        first = start.batch
        for epoch in itertools.count(start.epoch):
            for batch in range(first, self.batches_per_epoch):
                total = min(self.batch_size, self.samples - batch * self.batch_size)
                yield epoch, batch, total, self._shares_of(total)
            first = 0

    def _order(self, epoch: int) -> Tensor:
        """Returns the indices of the samples of an epoch."""
        order = permutation(self.samples, self._seed, epoch)
        if self._lengths is None:
            return order
        return grouped(order, self._lengths, self.batch_size, self._seed, epoch)

    def _requests(self, start: Position) -> Iterator[Request]:
        """Yields the requests for the batches of this process, ahead of their use."""
        # A permutation is drawn once per epoch, when its first batch is requested.
        ordered, order = -1, torch.arange(self.samples)
        for epoch, batch, _, shares in self._plan(start):
            if self._shuffle and epoch != ordered:
                ordered, order = epoch, self._order(epoch)
            first = batch * self.batch_size
            for share in shares:
                # a replica without samples gets the batch's first sample
                samples = share if share.stop > share.start else slice(0, 1)
                indices = order[first + samples.start : first + samples.stop]
                yield Request(indices, epoch, self._seed)


def reads_here(readers: Collection[int] | None, world: World) -> bool:
    """Returns whether this process reads the data; see `Loader.stream`."""
    return readers is None or world.pipeline_rank in readers


def all_read(readers: Collection[int] | None, world: World) -> bool:
    """Returns whether all processes of a pipeline read the data; see `Loader.stream`."""
    return readers is None or all(i in readers for i in range(world.processes_per_replica))


def first_samples(samples: int, batch_size: int, options: LoaderOptions) -> int:
    """Returns the number of samples a loader uses, limited by `options.first_batches`."""
    limit = options.first_batches
    return samples if limit is None else min(samples, limit * batch_size)


def is_stream(dataset: Any) -> bool:
    """Returns whether a data set is iterable only, without access by index."""
    if isinstance(dataset, IterableDataset):
        return True
    return not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def has_state(dataset: Any) -> bool:
    """Returns whether a data set or a loader can save and load its whole state."""
    saves = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
    return saves and not has_shuffle_buffer(dataset)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Returns whether a Hugging Face stream shuffles in a buffer, which its state lacks.

    After `load_state_dict`, it would fill the buffer with later samples and lose its content.
    """
    queue = [getattr(dataset, "_ex_iterable", None)]
    for part in queue:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        queue += [iterable for iterable in inner if iterable is not None]
    return False


def _order_in_words(name: str, value: object) -> str:
    """Returns a value of `Loader.order`: an argument as its user sets it, or a number of things."""
    if name not in ("samples", "replicas"):
        return setting(name, value)
    return f"{value} {name if value != 1 else name.removesuffix('s')}"


def batches_in(samples: int, batch_size: int, options: LoaderOptions) -> int:
    """Returns the number of batches per epoch."""
    return samples // batch_size if options.drop_last else -(-samples // batch_size)


def shares_in(total: int, world: World) -> list[slice]:
    """Returns the shares of `total` samples for the logical replicas of this process."""
    bounds = list(itertools.accumulate(world.samples_by_replica(total), initial=0))
    return [slice(*bounds[replica : replica + 2]) for replica in world.owned_replicas]


def batch_of_shares(
    pairs: Sequence[tuple[Any, Any]],
    samples: Sequence[int],
    replicas: Sequence[int],
    total: int,
    last: bool,
) -> Batch:
    """Returns the `Batch` of a process, from the shares of its logical replicas.

    Args:
        pairs: `(inputs, targets)` for each logical replica.
        samples: for each, the number of samples that count.
        replicas: the indices of the logical replicas.
        total: see `Batch`.
        last: see `Batch`.
    """
    if len(pairs) == 1:
        ((inputs, targets),) = pairs
        return Batch(inputs, targets, samples[0], total, last)
    shares = [Share(*fields) for fields in zip(replicas, samples, strict=True)]
    inputs, targets = (Shares(parts, shares) for parts in zip(*pairs, strict=True))
    return Batch(inputs, targets, sum(samples), total, last)


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Returns the order of an epoch: a tensor of indices that depends only on the arguments."""
    generator = torch.Generator()
    # An odd multiplier keeps neighboring seeds from sharing the orders of neighboring epochs.
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + epoch) & 0x7FFF_FFFF_FFFF_FFFF)
    return torch.randperm(samples, generator=generator)


def grouped(order: Tensor, lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Returns the order of an epoch with samples of similar length in each batch.

    It sorts pools of 50 batches by length and cuts them into batches, whose order is shuffled. An
    incomplete last batch keeps its samples, which the permutation has drawn.

    Args:
        order: the permutation of the epoch.
        lengths: the length of each sample of the data set.
        batch_size: the number of samples of a global batch.
        seed: as in `permutation`.
        epoch: as in `permutation`.
    """
    count = len(order) // batch_size
    pools = order[: count * batch_size].split(_POOL * batch_size)
    # Stable, so that samples of equal length keep the order of the permutation on all hosts.
    batches = torch.cat([pool[lengths[pool].argsort(stable=True)] for pool in pools] or [order[:0]])
    # negative epochs: other numbers than those of any permutation of samples
    turns = permutation(count, seed, -1 - epoch)
    return torch.cat(
        [batches.view(count, batch_size)[turns].flatten(), order[count * batch_size :]]
    )


def _lengths_of(dataset: Any, shuffle: bool) -> Tensor:
    """Returns the lengths of all samples, int64 of shape (samples,).

    Raises:
        DataError: the data set does not tell them, or the order is fixed.
    """
    if not shuffle or not callable(getattr(dataset, "lengths", None)):
        problem = (
            f"{name_of(dataset)} has no method lengths()"
            if shuffle
            else f"{setting('shuffle', False)} keeps the order of the data set"
        )
        raise DataError(
            f"{setting('group_by_length', True)}: {problem}: set "
            f"{setting('group_by_length', False)}"
        )
    return torch.as_tensor(dataset.lengths())


def next_step(stream: Iterator[Batch], count: int) -> list[Batch]:
    """Returns the batches of the next optimizer step: `count`, or fewer at the end of an epoch.

    Returns an empty list for an exhausted stream. The order is that of `in_order_of_replicas`.
    """
    batches: list[Batch] = []
    for batch in stream:
        batches.append(batch)
        if len(batches) == count or batch.last:
            break
    return in_order_of_replicas(batches)


def in_order_of_replicas(batches: Sequence[Batch]) -> list[Batch]:
    """Returns the same number of batches, with the shares of one logical replica after another.

    A process sums the gradients of a logical replica over all batches of a step before starting the
    next replica, so that it stores few sums at a time:

        as loaded     batch 0: replicas 2 3     batch 1: replicas 2 3
        returned      replica 2: batches 0 1    replica 3: batches 0 1
    """
    if len(batches) < 2 or not isinstance(batches[0].inputs, Shares):
        return list(batches)
    width = len(batches[0].inputs.parts)
    order = [
        (number, place) for place in range(width) for number in range(len(batches))
    ]  # of all shares
    ordered: list[Batch] = []
    for turn, batch in enumerate(batches):
        chosen = order[turn * width : (turn + 1) * width]
        if any(batches[number].inputs.shares[place].ahead for number, place in chosen):
            return list(batches)  # already in this order
        shares = [
            # It draws the random numbers of the batch that it came from.
            batches[number].inputs.shares[place]._replace(ahead=number - turn)
            for number, place in chosen
        ]
        inputs = Shares([batches[number].inputs.parts[place] for number, place in chosen], shares)
        targets = Shares([batches[number].targets.parts[place] for number, place in chosen], shares)
        samples = sum(share.samples for share in shares)
        ordered.append(replace(batch, inputs=inputs, targets=targets, samples=samples))
    return ordered
