"""A loader of the user's own, as a trainer takes it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hybridtrain.data.agreement import AgreedLoader, Piece, digest_of
from hybridtrain.data.fetch import check_pair, name_of
from hybridtrain.data.loader import Loader, Position, has_state, length_of
from hybridtrain.errors import CheckpointError, DataError
from hybridtrain.microbatch import batch_size
from hybridtrain.world import World


class OwnLoader(AgreedLoader):
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

    _how_to_divide = "divide them by world.replica and world.replicas, as a DistributedSampler does"

    def __init__(self, loader: Iterable[Any], world: World) -> None:
        if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
            raise DataError(
                f"{name_of(loader)} is not a loader: pass an object whose __iter__ starts anew "
                f"and yields batches `(inputs, targets)`"
            )
        if world.replicas > 1 and isinstance(loader, DataLoader):
            whole = type(loader.sampler) in (RandomSampler, SequentialSampler)
            batched = getattr(loader.batch_sampler, "sampler", None) is loader.sampler
            if whole and batched and not isinstance(loader.dataset, IterableDataset):
                raise DataError(
                    f"this DataLoader gives each of the {world.replicas} replicas all samples: "
                    f"pass sampler=DistributedSampler(dataset, {world.replicas}, world.replica), "
                    f"or use TrainLoader(dataset, batch_size, world), which divides them"
                )
        super().__init__(loader, 1, world)
        self.has_state = has_state(loader)
        # an epoch lasts until the last replica has run out
        lengths = [length for length in world.gather(length_of(loader)) if length is not None]
        self.batches_per_epoch = max(lengths, default=None)

    def _epochs(self, start: Position) -> Generator[Generator[Piece, None, None], None, None]:
        if start.states:
            _set_epoch(self.dataset, start.epoch)
            self.dataset.load_state_dict(pickle.loads(start.states[0]))
        skip = 0 if start.states else start.batch
        for epoch in itertools.count(start.epoch):
            _set_epoch(self.dataset, epoch)
            yield self._pieces(skip)
            skip = 0

    def _pieces(self, skip: int) -> Generator[Piece, None, None]:
        digest = None
        for number, batch in enumerate(self.dataset):
            check_pair(batch, self.dataset)
            if digest is None:
                digest = digest_of(batch)
            if number >= skip:
                state = pickle.dumps(self.dataset.state_dict()) if self.has_state else None
                yield Piece(tuple(batch), batch_size(*batch), digest=digest, state=state)

    def _gathered(self, at: Position) -> list[Any]:
        state = pickle.loads(at.states[0]) if at.states else None
        return self._world.gather(state)[:: self._world.processes_per_replica]

    def _own_states(self, states: list[Any]) -> tuple[dict[int, bytes], int]:
        if len(states) != self._world.replicas:
            raise CheckpointError(
                f"the state of {name_of(self.dataset)} in the checkpoint is that of {len(states)} "
                f"replicas, not of {self._world.replicas}: go on with as many, or start a new run"
            )
        state = states[self._world.replica]
        return {} if state is None else {0: pickle.dumps(state)}, 0


def as_loader(train: Loader | Iterable[Any], world: World) -> Loader:
    """Returns what a trainer trains on, at its start: a copy of `train`, or a wrapped iterable."""
    return train.at_start() if isinstance(train, Loader) else OwnLoader(train, world)


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in (
        loader,
        *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")),
    ):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
