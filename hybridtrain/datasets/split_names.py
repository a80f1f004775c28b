"""The usual names of splits in folders and files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from hybridtrain.errors import DataError, argument

SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""The names of each split, in lower case. If several exist, the first after train is evaluated."""


def split_of(name: str) -> str | None:
    """Returns the split that a folder name or a word of a file name stands for; ignores case."""
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


def split_of_file(path: PurePath) -> str | None:
    """Returns the split named in a relative path: by a folder, or by a word of the file name.

    >>> split_of_file(PurePath("data/Train-00000-of-00002.parquet"))
    'train'
    """
    words = [*path.parts[:-1], *re.split(r"[^A-Za-z]+", path.name.partition(".")[0])]
    return next((split for word in words if (split := split_of(word))), None)


def class_numbers(
    of_train: Sequence[str], of_run: Sequence[str] | None, key: str, data_set: str
) -> list[str]:
    """Returns the class names in index order.

    Args:
        of_train: the names of the training split.
        of_run: the names in the order of a run's indices; None: use the order of `of_train`.
        key: the config key of `of_run`, for messages.
        data_set: the data set, for messages.
        data_set: the data set, for messages.

    Raises:
        DataError: the data set has a class that is not in `of_run`.
    """
    if of_run is None:
        return list(of_train)
    check_classes(of_train, of_run, data_set, argument(key))
    return list(of_run)


def check_classes(
    classes: Sequence[str], expected: Sequence[str], data_set: str, expected_name: str
) -> None:
    """Raises a DataError with both lists if `classes` has a class that is not in `expected`."""
    if unknown := [name for name in classes if name not in expected]:
        raise DataError(
            f"{data_set} has the class {listed(unknown)}, which is not one of {expected_name} "
            f"{listed(expected)}; it has {listed(classes)}. Classes are matched by name: use data "
            f"with the same classes"
        )


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and the number of further ones."""
    remainder = f" and {len(names) - 10} more" if len(names) > 10 else ""
    # a config has numbers for [0,1]
    return ", ".join(map(str, names[:10])) + remainder
