"""The interface of a system: how it is started, and how it trains a case."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from scripts.bench.exactness.cases import CASES, Case


@dataclass(frozen=True)
class Trained:
    """The state of one process at the end.

    Attributes:
        values: the weights and buffers that it has, by position of the layer and name.
        replica: the copy of the model that they belong to.
    """

    values: dict[str, Tensor]
    replica: int


@dataclass(frozen=True)
class System:
    """One column of the table. Its packages are imported by `train` alone.

    Attributes:
        title: of the column.
        package: the distribution whose version is shown.
        module: what `train` imports of it.
        processes: returns the number of processes that torchrun starts for a case.
        train: trains a case in this process; the flag asks for the remedy.
        description: how the system is used.
        remedies: for each case that the documentation has an answer for, that answer.
        not_applicable: for each case that the system cannot be measured in, why.
        dtype: of the weights.
    """

    title: str
    package: str
    module: str
    processes: Callable[[Case], int]
    train: Callable[[Case, bool], Trained]
    description: str
    remedies: Mapping[str, str] = field(default_factory=dict)
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def case(self, key: str) -> Case:
        """Returns the case of `CASES`, in the precision of this system."""
        return replace(CASES[key], dtype=self.dtype)

    @property
    def version(self) -> str | None:
        """The version that is installed; None if it is not."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None
