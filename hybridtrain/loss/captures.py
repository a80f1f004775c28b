"""The objects that a loss function captures: in a closure, a partial, a method's self, a global.

Losses with the same code differ by them, so that `SeenLosses` tells them apart, and a trial call
must not change them, so that `copied` gives the call copies.
"""

from __future__ import annotations

import copy
import sysconfig
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrain.loss.counted import CountedLoss

# Compared by value; everything else by identity.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, CodeType)

# So many losses with the same code are all new ones; then each time that their number doubles. A
# function that is made anew in each step, around tensors of the step, would never stop.
_ALL_NEW = 64

_MOST_COMPARED = 32  # entries of a list; a longer one is an object like others
_SMALL = 1000  # entries of a list that is copied
_COPIED_BYTES = 2**26  # of a tensor: a larger one is shared

_STDLIB, _OURS = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]


class SeenLosses:
    """Tells whether a loss is new: other code, or the same code that captures other objects.

    A lambda in a loop is a new function each time, and the same loss. Numbers and texts are
    compared by value, also in lists and dicts, other objects by identity. None is kept alive.
    """

    def __init__(self) -> None:
        self._seen = set[Hashable]()
        self._numbers = Counter[Hashable]()  # of the losses with this code
        self._said = set[Hashable]()

    def is_new(self, loss: CountedLoss, divided: bool) -> bool:
        """Returns whether `loss` was not seen before, and notes it.

        Args:
            loss: of a step.
            divided: the step has several micro-batches. With one it is another loss.
        """
        key = divided, _key(loss, {})
        if key in self._seen:
            return False
        code = divided, *_codes(key[1])
        self._numbers[code] += 1
        number = self._numbers[code]
        if number > _ALL_NEW and number & (number - 1):
            return False
        self._seen.add(key)
        return True

    def says(self, loss: CountedLoss) -> bool:
        """Returns True for the first loss with its code: a warning of it is given once."""
        code = tuple(_codes(_key(loss, {})))
        is_first = code not in self._said
        self._said.add(code)
        return is_first


class _Same:
    """Is equal to another one of the same object, which it does not keep alive."""

    def __init__(self, value: Any) -> None:
        self.kind: Any = type(value)
        self._id = id(value)
        try:
            self._object: Any = weakref.ref(value)
        except TypeError:  # a later object may have its id
            self._object = None

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        if self._object is None or other._object is None:
            return self._object is other._object
        return self._object() is not None and self._object() is other._object()


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    """Returns a value that is equal for losses that capture the same.

    Args:
        value: the loss, or something that it captures.
        seen: what has its place in the key already, by id; a function may call itself.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    parts: Any = None
    if isinstance(value, partial):
        parts = value.func, *value.args, *value.keywords, *value.keywords.values()
    elif isinstance(value, MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, FunctionType):
        named = value.__kwdefaults__ or {}
        parts = (
            value.__code__,
            *(value.__defaults__ or ()),
            *named.values(),
            *map(_content, value.__closure__ or ()),
            *_globals_of(value).values(),
        )
    elif isinstance(value, CountedLoss):
        parts = value.function, value.count, value.is_sum
    elif type(value) in (tuple, list, set, dict) and len(value) <= _MOST_COMPARED:
        parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
    if parts is None:
        return _Same(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    return type(value), *(_key(part, seen) for part in parts)


def _codes(key: Any) -> Iterator[Hashable]:
    """Yields the code, and the types, in a key."""
    if isinstance(key, tuple):
        is_plain = len(key) == 2 and isinstance(key[0], type) and isinstance(key[1], key[0])
        kind: Hashable = key[1] if key[0] is CodeType else key[0]
        yield kind
        for part in () if is_plain else key[1:]:
            yield from _codes(part)
    elif isinstance(key, _Same):
        yield key.kind


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _globals_of(function: FunctionType) -> Mapping[str, Any]:
    """Returns the global objects that a function of the user's names, but for other modules'."""
    if _is_of_library(function.__code__.co_filename):
        return {}
    own = function.__globals__
    return {name: own[name] for name in _names(function.__code__) if _is_captured(own, name)}


@cache
def _is_of_library(file: str) -> bool:
    parents = Path(file).parents
    named = {parent.name for parent in parents} & {"site-packages", "dist-packages"}
    return bool(named) or _STDLIB in parents or _OURS in parents


def _is_captured(own: Mapping[str, Any], name: str) -> bool:
    value = own.get(name, ModuleType)
    if isinstance(value, ModuleType | type | BuiltinFunctionType):
        return False
    return not isinstance(value, FunctionType) or value.__globals__ is own


def _names(code: CodeType) -> list[str]:
    """Returns the global names and attributes in a code and in the functions inside of it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    names = [*code.co_names, *(name for each in inner for name in _names(each))]
    return list(dict.fromkeys(names))


def copied(function: Any, held: dict[int, Any] | None = None) -> Any:
    """Returns a copy of a loss, whose calls change nothing that `function` captures.

    A closure, a partial, a method or a callable object is copied with the lists, counters, metrics
    and buffers in it. Parameters are shared, since no loss changes them, and so are large tensors.
    Of an object with a model or much data, such as a trainer, only those attributes are copied that
    the code names. What a function of a library keeps in a global is not copied.

    Args:
        function: the loss.
        held: gets what the copy holds, by the id of what it is a copy of.
    """
    return _copied(function, {} if held is None else held)


def _copied(value: Any, memo: dict[int, Any], code: CodeType | None = None) -> Any:
    """Returns a copy of `value`, which is captured by a function with this code."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (type, *_PLAIN)) or hasattr(type(value), "__del__"):
        return value  # the end of a copy would end what both hold
    if isinstance(value, partial):
        args = [_copied(each, memo) for each in value.args]
        named = {key: _copied(each, memo) for key, each in value.keywords.items()}
        return partial(_copied(value.func, memo), *args, **named)
    if isinstance(value, MethodType):
        of_method = getattr(value.__func__, "__code__", None)
        owner = _copied(value.__self__, memo, of_method)
        return MethodType(_copied(value.__func__, memo), owner)
    if isinstance(value, FunctionType):
        return _function_copied(value, memo)
    if isinstance(value, Tensor):
        memo[id(value)] = value.clone() if _is_state(value) else value
    elif isinstance(value, torch.Generator):
        memo[id(value)] = value.clone_state()
    elif type(value) in (list, dict) and len(value) <= _SMALL:
        memo[id(value)] = own = type(value)()  # first: it may be in itself
        if isinstance(own, dict):
            own.update({key: _copied(each, memo, code) for key, each in value.items()})
        else:
            own.extend(_copied(each, memo, code) for each in value)
    elif type(value) is tuple:
        memo[id(value)] = tuple(_copied(each, memo, code) for each in value)
    elif isinstance(value, nn.Module) or not _holds_much(value):
        if isinstance(value, nn.Module):
            held = [*value.parameters(), *value.buffers()]
            memo |= {id(tensor): tensor for tensor in held if not _is_state(tensor)}
        with suppress(Exception):  # it may refuse
            memo[id(value)] = copy.deepcopy(value, memo)
    return memo[id(value)] if id(value) in memo else _object_copied(value, memo, code)


def _is_state(tensor: Tensor) -> bool:
    """Returns whether a loss may change a tensor, which is small enough to be copied."""
    if tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= _COPIED_BYTES


def _function_copied(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    code, state = function.__code__, _globals_of(function)
    if not (state or function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    own_globals = memo.setdefault(id(function.__globals__), {**function.__globals__})
    used = own_globals if state else function.__globals__
    own = FunctionType(code, used, function.__name__, None, cells)
    own.__dict__.update(function.__dict__)
    memo[id(function)] = own  # first: it may be in one of its cells
    for name, value in state.items():
        own_globals[name] = _copied(value, memo, code)
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
