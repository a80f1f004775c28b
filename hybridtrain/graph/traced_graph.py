"""A module's forward as a graph, and the tools of both tracers that record one."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
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
        grad_matters: whether the forward does something else where gradients are switched on or
            off otherwise than usual in this mode.
    """

    graph: fx.Graph
    calls: dict[fx.Node, list[Call]]
    find: Callable[[str], Any]
    expanded: dict[str, nn.Module] = field(default_factory=dict)
    unexpanded: dict[str, str] = field(default_factory=dict)
    output_spec: TreeSpec | None = None
    grad_matters: bool = False


def operations(traced: TracedGraph, tensor: Callable[[Any], Any] = id) -> list[Any]:
    """Returns the operations of a graph, comparable with those of another graph.

    `tensor` returns what a module, parameter or constant that the graph reads is compared by.
    """
    number = {node: f"%{index}" for index, node in enumerate(traced.graph.nodes)}

    def target(node: fx.Node) -> Any:
        # tensors that a forward has from elsewhere may have one name in both graphs
        if node.op == "get_attr":
            return tensor(traced.find(str(node.target)))
        if node.op == "call_module":
            return getattr(traced.find(str(node.target)), "key", node.target)
        return node.target

    def by_number(arguments: Any) -> str:
        return repr(fx.node.map_arg(arguments, lambda node: number[node]))

    return [
        (node.op, target(node), by_number(node.args), by_number(node.kwargs))
        for node in traced.graph.nodes
    ]


def first_difference(one: TracedGraph, other: TracedGraph) -> fx.Node | None:
    """Returns the first node in which two graphs of one forward differ; None if they are equal."""
    for traced, against in ((one, other), (other, one)):
        pairs = zip_longest(operations(traced, _Constant), operations(against, _Constant))
        nodes: list[fx.Node] = list(traced.graph.nodes)
        for node, (ours, theirs) in zip(nodes, pairs, strict=False):
            if ours != theirs:
                return node
    return None


class _Constant:
    """A tensor that equals another one with the same contents."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        one, two = self.value, other.value
        if one is two or not isinstance(one, Tensor) or not isinstance(two, Tensor):
            return one is two
        if one.shape != two.shape or one.dtype != two.dtype or one.is_meta or two.is_meta:
            return False
        return torch.equal(one, two)

    __hash__ = None  # type: ignore[assignment]


# Traces a module in the mode that it is in; raises any exception if it cannot.
Tracer = Callable[[nn.Module, ShouldExpand], TracedGraph]


class Untraceable(Exception):
    """The forward does something that a graph would not do again.

    Attributes:
        place: the user's line, where the traceback does not have it.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def user_line(error: BaseException) -> str:
    """Returns the line of the user's code that `error` comes from, and its message."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    place = getattr(error, "place", "")
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame) and not frame.f_code.co_filename.startswith("<"):
            place = line_of(frame, number)
    return f"{place}: {message}" if place else message


def line_of(frame: FrameType, number: int) -> str:
    """Returns the file, the number and the text of a line of the code that `frame` runs."""
    file = frame.f_code.co_filename
    return f"{file}:{number}: `{linecache.getline(file, number).strip()}`"


def current_user_line() -> str:
    """Returns the line of the user's code that is being run; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame) and not frame.f_code.co_filename.startswith("<"):
            return line_of(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


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
