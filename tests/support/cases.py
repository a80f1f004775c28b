"""Cases of a parametrization, and examples of Hypothesis, that the quick command leaves to `--all`.

A case of several values is a tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings


def examples(quick: int, thorough: int) -> settings:
    """Returns the settings of a test of Hypothesis that draws `thorough` examples with `--all`.

    `conftest.py` has loaded the profile of the command before it imports a test.
    """
    in_all = settings.default.max_examples >= 100
    return settings(max_examples=thorough if in_all else quick)


def thorough(cases: Sequence[Any]) -> list[Any]:
    """Returns the cases, marked `thorough`."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
        for case in cases
    ]


def thinned(cases: Sequence[Any], every: int) -> list[Any]:
    """Returns the cases, of which all but each `every`-th are marked `thorough`.

    Of a product of axes every value stays, if `every` is prime to the lengths of the axes.
    """
    return [
        case if number % every == 0 else thorough([case])[0] for number, case in enumerate(cases)
    ]
