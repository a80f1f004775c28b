"""What a data set hands to the trainer: two halves, how to batch them, and facts for the model."""

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

    Both halves are map-style (they have a length), can be sent to loader workers (they pickle),
    and yield `(inputs, target)`, where each is a tensor or a pytree of tensors.
    """

    train: Dataset[Any]
    """The half that the model is trained on."""

    eval: Dataset[Any] | None
    """The half that it is evaluated on, or None where there is none."""

    collate: Callable[[Any], Any] | None = None
    """The loader's `collate_fn`; None is torch's `default_collate`."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a model may want to know: `num_classes`, `vocab_size`, `seq_len`, `image_size`, ...
    A key of the model's config that is null takes the fact of the same name."""


class InMemoryDataset(Dataset[Any]):
    """Rows of tensors held in memory, gathered a whole batch at a time.

    `inputs` and `targets` are tensors, or pytrees of tensors, that agree in their first
    dimension. `prepare`, if given, is applied to the inputs of every batch (a compact storage
    becomes what the model takes: bytes to normalised floats, say). It must keep the first
    dimension, and pickle: a function of a module, or a `functools.partial` of one.

    A `DataLoader` that finds `__getitems__` calls it with all the indices of a batch: one
    `index_select` a tensor takes the place of a Python call and a copy a row, and then a stack.
    What comes back is a batch already, so the loader's `collate_fn` must be `already_batched`.

    Raises `DataError` if the tensors differ in length, or there is none.
    """

    def __init__(
        self, inputs: Any, targets: Any, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        lengths = {len(leaf) for leaf in tree_leaves((inputs, targets))}
        if len(lengths) != 1:
            raise DataError(
                f"inputs and targets must have equally many rows, found {sorted(lengths)}"
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
            # IndexError, and not torch's own message: it is what ends `for item in dataset`.
            raise IndexError(f"row {index} of {len(self)}")
        # A batch of one, so that `prepare` has a single meaning.
        batch = self.__getitems__([index % len(self)])
        inputs, targets = tree_map(lambda leaf: leaf[0], batch)
        return inputs, targets

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """The batch `(inputs, targets)` of these rows, each stacked along a new first dimension."""
        rows = torch.as_tensor(indices, dtype=torch.int64)

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, rows)

        inputs = tree_map(pick, self.inputs)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        return inputs, tree_map(pick, self.targets)


def already_batched(batch: Any) -> Any:
    """The `collate_fn` of a data set whose `__getitems__` returns whole batches.

    It returns a batch as it is. A list is what the loader has when the data set was wrapped in
    something that only knows `__getitem__`: its items are stacked with `default_collate`.
    """
    return default_collate(batch) if isinstance(batch, list) else batch
