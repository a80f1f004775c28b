"""What of a test file is left out: cases and examples without `--all`, files without a package.

A case of several values is a tuple.
"""

from __future__ import annotations

import importlib.util
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


class Installed:
    """A package that is imported when a test first uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for those of every name in a test file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def installed(name: str) -> Any:
    """Skips a test file without the package, as `pytest.importorskip` does; else returns it.

    It is not imported by the processes that collect the file and run others.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"could not import {name!r}: no such package", allow_module_level=True)
    return Installed(name)
