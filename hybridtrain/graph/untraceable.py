"""Tools for both tracers: to stop at code that a graph would not repeat, and to name its line."""

from __future__ import annotations

import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch.autograd.function import Function


class Untraceable(Exception):
    """The forward does something that a graph would not do again."""


def user_line(error: BaseException) -> str:
    """Returns the line of the user's code that `error` comes from, and its message."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_user_code(frame) and not file.startswith("<"):
            place = f"{file}:{number}: `{linecache.getline(file, number).strip()}`: "
    return place + message


def is_user_code(frame: FrameType) -> bool:
    """Returns whether `frame` is the model's, and not PyTorch's, Python's or this project's."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in ("torch", "hybridtrain") and package not in sys.stdlib_module_names


@contextmanager
def replaced(holder: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces calls of `holder.name` by `replacement(original, ...)`, in this thread alone."""
    original, thread = getattr(holder, name), threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    setattr(holder, name, called)
    try:
        yield
    finally:
        setattr(holder, name, original)


@contextmanager
def no_random_choices() -> Iterator[None]:
    """Raises `Untraceable` if Python's `random` is drawn from, and puts its state back."""
    state = random.getstate()
    try:
        yield
        if random.getstate() != state:
            raise Untraceable("draws from Python's random, which a graph would do once")
    finally:
        random.setstate(state)


class AutogradFunctionDetector:
    """Finds out whether code is run by a class derived from `autograd.Function`.

    Their `apply` cannot be replaced: it is not written in Python, and `f = MyFunction.apply` may
    have been taken before. So the callers' frames are searched for their `forward`.
    """

    def __init__(self) -> None:
        self._forwards: set[CodeType | None] = set()
        classes: list[type[Function]] = [Function]
        for derived in classes:  # which grows meanwhile
            classes += derived.__subclasses__()
            if derived.forward is not Function.forward:
                self._forwards.add(getattr(derived.forward, "__code__", None))

    def check_not_inside(self, frame: FrameType | None) -> None:
        """Raises `Untraceable` if `frame` was called by the forward of such a class."""
        while frame is not None:
            if frame.f_code in self._forwards:
                raise Untraceable("uses an autograd.Function, whose backward would be lost")
            frame = frame.f_back
