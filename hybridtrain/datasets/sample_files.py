"""The samples of files, split for training and evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtrain._base.text_table import counted
from hybridtrain.data import HeldOutError, metadata_of_training
from hybridtrain.datasets.held_out import held_out, strata_of
from hybridtrain.datasets.split_names import SPLITS
from hybridtrain.datasets.tables import (
    Table,
    check_complete,
    read_table,
    with_lists,
    without_missing,
)
from hybridtrain.errors import DataError, argument, closest, setting

_EVAL_SPLITS = (*SPLITS["validation"], *SPLITS["test"])

Choose = Callable[[Collection[str]], str]


@dataclass(frozen=True)
class Samples:
    """The samples of the splits `train` and `eval`, and their source."""

    samples: dict[str, Any]
    tables: Sequence[Table]
    held_out: bool
    notes: Sequence[str]

    @property
    def digest(self) -> str | None:
        """The digest of all files."""
        digests = [table.digest for table in self.tables]
        return None if None in digests else "-".join(map(str, digests))

    @property
    def numbers_are_texts(self) -> bool:
        """True if all values are text, as in CSV."""
        return all(table.numbers_are_texts for table in self.tables)


@dataclass(frozen=True)
class SampleFiles:
    """The files of the samples and how to split them; see `hf_datasets`.

    Attributes:
        stratify: whether to hold out the share of each class, see `strata_of`.
        classes: the column of the classes; None: there are none.
        separator: the separator of CSV and TSV files; None: guess it.
        drop_missing: whether to leave out samples without a value; None: the data set has no such
            key.
        lists: the columns of lists, which may be written as text.
    """

    path: str
    name: str | None
    eval_path: str | None
    train_split: str
    eval_split: str | None
    eval_share: float
    split_seed: int
    stratify: bool | str = False
    classes: str | None = None
    separator: str | None = None
    drop_missing: bool | None = None
    lists: Sequence[str] = ()

    def read(self, columns: Mapping[str, str], blank_targets: bool) -> Samples:
        """Returns the samples, each with a value in the columns, which are named by their keys."""
        text = next((column for column, key in columns.items() if key == "text"), None)

        def read(key: str, path: str, choose: Choose | None = None) -> Table:
            return read_table(
                key, path, self.name, text=text, separator=self.separator, choose=choose
            )

        def complete(table: Table) -> tuple[Table, dict[str, int]]:
            left_out = dict.fromkeys(table.splits, 0)
            if self.drop_missing:
                table, left_out = without_missing(table, [*columns])
            can_drop = self.drop_missing is not None
            for column, key in columns.items():
                check_complete(table, [column], key, key == "text" or blank_targets, can_drop)
            return with_lists(table, self.lists), left_out

        if metadata_of_training() is not None:
            return self._of_evaluation(read, complete)
        table, left_out = complete(read("path", self.path))
        tables = [table]
        notes = list(table.notes)
        missing = 0
        train_split = self.train_split
        train = _split_of(table.splits, train_split, "train_split", self.path)
        evaluation = None
        if self.eval_path is not None:
            eval_table, left_out_of_eval = table, left_out
            if self.path != self.eval_path:
                eval_table, left_out_of_eval = complete(read("eval_path", self.eval_path))
                tables.append(eval_table)
                notes += eval_table.notes
            eval_split = self._split_of_eval_path(eval_table.splits)
            evaluation = _split_of(eval_table.splits, eval_split, "eval_split", self.eval_path)
            missing = left_out_of_eval[eval_split]
        else:
            eval_split = self._split_of_path(table.splits)
            if eval_split != self.train_split:
                evaluation = _split_of(table.splits, eval_split, "eval_split", self.path)
                missing = left_out[eval_split]
                unused = table.splits.keys() - {self.train_split, eval_split}
                notes += [f"splits not used: {', '.join(sorted(unused))}"] if unused else []
        if self.path != self.eval_path or eval_split != train_split:
            missing += left_out[train_split]
        if missing:
            notes.append(f"{counted(missing, 'sample')} without a value left out")
        if evaluation is None:
            if len(train) < 2:
                self._check_is_a_sample(train, columns)
            strata = None
            if self.classes is not None and self.classes in train.features:
                strata, why_not = strata_of(train[self.classes], self.eval_share, self.stratify)
                notes += why_not
            first, second = held_out(len(train), self.eval_share, self.split_seed, strata)
            parts = (train.select(part, keep_in_memory=True) for part in (first, second))
            samples = dict(zip(("train", "eval"), parts, strict=True))
        else:
            samples = {"train": train, "eval": evaluation}
        for split, of_split in samples.items():
            if not len(of_split):
                raise DataError(f"the {split} split has no samples")
        return Samples(samples, tables, evaluation is None, notes)

    def _check_is_a_sample(self, train: Any, columns: Mapping[str, str]) -> None:
        """Refuses a JSON file that is one object with all samples.

        Raises:
            DataError: it is, or a column is missing.
        """
        for sample in train:
            values = [sample.get(column) for column in columns if column not in self.lists]
            is_one = all(isinstance(value, str | int | float) for value in values)
            if not is_one and any(isinstance(value, list | dict) for value in sample.values()):
                raise DataError(
                    f"{setting('path', self.path)} is one object with all samples, but must have "
                    "an object for each sample, in a list or one per line (in pandas: orient "
                    "'records')"
                )
        for column, key in columns.items():
            check_columns({"train": train}, key, [column])

    def _split_of_path(self, splits: Collection[str]) -> str:
        """Returns the evaluation split of `path`; the training split if samples are held out."""
        known_splits = (split for split in _EVAL_SPLITS if split in splits)
        return self.eval_split or next(known_splits, self.train_split)

    def _split_of_eval_path(self, splits: Collection[str]) -> str:
        known_splits = (split for split in _EVAL_SPLITS if split in splits)
        return self.eval_split or next(known_splits, next(iter(splits)))

    def _of_evaluation(
        self, read: Callable[..., Table], complete: Callable[[Table], tuple[Table, dict[str, int]]]
    ) -> Samples:
        """Returns the evaluation samples as both splits; see `metadata_of_training`.

        Raises:
            HeldOutError: they are a share of the training samples.
        """

        def choose(splits: Collection[str]) -> str:
            if self.eval_path is not None:
                chosen = self._split_of_eval_path(splits)
            elif (chosen := self._split_of_path(splits)) == self.train_split:
                raise HeldOutError
            _check_split(splits, chosen, "eval_split", path)
            return chosen

        key = "path" if self.eval_path is None else "eval_path"
        path = self.path if self.eval_path is None else self.eval_path
        table, left_out = complete(read(key, path, choose))
        ((split, evaluation),) = table.splits.items()
        notes = list(table.notes)
        if left_out[split]:
            notes.append(f"{counted(left_out[split], 'sample')} without a value left out")
        if not len(evaluation):
            raise DataError("the eval split has no samples")
        # errors name the first split
        return Samples({"eval": evaluation, "train": evaluation}, [table], False, notes)


def _split_of(whole: Mapping[str, Any], split: str, key: str, path: str) -> Any:
    _check_split(whole, split, key, path)
    return whole[split]


def _check_split(splits: Collection[str], split: str, key: str, path: str) -> None:
    if split not in splits:
        raise DataError(
            f"{setting(key, split)}: {path} has no such split; it has {', '.join(map(str, splits))}"
        )


def check_named(**values: str | None) -> None:
    """Raises a DataError that names the first argument without a value."""
    for key, value in values.items():
        if not value:
            raise DataError(
                f"{argument(key)} is not set: set it to a file, a folder, or a name on the Hub"
            )


def check_columns(
    samples: Mapping[str, Any], key: str, columns: Sequence[str], kind: str | None = None
) -> None:
    """Refuses missing columns, and columns not of a `kind`: `text`, `number`; None: any."""
    beginnings = {"text": ("string", "large_string"), "number": ("int", "uint", "float")}
    for split, of_split in samples.items():
        dtypes = {name: str(getattr(x, "dtype", x)) for name, x in of_split.features.items()}
        shown = ", ".join(f"{name} ({dtype})" for name, dtype in dtypes.items())
        for column in columns:
            if column not in dtypes:
                close = closest(column.strip(), {name.strip(): name for name in dtypes})
                close = next((name for name in dtypes if name.strip() == close), None)
                hint = f"; did you mean {close!r}?" if close else ""
                only = next(iter(dtypes)).strip() if len(dtypes) == 1 else column
                if only != column and re.search(rf"\b{re.escape(column)}\b", only):
                    hint = f"; if that is several columns, {argument('separator')} divides them"
                raise DataError(
                    f"{setting(key, column)}: the {split} split has no such column; it has "
                    f"{shown}{hint}"
                )
            if kind is not None and not dtypes[column].startswith(beginnings[kind]):
                raise DataError(
                    f"{setting(key, column)} must have {kind}s, but has {dtypes[column]}; the "
                    f"columns of the {split} split are {shown}"
                )
