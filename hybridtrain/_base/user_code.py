"""Distinguishes the user's code from libraries, and finds the names and generators that it uses.

A copy of a loss and a snapshot of a model's state both follow the user's code and stop at library
code.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

_LIBRARIES = frozenset(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
) | {Path(__file__).parents[1]}


@cache
def is_library_file(path: str) -> bool:
    """Returns whether `path` is in an installed package, the standard library or this package."""
    parents = Path(path).parents
    names = {parent.name for parent in parents}
    return not names.isdisjoint(("site-packages", "dist-packages")) or any(
        parent in _LIBRARIES for parent in parents
    )


def names_in(code: CodeType) -> list[str]:
    """Returns the globals and attributes that `code`, and functions inside it, may look up."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    names = [*code.co_names, *(name for function in inner for name in names_in(function))]
    return list(dict.fromkeys(names))


def state_functions(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns functions that read and set the state of a generator of Python or NumPy.

    The modules `random` and `numpy.random`, which have one generator each, count as generators.
    Returns None for other objects, and for the operating system's generator, which has no state.
    """
    kind = type(generator)  # isinstance would read the attribute `__class__`, which may raise
    if issubclass(kind, random.SystemRandom):
        return None
    if generator is random or issubclass(kind, random.Random):
        return generator.getstate, generator.setstate
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:  # no object can be a NumPy generator
        return None
    if generator is numpy_random or issubclass(kind, numpy_random.RandomState):
        return generator.get_state, generator.set_state
    if issubclass(kind, numpy_random.Generator):
        bits = generator.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None
