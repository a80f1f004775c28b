"""Holding out samples for evaluation, for a data set without an evaluation split."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import torch

from hybridtrain._base.text_table import counted
from hybridtrain.datasets.split_names import listed
from hybridtrain.errors import DataError, setting


def held_out(
    samples: int, share: float, seed: int, strata: Sequence[Hashable] | None = None
) -> tuple[list[int], list[int]]:
    """Returns the indices of the training samples and of the evaluation samples, each in order.

    Args:
        samples: the number of samples in the data set.
        share: the share to hold out, above 0 and below 1; at least one sample.
        seed: the seed of the random choice.
        strata: the class of each sample, to hold out the share of each class, and at least one
            sample of each class that has two; None: choose among all samples.

    Raises:
        DataError: `share` is out of range, or there are fewer than two samples.
    """
    check_share(share)
    if samples < 2:
        raise DataError(
            f"{setting('eval_share', share)} cannot split {samples} samples: use more data"
        )
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()
    by_class: dict[Hashable, list[int]] = {}
    for number in order:
        by_class.setdefault(strata[number] if strata is not None else None, []).append(number)
    if all(len(numbers) == 1 for numbers in by_class.values()):
        by_class = {None: order}
    chosen = {
        number
        for numbers in by_class.values()
        for number in numbers[: min(max(round(len(numbers) * share), 1), len(numbers) - 1)]
    }
    return [n for n in range(samples) if n not in chosen], sorted(chosen)


def strata_of(
    labels: Iterable[object], share: float, stratify: bool | str
) -> tuple[list[str] | None, list[str]]:
    """Returns the strata for `held_out`, None without, and a part of the data line, [] without.

    Args:
        labels: the class of each sample.
        share: the share to hold out.
        stratify: whether to hold out the share of each class; `auto`: if it is at least one sample
            of each class, rounded.

    Raises:
        DataError: `stratify` is not auto, true or false.
    """
    if stratify not in (True, False, "auto"):
        raise DataError(f"{setting('stratify', stratify)} must be auto, true or false")
    if not stratify:
        return None, []
    strata = [*map(str, labels)]
    smallest = min(Counter(strata).values(), default=0)
    if stratify == "auto" and round(smallest * share) < 1:
        return None, [f"held out at random: one class has only {counted(smallest, 'sample')}"]
    return strata, []


def note_without_held_out(classes: Sequence[str], stratify: bool | str) -> list[str]:
    """Returns a part of the data line on the classes without a held-out sample; [] if none."""
    if not classes:
        return []
    hint = (
        ""
        if stratify is True
        else f" ({setting('stratify', True)} holds out the share of each class)"
    )
    return [f"no sample held out of class {listed(classes)}{hint}"]


def check_share(share: float) -> None:
    """Raises a DataError if `share` is not between 0 and 1."""
    if not 0 < share < 1:
        raise DataError(f"{setting('eval_share', share)} must be above 0 and below 1")
