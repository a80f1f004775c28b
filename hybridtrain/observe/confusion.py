"""The confusion matrix among the values of an evaluation: `eval/confusion/<true>/<predicted>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PREFIX = "eval/confusion/"

MOST_CLASSES = 40
"""The classes of a matrix that is drawn; a larger one cannot be read."""


class Confusion(NamedTuple):
    """The number of samples by true and by predicted class.

    Attributes:
        classes: their names.
        counts: for each true class, the samples of each predicted class.
    """

    classes: Sequence[str]
    counts: Sequence[Sequence[float]]


def is_confusion(tag: str) -> bool:
    """Returns whether a tag is that of a number in a confusion matrix."""
    return tag.startswith(_PREFIX)


def confusion_of(values: Mapping[str, float]) -> Confusion | None:
    """Returns the confusion matrix among values by tag; None: there is none."""
    pairs = [tag.removeprefix(_PREFIX) for tag in values if is_confusion(tag)]
    halves = ((pair[: len(pair) // 2], pair[len(pair) // 2 + 1 :]) for pair in pairs)
    classes = [first for first, second in halves if first == second]
    counts = [[values.get(f"{_PREFIX}{a}/{b}", 0.0) for b in classes] for a in classes]
    return Confusion(classes, counts) if classes else None
