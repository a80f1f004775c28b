"""A loader of the user's own, as a trainer takes it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hybridtrain.data.agreement import Piece, agreed, digest_of
from hybridtrain.data.batch import Batch, BatchSource, length_of
from hybridtrain.data.epochs import Loader
from hybridtrain.data.faults import check_pair, name_of
from hybridtrain.errors import CheckpointError, DataError
from hybridtrain.launch.activity import activity
from hybridtrain.microbatch import batch_size
from hybridtrain.world import World


class OwnLoader:
    """The batches of `loader`, epoch after epoch: any iterable of `(inputs, targets)`.

    Each replica's loader yields its own samples, for example by a DistributedSampler or by
    batches of similar length. `set_epoch(epoch)` is called before each epoch on the loader, its
    samplers and its data set, where they have it. With `state_dict` and `load_state_dict`, as
    torchdata's StatefulDataLoader has, a resumed run continues where it was; otherwise it takes
    the batches before again and leaves them out.

    To make one is a collective call.

    Args:
        loader: may be iterated over again and again.
        world: tells which replica this process belongs to.

    Attributes:
        batch_size: 1; the position in an epoch is counted in batches.
        batches_per_epoch: of the replica with the longest loader; None if none has a length.

    Raises:
        DataError: it can be iterated over only once, or gives all replicas the same samples.
    """

    batch_size = 1

    def __init__(self, loader: Iterable[Any], world: World) -> None:
        if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
            raise DataError(
                f"{name_of(loader)} is not a loader: pass an object whose __iter__ starts anew "
                f"and yields batches `(inputs, targets)`"
            )
        if world.replicas > 1 and isinstance(loader, DataLoader):
            whole = type(loader.sampler) in (RandomSampler, SequentialSampler)
            if whole and not isinstance(loader.dataset, IterableDataset):
                _check_batch_sampler(loader, world)
        self.loader = loader
        self._world = world
        # an epoch lasts until the last replica has run out
        lengths = [length for length in world.gather(length_of(loader)) if length is not None]
        self.batches_per_epoch = max(lengths, default=None)
        self._position = (0, 0)
        self._state: bytes | None = None
        self._loaded: dict[str, Any] | None = None

    def stream(self, epoch: int = 0, batch: int = 0) -> Generator[Batch, None, None]:
        """Yields this replica's batches from `batch` of `epoch` on.

        Raises:
            DataError: a batch is not a pair, all replicas get the same samples, or there are none.
        """
        loaded, self._loaded = self._loaded, None
        skip = batch
        if loaded is not None or batch > 0:
            activity.catching_up()
        if loaded is not None:
            self._position, self._state = (loaded["epoch"], loaded["batch"]), loaded["state"]
            finish = (epoch, batch) == (loaded["epoch"] + 1, 0)
            here = finish or (epoch, batch) == self._position
            if here and loaded["state"] is not None:  # None: no batch was in use yet
                _set_epoch(self.loader, loaded["epoch"])
                loader: Any = self.loader
                loader.load_state_dict(pickle.loads(loaded["state"]))
                skip = 0
                if finish:  # the epoch of the state has no batch left
                    for _ in self.loader:
                        pass
        for number in itertools.count(epoch):
            _set_epoch(self.loader, number)
            first = done = batch if number == epoch else 0
            pieces = itertools.islice(self._pieces(), skip if number == epoch else 0, None)
            for each, piece in agreed(
                pieces, self._world, name_of(self.loader), check=self._check_digests
            ):
                done += 1
                self._position = number, done
                if piece is not None:
                    self._state = piece.state
                yield each
            if done == first:
                raise DataError(
                    f"{name_of(self.loader)} gave no batch in epoch {number}, after {first} batches"
                )

    def _pieces(self) -> Iterator[Piece]:
        loader: Any = self.loader
        digest = None
        for batch in loader:
            check_pair(batch, loader)
            if digest is None:
                digest = digest_of(batch)
            state = pickle.dumps(loader.state_dict()) if self.has_state else None
            yield Piece(tuple(batch), batch_size(*batch), digest=digest, state=state)

    def _check_digests(self, digests: list[int]) -> None:
        if len(set(digests) - {0}) < len(digests) - digests.count(0):
            raise DataError(
                f"{name_of(self.loader)} gives several replicas the same samples: divide them by "
                f"world.replica and world.replicas, as a DistributedSampler does"
            )

    @property
    def has_state(self) -> bool:
        """True if the loader can save and load its state."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """Returns the loaders' states after the last batch in use; a collective call."""
        state = pickle.loads(self._state) if self._state is not None else None
        states = self._world.gather(state)[:: self._world.processes_per_replica]
        return {"epoch": self._position[0], "batch": self._position[1], "states": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next `stream` continue from a `state_dict`.

        Raises:
            CheckpointError: there was another number of replicas.
        """
        states = state_dict["states"]
        if len(states) != self._world.replicas:
            raise CheckpointError(
                f"the state of {name_of(self.loader)} in the checkpoint is that of {len(states)} "
                f"replicas, not of {self._world.replicas}: go on with as many, or start a new run"
            )
        state = states[self._world.replica]
        self._loaded = {**state_dict, "state": None if state is None else pickle.dumps(state)}


def as_source(train: BatchSource | Iterable[Any], world: World) -> BatchSource:
    """Returns what a trainer trains on: `train`, or the batches of a loader of the user's own."""
    if isinstance(train, Loader):
        return train.source
    if hasattr(train, "stream"):
        return cast(BatchSource, train)
    return OwnLoader(train, world)


def _check_batch_sampler(loader: DataLoader[Any], world: World) -> None:
    """Checks that a sampler of all samples is not what makes the batches."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    if inner is loader.sampler:
        raise DataError(
            f"this DataLoader gives each of the {world.replicas} replicas all samples: pass "
            f"sampler=DistributedSampler(dataset, {world.replicas}, world.replica), or use "
            f"TrainLoader(dataset, batch_size, world), which divides them"
        )


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in (
        loader,
        *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")),
    ):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
