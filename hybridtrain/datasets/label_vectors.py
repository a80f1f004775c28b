"""Labels of multi-label samples as vectors of 0 and 1: a list per sample, or a column per label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtrain.data import metadata_of_training
from hybridtrain.datasets.sample_files import Samples, check_columns
from hybridtrain.errors import DataError, setting

IS_VECTOR = "label_vectors"
"""The metadata that says whether labels are vectors: other samples of the run are read alike."""

# in a CSV file as text
_VALUES = {0: 0.0, 1: 1.0, "0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "False": 0.0, "True": 1.0}


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

    Lists are vectors if those of the training samples are (`_are_vectors`). As lists of classes,
    they would give each sample class 0, class 1 or both, some of them several times.

    Args:
        source: the samples.
        columns: the column of the lists, or a column for each label.
        classes: the names of the labels in order; None: those of several columns.

    Raises:
        DataError: a sample has other values, or the number of names is another one.
    """
    check_columns(source.samples, "target", columns)
    rows = {
        split: [*samples[columns[0]]]
        if len(columns) == 1
        else [[*row] for row in zip(*(samples[column] for column in columns), strict=True)]
        for split, samples in source.samples.items()
    }
    of_training = rows["train"]
    if len(columns) == 1:
        feature = source.samples["train"].features[columns[0]]
        if getattr(getattr(feature, "feature", feature), "names", None):
            return None  # numbers of named classes
        trained_on = metadata_of_training() or {}
        of_one_file = [*of_training, *(rows["eval"] if source.held_out else ())]
        if not trained_on.get(IS_VECTOR, _are_vectors(of_one_file)):
            return None
        count = trained_on.get("num_labels") or len(of_training[0])
    else:
        count = len(columns)
    for split, of_split in rows.items():
        for number, row in enumerate(of_split, 1):
            _check_row(columns, row, count, f"sample {number} of the {split} split")
    if classes is not None and len(classes) != count:
        raise DataError(
            f"{setting('classes', ','.join(classes))} has {len(classes)} names, but each sample "
            f"has {count} labels of 0 and 1"
        )
    names = [*columns] if classes is None and len(columns) > 1 else classes
    matrix = torch.tensor([[_VALUES[value] for value in row] for row in rows["train"]])
    return LabelVectors(columns, count, None if names is None else [*names], matrix)


def _are_vectors(rows: Sequence[Any]) -> bool:
    """Returns whether all rows are vectors of one length of at least 2."""
    first = rows[0]
    return isinstance(first, list) and len(first) > 1 and all(_is(row, len(first)) for row in rows)


def _is(row: Any, count: int) -> bool:
    """Returns whether a row is a list of `count` numbers, each 0 or 1."""
    return (
        isinstance(row, list)
        and len(row) == count
        and all(isinstance(value, int | float) and value in (0, 1) for value in row)
    )


def _check_row(columns: Sequence[str], row: Any, count: int, sample: str) -> None:
    if len(columns) == 1:
        if not _is(row, count):
            raise DataError(
                f"{setting('target', columns[0])}: {sample} has {row!r}, but the labels of the "
                f"training samples are vectors of {count} values, each 0 or 1"
            )
        return
    for column, value in zip(columns, row, strict=True):
        if value not in _VALUES:
            raise DataError(
                f"{setting('target', column)}: {sample} has {value!r}, but several columns of "
                "labels must have 0 or 1"
            )
