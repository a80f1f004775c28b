"""A stand-in for `torchnet.dataset.SplitDataset`, with which scripts divide their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from hybridtrain.errors import ConfigError


class SplitDataset(Dataset[Any]):
    """Contiguous parts of `dataset`, one of which is selected.

    Today's equivalent is `torch.utils.data.DistributedSampler(dataset, smp.dp_size(),
    smp.dp_rank())`, which also shuffles.

    Args:
        dataset: has a length and an item for each index.
        partitions: for each part, by name, its size: a fraction of the samples, or their number.
        initial_partition: the part that is selected at first; None: the first one.

    Raises:
        ConfigError: the parts have more samples than there are.
    """

    def __init__(
        self,
        dataset: Any,
        partitions: Mapping[str, float],
        initial_partition: str | None = None,
    ) -> None:
        self.dataset = dataset
        samples = len(dataset)
        shares = sum(partitions.values()) <= 1 + 1e-6
        sizes = {
            n: int(size * samples + 1e-6) if shares else int(size) for n, size in partitions.items()
        }
        if sum(sizes.values()) > samples:
            raise ConfigError(f"partitions={dict(partitions)} are more than {samples} samples")
        self._ranges: dict[str, range] = {}
        begin = 0
        for name, size in sizes.items():
            self._ranges[name] = range(begin, begin + size)
            begin += size
        self.select(initial_partition or next(iter(self._ranges)))

    def select(self, partition: str) -> None:
        """Selects the part that the data set has from now on."""
        if partition not in self._ranges:
            known: Sequence[str] = list(self._ranges)
            raise ConfigError(f"there is no part {partition!r}: they are {', '.join(known)}")
        self._selected = self._ranges[partition]

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._selected[index]]
