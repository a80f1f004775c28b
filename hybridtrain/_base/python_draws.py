"""Draws from the default generators of Python's `random` and of NumPy.

PyTorch's dispatcher shows its random operations. These functions are in modules, so they are
replaced there while some thread watches, and look which thread calls them.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Here(threading.local):
    tell: Callable[[str], None] | None = None


_here = _Here()
_lock = threading.Lock()
_watching = 0  # threads and nested blocks
_replaced: list[tuple[Any, str, Any]] = []

# These set or read the state of the default generator, or create another one.
_NO_DRAWS = frozenset(("seed", "getstate", "setstate", "get_state", "set_state", "default_rng"))


@contextmanager
def watched_python_draws(tell: Callable[[str], None]) -> Iterator[None]:
    """Calls `tell` with the name of the function before each draw of this thread in the block.

    Not for functions that were imported by name (`from random import random`), and not for
    generators that code has created.
    """
    # By thread, because the replaced functions are the process's.
    outer, _here.tell = _here.tell, tell
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _here.tell = outer


def _count(more: int) -> None:
    """Replaces the functions for the first watching block, and puts them back after the last."""
    global _watching
    # Threads of several stages may begin and end to watch at the same time.
    with _lock:
        before, _watching = _watching, _watching + more
        if not before:
            for module, name, function in _functions():
                _replaced.append((module, name, function))
                setattr(module, name, _telling(f"{module.__name__}.{name}", function))
        elif not _watching:
            while _replaced:
                setattr(*_replaced.pop())


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Yields the functions that draw from a default generator, with their modules and names.

    All public functions of the modules but a few do. Most are methods of the generator, and some
    call one, such as `numpy.random.sample`.
    """
    modules: list[Any] = [random]
    if "numpy.random" in sys.modules:  # else nothing of it can be called
        modules.append(sys.modules["numpy.random"])
    for module in modules:
        for name in module.__all__:
            function = getattr(module, name)
            if callable(function) and not isinstance(function, type) and name not in _NO_DRAWS:
                yield module, name, function


def _telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if _here.tell is not None:
            _here.tell(name)
        return function(*args, **kwargs)

    return telling
