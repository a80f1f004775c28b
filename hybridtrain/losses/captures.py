"""The objects that a loss function captures: in a closure, in a partial, as the self of a method.

Losses with the same code differ by them, so that `SeenLosses` tells them apart, and a trial call
must not change them, so that `copied` gives the call copies.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrain.losses.counted import CountedLoss

# Compared by value; everything else by identity.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, CodeType)

# So many losses with the same code are all new ones; then each time that their number doubles. A
# function that is made anew in each step, around tensors of the step, would never stop.
_ALL_NEW = 64


_MOST_COMPARED = 32  # entries of a list; a longer one is itself what is compared
_SMALL = 1000  # entries of a list that is copied
_COPIED_BYTES = 2**26  # of a tensor: a larger one is shared


class SeenLosses:
    """Tells whether a loss is new: other code, or the same code that captures other objects.

    A lambda in a loop is a new function each time, and the same loss. Numbers and texts are
    compared by value, other objects by identity. Objects are not kept alive.
    """

    def __init__(self) -> None:
        self._seen = set[Hashable]()
        self._numbers = Counter[Hashable]()  # of the losses with this code
        self._said = set[Hashable]()
        self._tokens: dict[int, tuple[Callable[[], Any], int]] = {}
        self._made = 0

    def is_new(self, loss: CountedLoss) -> bool:
        """Returns whether `loss` was not seen before, and notes it."""
        key = loss.is_sum, self._key(loss.function, ()), self._key(loss.count, ())
        if key in self._seen:
            return False
        code = code_of(loss.function)
        self._numbers[code] += 1
        number = self._numbers[code]
        if number > _ALL_NEW and number & (number - 1):
            return False
        self._seen.add(key)
        return True

    def says(self, loss: CountedLoss) -> bool:
        """Returns True for the first loss with its code: a warning of it is given once."""
        code = code_of(loss.function)
        is_first = code not in self._said
        self._said.add(code)
        return is_first

    def _key(self, value: Any, around: tuple[int, ...]) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if id(value) in around:  # a function that calls itself
            return "again", len(around) - around.index(id(value))
        inside = (*around, id(value))
        parts: Any = None
        if isinstance(value, partial):
            parts = value.func, value.args, value.keywords
        elif isinstance(value, MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, FunctionType):
            defaults = value.__defaults__, value.__kwdefaults__
            parts = value.__code__, *defaults, *map(_content, value.__closure__ or ())
        elif isinstance(value, CountedLoss):
            parts = value.function, value.count
        elif type(value) in (tuple, list) and len(value) <= _MOST_COMPARED:
            parts = value
        elif type(value) is dict and len(value) <= _MOST_COMPARED:
            parts = [part for item in value.items() for part in item]
        if parts is not None:
            return type(value), *(self._key(part, inside) for part in parts)
        return self._token(value)

    def _token(self, value: Any) -> int:
        """Returns a number for an object, which no later one gets, even at the same address."""
        reference, token = self._tokens.get(id(value), (None, 0))
        if reference is None or reference() is not value:
            try:
                reference = weakref.ref(value)
            except TypeError:  # it takes none: it is kept, so that its id stays its own
                reference = partial(_itself, value)
            self._made += 1
            token = self._made
            self._tokens[id(value)] = reference, token
        return token


def _itself(value: Any) -> Any:
    return value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def code_of(function: Any) -> Hashable:
    """Returns the code of a function, a partial, a method or a compiled one, or else the type."""
    while isinstance(function, partial | MethodType | CountedLoss):
        if isinstance(function, CountedLoss):
            function = function.function
        else:
            function = function.func if isinstance(function, partial) else function.__func__
    kind: Any = type(function)
    code: Hashable = getattr(function, "__code__", kind)
    return code


def copied(function: Any) -> Any:
    """Returns a copy of a loss, whose calls change nothing that `function` captures.

    A closure, a partial, a method or a callable object is copied with the lists, counters, metrics
    and buffers in it. Parameters are shared, since no loss changes them, and so are large tensors.
    Of an object with a model or much data, such as a trainer, only those attributes are copied that
    the code names. What a function keeps in a global is not copied.
    """
    return _copied(function, {})


def _copied(value: Any, memo: dict[int, Any], code: CodeType | None = None) -> Any:
    """Returns a copy of `value`, which is captured by a function with this code."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (type, *_PLAIN)) or hasattr(value, "__del__"):
        return value  # the end of a copy would end what both hold
    if isinstance(value, partial):
        args = [_copied(each, memo) for each in value.args]
        named = {key: _copied(each, memo) for key, each in value.keywords.items()}
        return partial(_copied(value.func, memo), *args, **named)
    if isinstance(value, MethodType):
        own = getattr(value.__func__, "__code__", None)
        return MethodType(value.__func__, _copied(value.__self__, memo, own))
    if isinstance(value, FunctionType):
        return _function_copied(value, memo)
    if isinstance(value, Tensor):
        is_state = not (value.requires_grad or value.is_meta) and value.nbytes <= _COPIED_BYTES
        memo[id(value)] = value.clone() if is_state else value
    elif isinstance(value, torch.Generator):
        memo[id(value)] = value.clone_state()
    elif isinstance(value, nn.Module) or not _holds_much(value):
        if isinstance(value, nn.Module):
            memo |= {id(parameter): parameter for parameter in value.parameters()}
        with suppress(Exception):  # it may refuse
            memo[id(value)] = copy.deepcopy(value, memo)
    return memo[id(value)] if id(value) in memo else _object_copied(value, memo, code)


def _function_copied(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    code = function.__code__
    cells = tuple(CellType() for _ in function.__closure__ or ())
    own = FunctionType(code, function.__globals__, function.__name__, None, cells)
    own.__dict__.update(function.__dict__)
    memo[id(function)] = own  # first: it may be in one of its cells
    own.__defaults__ = tuple(_copied(each, memo, code) for each in function.__defaults__ or ())
    named = function.__kwdefaults__ or {}
    own.__kwdefaults__ = {name: _copied(each, memo, code) for name, each in named.items()}
    for new, cell in zip(cells, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            new.cell_contents = _copied(cell.cell_contents, memo, code)
    return own


def _holds_much(value: Any) -> bool:
    """Returns whether an object holds a model, an optimizer or much data."""

    def is_much(held: Any) -> bool:
        with suppress(Exception):
            return isinstance(held, nn.Module | Optimizer) or len(held) > _SMALL
        return False

    return is_much(value) or any(map(is_much, getattr(value, "__dict__", {}).values()))


def _object_copied(value: Any, memo: dict[int, Any], code: CodeType | None) -> Any:
    """Returns a copy of an object that shares what the code does not name; or the object itself."""
    kind = type(value)
    calls = [code, getattr(kind.__call__, "__code__", None) if callable(value) else None]
    try:
        own = object.__new__(kind)
        attributes = vars(value)
    except TypeError:  # not of a class in Python
        return value
    memo[id(value)] = own
    seen = set[CodeType]()
    used = {name for each in calls if each for name in _names_used(each, kind, seen)}
    for name, held in attributes.items():
        own.__dict__[name] = _copied(held, memo, code) if name in used else held
    return own


def _names_used(code: CodeType, kind: type, seen: set[CodeType]) -> Iterator[str]:
    """Yields the names in a code, and in the methods and properties of `kind` that it names."""
    if code in seen:
        return
    seen.add(code)
    names = [*code.co_names, *(text for text in code.co_consts if isinstance(text, str))]
    yield from names
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    for name in names:
        for base in kind.__mro__:
            member: Any = vars(base).get(name)
            functions = [getattr(member, each, None) for each in ("fget", "__func__")] + [member]
            inner += [f.__code__ for f in functions if isinstance(f, FunctionType)]
    for each in inner:
        yield from _names_used(each, kind, seen)
