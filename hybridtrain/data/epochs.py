"""A loader for loops of the user's own: one epoch at each `iter()`, and a state to resume from."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hybridtrain.data.batch import Batch
from hybridtrain.data.loader import TrainLoader
from hybridtrain.data.stream import StreamLoader, is_stream
from hybridtrain.errors import BatchError
from hybridtrain.options import LoaderOptions, with_settings
from hybridtrain.world import World

if TYPE_CHECKING:
    from hybridtrain.losses import LossFn
    from hybridtrain.losses.weights import BatchWeight
    from hybridtrain.model import HybridModel


class Loader:
    """Batches `(inputs, targets)` of this replica; each `iter()` is the next epoch.

        loader = Loader(dataset, batch_size=64, world=world)
        for inputs, targets in loader:
            weight = loader.weight(model, loss_fn)
            model.train_step(inputs, targets, loss_fn, weight=weight)

    They are those that a `Trainer` trains on: the order is drawn from (seed, epoch), the same
    samples meet in a step whatever the number of replicas, and every sample comes once per epoch.
    Every replica gets equally many batches. Where a global batch has fewer samples than there are
    replicas, some get a sample that must not count; `weight` knows. To evaluate, an `EvalLoader`
    gives every sample once without such places.

    Args:
        dataset: map-style, or iterable (see `StreamLoader`); items are `(inputs, target)`.
        batch_size: samples of a global batch, over all replicas.
        world: tells which replica this process belongs to.
        shuffle: False for the order of the data set. An iterable one keeps its own order.
        seed: the order is drawn from it.
        options: how batches are loaded.
        **settings: fields of `options` to change.

    Attributes:
        source: the `TrainLoader` or `StreamLoader` that makes the batches.
        epoch, batch: the next batch. The loop after one that was left early begins the next epoch;
            a run that loads the state of then goes on in the epoch that was left, as this one would
            have without the break.
        current: the batch that was handed out last.

    Raises:
        DataError: as of `TrainLoader` and `StreamLoader`.
    """

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
        self.options = with_settings(options or LoaderOptions(), settings)
        self.dataset = dataset
        self.batch_size = batch_size
        self.source: TrainLoader | StreamLoader
        if is_stream(dataset):
            self.source = StreamLoader(dataset, batch_size, world, seed=seed, options=self.options)
        else:
            self.source = TrainLoader(
                dataset, batch_size, world, shuffle=shuffle, seed=seed, options=self.options
            )
        self.epoch = self.batch = 0
        self.current: Batch | None = None
        self._resumes = False

    def __len__(self) -> int:
        if self.source.batches_per_epoch is None:
            raise TypeError("the data set has no length")
        return self.source.batches_per_epoch

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.batches():
            yield batch.inputs, batch.targets

    def batches(self) -> Generator[Batch, None, None]:
        """Yields the `Batch`es of the next epoch."""
        if self.batch and not self._resumes:
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumes = False
        stream = self.source.stream(self.epoch, self.batch)
        try:
            for batch in stream:
                self.current = batch
                self.batch += 1
                if batch.last:
                    self.epoch, self.batch = self.epoch + 1, 0
                yield batch
                if batch.last:
                    return
        finally:
            stream.close()

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

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the batch in use, and where the data set stands if it says so.

        Every process calls it.
        """
        source: Any = self.source
        of_source = source.state_dict() if getattr(source, "has_state", False) else None
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batch_size": self.batch_size,
            "source": of_source,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Has the next `iter()` continue from a `state_dict`.

        With another batch size it continues at the same sample, or just before it.
        """
        self.epoch = state_dict["epoch"]
        samples = state_dict["batch"] * state_dict.get("batch_size", self.batch_size)
        self.batch = samples // self.batch_size
        if self.batch >= (self.source.batches_per_epoch or math.inf):  # what drop_last leaves out
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumes = True
        if state_dict["source"] is not None:
            source: Any = self.source
            source.load_state_dict(state_dict["source"])
