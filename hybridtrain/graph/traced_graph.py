"""A module's forward as a graph, and helpers of both tracers.

Only `engine="distributed"` needs this file.

A graph contains the numbers that the forward computed while it was traced. Numbers from Python's or
NumPy's generators, a clock or a counter differ at the next call, and so may branches that depend on
them. Therefore, calls of generators and clocks are errors, the states of generators that the model
can reach are compared before and after the trace, and every forward is traced twice: if the graphs
differ, they contain a value that changes from call to call.
"""

from __future__ import annotations

import linecache
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function
from torch.utils._pytree import TreeSpec

from hybridtrain._base.user_code import state_functions
from hybridtrain.graph.examples import SizeGuards

if TYPE_CHECKING:
    from hybridtrain.graph.reads import Reads

# A submodule's name and the number of its call: where a segment may begin.
Call = tuple[str, int]

# Decides whether to expand a submodule, given its name.
ShouldExpand = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class TracedGraph:
    """A forward as a graph, in one mode.

    Attributes:
        graph: the operations.
        calls: the submodule calls that begin at each node, outermost first; in the order of the
            nodes.
        find: returns the module, parameter or tensor for a target of the graph.
        expanded: the submodules whose own operations are in the graph.
        unexpanded: the submodules that should be expanded but cannot be traced, with the reason.
        output_spec: the structure of the output, if the graph returns only its leaves.
        grad_matters: whether the forward behaves differently if the grad mode is not the usual one
            for this mode.
        size_guards: the answers about sizes that the trace assumed; None if there were none.
        reads: the values that the forward read in addition to its inputs, and that the graph
            contains.
    """

    graph: fx.Graph
    calls: dict[fx.Node, list[Call]]
    find: Callable[[str], Any]
    expanded: dict[str, nn.Module] = field(default_factory=dict)
    unexpanded: dict[str, str] = field(default_factory=dict)
    output_spec: TreeSpec | None = None
    grad_matters: bool = False
    size_guards: SizeGuards | None = None
    reads: Reads | None = None


def operations(traced: TracedGraph, tensor: Callable[[Any], Any] = id) -> list[Any]:
    """Returns the operations of a graph in a form that can be compared with another graph's.

    `tensor` returns the comparison key of a module, parameter or constant that the graph reads.
    """
    number = {node: f"%{index}" for index, node in enumerate(traced.graph.nodes)}

    def target(node: fx.Node) -> Any:
        # tensors from outside the model may have the same name in both graphs
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


def first_difference(first: TracedGraph, second: TracedGraph) -> fx.Node | None:
    """Returns the first node that differs in two graphs of a forward; None if they are equal."""
    for traced, against in ((first, second), (second, first)):
        pairs = zip_longest(operations(traced, _Constant), operations(against, _Constant))
        nodes: list[fx.Node] = list(traced.graph.nodes)
        for node, (first_node, second_node) in zip(nodes, pairs, strict=False):
            if first_node != second_node:
                return node
    return None


class _Constant:
    """A tensor that compares equal to another one with the same contents."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return False
        tensor, other_tensor = self.value, other.value
        if (
            tensor is other_tensor
            or not isinstance(tensor, Tensor)
            or not isinstance(other_tensor, Tensor)
        ):
            return tensor is other_tensor
        if (
            tensor.shape != other_tensor.shape
            or tensor.dtype != other_tensor.dtype
            or tensor.is_meta
            or other_tensor.is_meta
        ):
            return False
        return torch.equal(tensor, other_tensor)

    __hash__ = None  # type: ignore[assignment]


# Traces a module in its current mode; raises any exception if it cannot.
Tracer = Callable[[nn.Module, ShouldExpand], TracedGraph]


class Untraceable(Exception):
    """The forward does something that its graph would not repeat.

    Attributes:
        place: the user's line, if the traceback lacks it.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place
        _refusals.noted.append(self)


class _Refusals(threading.local):
    def __init__(self) -> None:
        self.noted: list[Exception] = []


_refusals = _Refusals()


def note_refusal(error: Exception) -> None:
    """Records an error that the model's code may catch, for `none_swallowed`."""
    _refusals.noted.append(error)


@contextmanager
def none_swallowed() -> Iterator[list[Exception]]:
    """Raises, at the end of the block, errors swallowed by the model's `except` clauses.

    These are recorded errors such as `Untraceable`. The context yields their list, from which the
    caller removes errors that it has handled.
    """
    outer_notes, _refusals.noted = _refusals.noted, []
    try:
        yield _refusals.noted
        if _refusals.noted:
            raise _refusals.noted[0]
    finally:
        _refusals.noted = outer_notes


def user_line(error: BaseException) -> str:
    """Returns the user's line that raised `error`, and its message."""
    message = (str(error) or type(error).__name__).splitlines()[0]
    place = getattr(error, "place", "")
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_code(frame) and not frame.f_code.co_filename.startswith("<"):
            place = line_of(frame, number)
    return f"{place}: {message}" if place else message


def line_of(frame: FrameType, number: int) -> str:
    """Returns file, number and text of a line of the code that `frame` runs."""
    file = frame.f_code.co_filename
    return f"{file}:{number}: `{linecache.getline(file, number).strip()}`"


def current_user_line() -> str:
    """Returns the line of the user's code being run, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame) and not frame.f_code.co_filename.startswith("<"):
            return line_of(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def is_user_code(frame: FrameType) -> bool:
    """Returns whether `frame` is the model's, and not PyTorch's, Python's or this project's."""
    return not is_library(frame.f_globals.get("__name__", ""))


# PyTorch, and the packages that compute with sizes for it.
_TORCH = frozenset(["torch", "sympy", "mpmath", "networkx"])


def is_library(module: str | None) -> bool:
    """Returns whether a Python module is PyTorch's, Python's or this project's, except models."""
    package = (module or "").partition(".")[0]
    if package == "hybridtrain":
        return not str(module).startswith("hybridtrain.models.")
    return package in _TORCH or package in sys.stdlib_module_names


@contextmanager
def replaced(holder: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replaces calls of `holder.name` by `replacement(original, ...)` in this thread only."""
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


# Functions and method names by which a forward computes gradients itself.
TAKES_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward", "requires_grad_")
GRADIENTS_ARE_CUT = (
    "computes a gradient in the forward itself, which would not flow back across a cut between "
    "stages"
)


class AutogradFunctionDetector:
    """Detects whether code runs inside a subclass of `autograd.Function`.

    `apply` cannot be replaced, because it is not written in Python and the user may have stored `f
    = MyFunction.apply`. Instead, the callers' frames are searched for the subclass's `forward`.
    """

    def __init__(self) -> None:
        self._forwards: set[CodeType | None] = set()
        classes: list[type[Function]] = [Function]
        for derived in classes:  # may grow meanwhile
            classes += derived.__subclasses__()
            if derived.forward is not Function.forward:
                self._forwards.add(getattr(derived.forward, "__code__", None))

    def check_not_inside(self, frame: FrameType | None) -> None:
        """Raises `Untraceable` if `frame` was called by the forward of such a class."""
        while frame is not None:
            if frame.f_code in self._forwards:
                raise Untraceable("uses an autograd.Function, whose backward would be lost")
            frame = frame.f_back


_CLOCKS = tuple(
    name + unit
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_OF_MODULE = frozenset(vars(nn.Module()))  # tables of parameters, hooks etc.
_NOT_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "default_rng")


class Generators:
    """The generators outside PyTorch that the forward of a model can reach.

    These are the global generators of `random` and NumPy, attributes of its modules, and globals of
    their code.
    """

    def __init__(self, module: nn.Module) -> None:
        reached: list[Any] = [random, _numpy_random()]
        for values in _namespaces(module):
            reached += values
        unique = {id(value): value for value in reached}.values()
        functions = map(state_functions, unique)
        self._generators = [pair for pair in functions if pair is not None]

    def states(self) -> list[bytes]:
        """Returns the state of each generator, for comparison with an earlier state."""
        return [pickle.dumps(read()) for read, _ in self._generators]

    @contextmanager
    def no_draws(self) -> Iterator[None]:
        """Raises `Untraceable` if the block draws from a generator, and restores their states."""
        states_before = self.states()
        try:
            yield
            if self.states() != states_before:
                raise Untraceable(
                    "draws a random number outside PyTorch, which a graph would keep: a "
                    "generator of the model has changed its state"
                )
        finally:
            for (_, write), state in zip(self._generators, states_before, strict=True):
                write(pickle.loads(state))


@contextmanager
def refused_calls(module: nn.Module) -> Iterator[None]:
    """Raises `Untraceable` if the model's code calls a clock, `random` or NumPy's generator."""
    refused: dict[int, str] = {}
    with ExitStack() as stack:
        for holder, names in _sources():
            for name in names:
                call_name = f"{holder.__name__}.{name}"
                refused[id(getattr(holder, name))] = call_name
                stack.enter_context(replaced(holder, name, _refuse(call_name)))
        for holder in _code_modules(module):  # from time import perf_counter
            for name, value in list(vars(holder).items()):
                if id(value) in refused:
                    stack.enter_context(replaced(holder, name, _refuse(refused[id(value)])))
        yield


def _refuse(what: str) -> Callable[..., Any]:
    def refused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_user_code(sys._getframe(2)):
            raise Untraceable(f"calls {what}, and a graph would keep the result")
        return original(*args, **kwargs)

    return refused


def _sources() -> Iterator[tuple[ModuleType, Iterable[str]]]:
    """Yields modules with functions that draw random numbers or read a clock, and their names."""
    yield time, [name for name in _CLOCKS if hasattr(time, name)]
    for holder in (random, _numpy_random()):
        if holder is not None:
            yield (
                holder,
                [
                    name
                    for name, value in vars(holder).items()
                    if callable(value)
                    and not isinstance(value, type)
                    and not name.startswith("_")
                    and name not in _NOT_DRAWS
                ],
            )


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")  # not imported, so not used


def _forwards(module: nn.Module) -> Iterator[FunctionType]:
    """Yields the user's forward functions in a model, without duplicates."""
    visited = set()
    for part in module.modules():
        forward = getattr(type(part), "forward", None)
        forward = vars(part).get("forward", forward)
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, FunctionType) and forward not in visited:
            visited.add(forward)
            if not (forward.__module__ or "").startswith("torch."):
                yield forward


def _code_modules(module: nn.Module) -> list[ModuleType]:
    """Returns the Python modules with code that a model runs."""
    modules = {f.__module__: sys.modules.get(f.__module__) for f in _forwards(module)}
    return [module for module in modules.values() if module is not None]


def _namespaces(module: nn.Module) -> Iterator[Iterable[Any]]:
    """Yields the values that the code of a model can look up by name."""
    for part in module.modules():
        yield list(vars(part).values())
    for holder in _code_modules(module):
        yield list(vars(holder).values())
    for forward in _forwards(module):
        for cell in forward.__closure__ or ():
            try:
                yield [cell.cell_contents]
            except ValueError:  # not assigned yet
                continue
