"""Finds what a graph would freeze: random choices, clocks, and values that change between calls.

A graph holds the numbers that the forward computed while it was traced. A number from Python's or
NumPy's generators, from a clock, or from a counter is another one at the next call, and a branch
that was taken because of it may be another one as well. So calls of generators and clocks stop a
trace, the states of the generators that the model can reach are compared before and after it, and
every forward is traced twice: two graphs that differ contain something that changes by itself.
"""

from __future__ import annotations

import dis
import inspect
import pickle
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache, partial
from operator import is_
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn

from hybridtrain.graph.traced_graph import Untraceable, is_user_code, line_of, replaced

_CLOCKS = tuple(
    name + unit
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_OF_MODULE = frozenset(vars(nn.Module()))  # tables of parameters, hooks and the like
_NOT_DRAWS = ("seed", "getstate", "setstate", "get_state", "set_state", "default_rng")


class Generators:
    """The generators outside PyTorch that the forward of a model can reach.

    These are the global ones of `random` and NumPy, and objects that are attributes of its modules
    or globals of their code.
    """

    def __init__(self, module: nn.Module) -> None:
        numpy_random = _numpy_random()
        kinds: tuple[type, ...] = (random.Random,)
        found: dict[int, Any] = {0: random}
        if numpy_random is not None:
            kinds += (numpy_random.RandomState, numpy_random.Generator)
            found[1] = numpy_random
        for values in _namespaces(module):
            found |= {id(value): value for value in values if isinstance(value, kinds)}
        self._generators = list(map(_state_functions, found.values()))

    def states(self) -> list[bytes]:
        """Returns the state of each, comparable with an earlier one."""
        return [pickle.dumps(read()) for read, _ in self._generators]

    @contextmanager
    def no_draws(self) -> Iterator[None]:
        """Raises `Untraceable` if one is drawn from, and puts their states back."""
        before = self.states()
        try:
            yield
            if self.states() != before:
                raise Untraceable("draws a random number outside PyTorch, which a graph would keep")
        finally:
            for (_, write), state in zip(self._generators, before, strict=True):
                write(pickle.loads(state))

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Yields a list that gets the user's line that draws first; slow."""
        found: list[str] = []
        states = self.states()
        last: FrameType | None = None
        number = 0

        def look(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last, number
            if not is_user_code(frame):
                return None
            if event in ("line", "return") and not found:
                if last is not None and self.states() != states:
                    found.append(line_of(last, number))
                last, number = frame, frame.f_lineno
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            yield found
        finally:
            sys.settrace(before)


@contextmanager
def refused_calls(module: nn.Module) -> Iterator[None]:
    """Raises `Untraceable` where the model's code asks a clock, `random` or NumPy's generator."""
    refused: dict[int, str] = {}
    with ExitStack() as stack:
        for holder, names in _sources():
            for name in names:
                what = f"{holder.__name__}.{name}"
                refused[id(getattr(holder, name))] = what
                stack.enter_context(replaced(holder, name, _refuse(what)))
        for holder in _code_modules(module):  # from time import perf_counter
            for name, value in list(vars(holder).items()):
                if id(value) in refused:
                    stack.enter_context(replaced(holder, name, _refuse(refused[id(value)])))
        yield


@contextmanager
def unchanged_containers(module: nn.Module) -> Iterator[None]:
    """Raises `Untraceable` if a list, dict or set of a module is changed, and puts it back."""
    held = [
        (name, value, copy(value))
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) in (list, dict, set) and name not in _OF_MODULE
    ]
    try:
        yield
    finally:
        changed = ""
        for name, value, before in held:
            if len(value) != len(before) or not all(map(is_, _items(value), _items(before))):
                changed = name
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(before)
        if changed:
            raise Untraceable(f"changes its attribute {changed!r}, which a graph would not")


def _items(container: Any) -> list[Any]:
    keys = list(container)
    return [*keys, *container.values()] if isinstance(container, dict) else keys


def _refuse(what: str) -> Callable[..., Any]:
    def refused(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_user_code(sys._getframe(2)):
            raise Untraceable(f"calls {what}, whose result a graph would keep")
        return original(*args, **kwargs)

    return refused


def _sources() -> Iterator[tuple[ModuleType, Iterable[str]]]:
    """Yields the modules whose functions draw random numbers or read a clock, with their names."""
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
    return sys.modules.get("numpy.random")  # without it, nobody draws from it


def _state_functions(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns what reads the state of a generator, and what writes it."""
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):  # numpy.random itself, and a RandomState
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return (lambda: bits.state), partial(setattr, bits, "state")


def _forwards(module: nn.Module) -> Iterator[FunctionType]:
    """Yields the user's forward functions in a model, each once."""
    seen = set()
    for part in module.modules():
        forward = getattr(type(part), "forward", None)
        forward = vars(part).get("forward", forward)
        forward = getattr(forward, "__func__", forward)
        if isinstance(forward, FunctionType) and forward not in seen:
            seen.add(forward)
            if not (forward.__module__ or "").startswith("torch."):
                yield forward


def _code_modules(module: nn.Module) -> list[ModuleType]:
    """Returns the Python modules whose code a model runs."""
    found = {f.__module__: sys.modules.get(f.__module__) for f in _forwards(module)}
    return [each for each in found.values() if each is not None]


def _namespaces(module: nn.Module) -> Iterator[Iterable[Any]]:
    """Yields the values that the code of a model finds by name."""
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


def globals_read(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """Returns the globals that the forwards of `modules` may read: where each is, and its name.

    The code of their methods and of the functions that they name is looked through as well.
    """
    found: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    todo: list[tuple[type, FunctionType]] = []
    for module in modules:
        forward = getattr(type(module), "forward", None)
        if isinstance(forward, FunctionType):
            todo.append((type(module), inspect.unwrap(forward)))
    seen = set(todo)
    while todo:
        kind, function = todo.pop()
        if _is_library(function.__module__):
            continue
        names, attributes = _names_read(function.__code__)
        held = function.__globals__
        found |= {(id(held), name): (held, name) for name in names if name in held}
        others = [held.get(name) for name in names]
        others += [getattr(kind, name, None) for name in attributes]
        new = {(kind, each) for each in others if isinstance(each, FunctionType)} - seen
        seen |= new
        todo += new
    return list(found.values())


@cache
def _names_read(code: CodeType) -> tuple[list[str], list[str]]:
    """Returns the globals and the attributes that a function's code reads, and those in it."""
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL":
            names[str(each.argval)] = None
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes[str(each.argval)] = None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _names_read(inner)
            names |= dict.fromkeys(more)
            attributes |= dict.fromkeys(others)
    return list(names), list(attributes)


def _is_library(module: str | None) -> bool:
    package = (module or "").partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
