"""A module's forward as a graph, and the tools of both tracers that record one."""

from __future__ import annotations

import linecache
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn
from torch.autograd.function import Function
from torch.utils._pytree import TreeSpec

# A submodule's name and the number of its call: where a segment may begin.
Call = tuple[str, int]

# Whether to look inside a submodule, given with its name.
ShouldExpand = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class TracedGraph:
    """A forward as a graph, in one mode.

    Attributes:
        graph: the operations.
        calls: for each node with which calls of submodules begin, these calls, the outermost
            first; in the order of the nodes.
        find: returns the module, parameter or tensor that a target of the graph names.
        expanded: the submodules whose own operations are in the graph.
        unexpanded: the submodules that should be expanded but cannot be traced, with the reason.
        output_spec: the structure of the output, if the graph returns its leaves alone.
    """

    graph: fx.Graph
    calls: dict[fx.Node, list[Call]]
    find: Callable[[str], Any]
    expanded: dict[str, nn.Module] = field(default_factory=dict)
    unexpanded: dict[str, str] = field(default_factory=dict)
    output_spec: TreeSpec | None = None


# Traces a module in the mode that it is in; raises any exception if it cannot.
Tracer = Callable[[nn.Module, ShouldExpand], TracedGraph]


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
