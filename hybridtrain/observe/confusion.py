"""The confusion matrix of an evaluation, logged as `eval/confusion/<true>/<predicted>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PREFIX = "eval/confusion/"

MOST_CLASSES = 40
"""The largest number of classes in a drawn matrix; a larger one would be unreadable."""


class Confusion(NamedTuple):
    """The number of samples by true and predicted class.

    Attributes:
        classes: the names of the classes.
        counts: for each true class, the number of samples per predicted class.
    """

    classes: Sequence[str]
    counts: Sequence[Sequence[float]]


def is_confusion(tag: str) -> bool:
    """Returns whether a tag belongs to a confusion matrix."""
    return tag.startswith(_PREFIX)


def confusion_of(values: Mapping[str, float]) -> Confusion | None:
    """Returns the confusion matrix among values by tag, or None if there is none."""
    pairs = [tag.removeprefix(_PREFIX) for tag in values if is_confusion(tag)]
    halves = ((pair[: len(pair) // 2], pair[len(pair) // 2 + 1 :]) for pair in pairs)
    classes = [first for first, second in halves if first == second]
    counts = [[values.get(f"{_PREFIX}{a}/{b}", 0.0) for b in classes] for a in classes]
    return Confusion(classes, counts) if classes else None
