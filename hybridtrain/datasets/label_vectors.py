"""Labels of multi-label samples as vectors of 0 and 1: a list per sample, or a column per label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtrain.datasets.sample_files import Samples, check_columns
from hybridtrain.errors import DataError, setting

_VALUES = {0: 0.0, 1: 1.0, "0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}


@dataclass(frozen=True)
class LabelVectors:
    """Labels that are vectors of 0 and 1.

    Attributes:
        columns: the column of the vectors, or a column for each label.
        count: the number of labels.
        names: their names in order; None: they have none.
        matrix: the labels of the training samples, float32 of shape (samples, count).
    """

    columns: Sequence[str]
    count: int
    names: list[str] | None
    matrix: Tensor

    def of(self, sample: Mapping[str, Any]) -> Tensor:
        """Returns the labels of a sample, float32 of shape (count,)."""
        row = [sample[column] for column in self.columns]
        return torch.tensor([_VALUES[value] for value in (row[0] if len(row) == 1 else row)])

    def labels(self) -> Tensor:
        """Returns the labels of all training samples."""
        return self.matrix

    @property
    def without_samples(self) -> list[str]:
        """The labels that no training sample has."""
        names = self.names or [*map(str, range(self.count))]
        return [name for name, n in zip(names, self.matrix.sum(0).tolist(), strict=True) if not n]

    @property
    def note(self) -> str:
        """The part of the data line that says how the labels were read."""
        form = "a vector" if len(self.columns) == 1 else f"{self.count} columns"
        return f"labels as {form} of 0 and 1"


def label_vectors(
    source: Samples, columns: Sequence[str], classes: Sequence[str] | None
) -> LabelVectors | None:
    """Returns labels in the form of vectors; None if each sample has a list of its classes.

    Lists are vectors if all have the same length of at least 2 and contain only 0 and 1. As lists
    of classes, they would give each sample class 0, class 1 or both, some of them several times.

    Args:
        source: the samples.
        columns: the column of the lists, or a column for each label.
        classes: the names of the labels in order; None: those of several columns.

    Raises:
        DataError: one of several columns has other values, or the number of names is another one.
    """
    check_columns(source.samples, "target", columns)
    rows = {
        split: [*samples[columns[0]]]
        if len(columns) == 1
        else [[*row] for row in zip(*(samples[column] for column in columns), strict=True)]
        for split, samples in source.samples.items()
    }
    every = [row for of_split in rows.values() for row in of_split]
    if len(columns) == 1:
        feature = source.samples["train"].features[columns[0]]
        if getattr(getattr(feature, "feature", feature), "names", None):
            return None  # numbers of named classes
        lengths = {len(row) if isinstance(row, list) else 0 for row in every}
        numbers = all(isinstance(x, int | float) for row in every for x in row or ())
        if len(lengths) > 1 or max(lengths) < 2 or not numbers:
            return None
        if any(value not in (0, 1) for row in every for value in row):
            return None
    else:
        for split, of_split in rows.items():
            for number, row in enumerate(of_split, 1):
                for column, value in zip(columns, row, strict=True):
                    if value not in _VALUES:
                        raise DataError(
                            f"{setting('target', column)}: sample {number} of the {split} split "
                            f"has {value!r}, but several columns of labels must have 0 or 1"
                        )
    count = len(every[0])
    if classes is not None and len(classes) != count:
        raise DataError(
            f"{setting('classes', ','.join(classes))} has {len(classes)} names, but each sample "
            f"has {count} labels of 0 and 1"
        )
    names = [*columns] if classes is None and len(columns) > 1 else classes
    matrix = torch.tensor([[_VALUES[value] for value in row] for row in rows["train"]])
    return LabelVectors(columns, count, None if names is None else [*names], matrix)
