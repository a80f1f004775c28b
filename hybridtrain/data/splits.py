"""A data set as the trainer takes it: two splits, how to batch them, and metadata for the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from hybridtrain.errors import DataError


@dataclass(frozen=True)
class DataSplits:
    """A data set, ready for a `DataLoader`.

    Both splits are map-style (they have a length), can be sent to loader workers (they pickle),
    and yield `(inputs, target)`, where each is a tensor or a pytree of tensors.
    """

    train: Dataset[Any]
    """The training split."""

    eval: Dataset[Any] | None
    """The evaluation split, or None where there is none."""

    collate: Callable[[Any], Any] | None = None
    """The loader's `collate_fn`; None: torch's `default_collate`."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that a model may need: `num_classes`, `vocab_size`, `seq_len`, `image_size`, ...
    A key of the model's config that is null takes the value of the same name."""


class InMemoryDataset(Dataset[Any]):
    """Samples held in memory as tensors, gathered a whole batch at a time.

    A `DataLoader` that finds `__getitems__` calls it with all the indices of a batch: one
    `index_select` per tensor replaces a Python call and a copy per sample, and a stack. It returns
    a whole batch, so the loader's `collate_fn` must be `already_batched`.

    Args:
        inputs: a tensor, or a pytree of tensors, with the samples in dim 0.
        targets: likewise, with equally many samples.
        prepare: applied to the inputs of every batch, such as from bytes to normalised floats. It
            must keep dim 0, and pickle: a function of a module, or a `functools.partial` of one.

    Raises:
        DataError: the tensors differ in length, or there is none.
    """

    def __init__(
        self, inputs: Any, targets: Any, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        lengths = {len(leaf) for leaf in tree_leaves((inputs, targets))}
        if len(lengths) != 1:
            raise DataError(
                f"inputs and targets must have equally many samples, found {sorted(lengths)}"
            )
        self.inputs = inputs
        self.targets = targets
        self.prepare = prepare
        self._length = lengths.pop()

    @property
    def immediate(self) -> bool:
        """Whether a batch is gathered in less time than a thread needs to hand it over."""
        return self.prepare is None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -len(self) <= index < len(self):
            # An IndexError of Python's own ends `for item in dataset`; torch's does not.
            raise IndexError(f"sample {index} of {len(self)}")
        # A batch of one, so that `prepare` has a single meaning.
        batch = self.__getitems__([index % len(self)])
        inputs, targets = tree_map(lambda leaf: leaf[0], batch)
        return inputs, targets

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Returns the batch `(inputs, targets)` of these samples, stacked in a new dim 0."""
        index = torch.as_tensor(indices, dtype=torch.int64)

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, index)

        inputs = tree_map(pick, self.inputs)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        return inputs, tree_map(pick, self.targets)


def already_batched(batch: Any) -> Any:
    """Returns `batch`; the `collate_fn` of a data set whose `__getitems__` makes whole batches.

    A data set that was wrapped in one that only knows `__getitem__` gives the loader a list of
    items instead: they are stacked with `default_collate`.
    """
    return default_collate(batch) if isinstance(batch, list) else batch
