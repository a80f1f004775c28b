"""The splits that folders and files are named after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from hybridtrain.errors import DataError

SPLITS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
"""The names of each split, in lower case. Of several, the first one after train is evaluated."""


def split_of(name: str) -> str | None:
    """Returns the split that a folder or a word of a file's name stands for; ignores case."""
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


def split_of_file(path: PurePath) -> str | None:
    """Returns the split that a relative path names: a folder of it, or a word of the file's name.

    >>> split_of_file(PurePath("data/Train-00000-of-00002.parquet"))
    'train'
    """
    words = [*path.parts[:-1], *re.split(r"[^A-Za-z]+", path.name.partition(".")[0])]
    return next((split for word in words if (split := split_of(word))), None)


def class_numbers(
    of_train: Sequence[str], of_run: Sequence[str] | None, key: str, where: str
) -> list[str]:
    """Returns the names of the classes in the order of their numbers.

    Args:
        of_train: the names of the training split.
        of_run: the names that the numbers are already given to; None: by the order of `of_train`.
        key: of these names, for messages.
        where: the data set, for messages.

    Raises:
        DataError: the data set has another class than those.
    """
    if of_run is None:
        return list(of_train)
    check_classes(of_train, of_run, where, f"{key}=")
    return list(of_run)


def check_classes(found: Sequence[str], known: Sequence[str], where: str, of: str) -> None:
    """Raises a DataError if `found` has a class that is not in `known`; it has both lists."""
    if unknown := [name for name in found if name not in known]:
        raise DataError(
            f"{where} has the class {listed(unknown)}, which is not one of {of} "
            f"{listed(known)}; it has {listed(found)}. Classes are matched by their "
            f"names: use data with the same classes"
        )


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
