"""The objects that a loss function captures: in a closure, a partial, a method's self, a global.

`SeenLosses` uses them to distinguish losses with the same code, and `loss_facts` to compare the
losses of several ranks. A trial call of a loss must not change them, so `copied` gives the call
copies.
"""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtrain._base.rank_differences import plain_attributes
from hybridtrain._base.user_code import is_library_file, names_in
from hybridtrain.loss import CountedLoss, unwrapped
from hybridtrain.pipeline import batch_digest, settings_of

# Compared by value; everything else by identity.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, CodeType)

# The first 64 losses with the same code all count as new, then only one each time their number
# doubles. Otherwise a function created around new tensors in each step would always be new.
_ALL_NEW = 64

_MOST_COMPARED = 32  # maximum entries of a list compared by value; longer ones by identity
_SMALL = 1000  # maximum entries of a list to copy
_COPIED_BYTES = 2**26  # maximum bytes of a tensor to copy; larger ones are shared


class SeenLosses:
    """Decides whether a loss is new: different code, or the same code with other captured objects.

    A lambda in a loop is a new function in each iteration, but the same loss. Numbers and strings,
    also in lists and dicts, are compared by value, other objects by identity. Captured objects are
    not kept alive.
    """

    def __init__(self) -> None:
        self._seen = set[Hashable]()
        self._counts = Counter[Hashable]()  # by code, the number of losses with it
        self._warned = set[Hashable]()

    def is_new(self, loss: CountedLoss, divided: bool) -> bool:
        """Returns whether `loss` was not seen before, and records it.

        Args:
            loss: the loss of a step.
            divided: whether the step has several micro-batches; counts as part of the loss.
        """
        key = divided, _key(loss, {})
        if key in self._seen:
            return False
        code = divided, *_codes(key[1])
        self._counts[code] += 1
        count = self._counts[code]
        if count > _ALL_NEW and count & (count - 1):
            return False
        self._seen.add(key)
        return True

    def should_warn(self, loss: CountedLoss) -> bool:
        """Returns True for the first loss with its code, so that a warning is logged once."""
        code = tuple(_codes(_key(loss, {})))
        is_first = code not in self._warned
        self._warned.add(code)
        return is_first


def loss_facts(loss: CountedLoss) -> tuple[dict[str, str], dict[str, str]]:
    """Returns facts about a loss that must, and that may be equal on all ranks.

    The first are its name, the names and constants in its code, and the settings of a loss of
    PyTorch. The second are numbers of type float that a function captures. A function may know its
    rank and write logs on one, so other objects that it captures are no facts.

    Returns:
        the facts, as text, by a phrase that names each in a message.
    """
    function, settings = unwrapped(loss.function)
    settings = {name: value for name, value in settings.items() if name != "training"}
    values, numbers = settings_of(function) if isinstance(function, nn.Module) else ({}, {})
    if getattr(function, "__module__", "").startswith(("torch.", "hybridtrain.")):
        tensors = {name: value for name, value in settings.items() if type(value) is Tensor}
        values |= plain_attributes(settings)
        values |= {name: f"digest {batch_digest(value)}" for name, value in tensors.items()}
    else:
        numbers |= plain_attributes(settings, (float,))
    digest, captured = hashlib.blake2b(digest_size=6), list[float]()
    for part in _code_and_numbers(loss, set()):
        if isinstance(part, float):
            captured.append(part)
        else:
            digest.update(f"{part}\0".encode())
    facts = {
        "the loss": loss.name,
        f"the code of the loss {loss.name}": f"digest {digest.hexdigest()}",
        **{f"{name}= of the loss {loss.name}": text for name, text in values.items()},
    }
    alike = {f"{name}= of the loss {loss.name}": text for name, text in numbers.items()}
    if captured:
        alike[f"a number in the loss {loss.name}"] = ", ".join(map(str, captured[:_MOST_COMPARED]))
    return facts, alike


def _code_and_numbers(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the names and constants in the code of a function, and floats that it captures."""
    if type(value) is float:
        yield value
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, CountedLoss):
        parts = [value.function, value.count]
    elif isinstance(value, partial):
        parts = [value.func, *value.args]
    elif isinstance(value, MethodType):
        parts = [value.__func__]
    elif isinstance(value, FunctionType):
        code, named = value.__code__, value.__kwdefaults__ or {}
        constants = [value for value in code.co_consts if type(value) in (bool, int, float)]
        yield code.co_qualname, names_in(code), constants
        captured = [*(value.__defaults__ or ()), *named.values()]
        captured += map(_content, value.__closure__ or ())
        numbers = [number for number in _globals_of(value).values() if type(number) is float]
        parts = captured + numbers
    for part in parts:
        yield from _code_and_numbers(part, seen)


class _Same:
    """A weak reference to an object; two are equal if they refer to the same object."""

    def __init__(self, value: Any) -> None:
        self.kind: Any = type(value)
        # Only a hint: `__eq__` asks the weak references whether it is still the same object.
        self._id = id(value)
        try:
            self._object: Any = weakref.ref(value)
        except TypeError:  # a later object may get its id
            self._object = None

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or self._id != other._id:
            return False
        if self._object is None or other._object is None:
            return self._object is other._object
        # Two dead objects are not the same: one may have had the other's id.
        return self._object() is not None and self._object() is other._object()


def _key(value: Any, seen: dict[int, int]) -> Hashable:
    """Returns a key that is equal for losses with the same code and captured objects.

    Args:
        value: the loss, or an object that it captures.
        seen: the positions of objects that are already in the key, by id; a function may refer to
            itself.
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
    # The position, not the id: two losses with equal structure get equal keys.
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    return type(value), *(_key(part, seen) for part in parts)


def _codes(key: Any) -> Iterator[Hashable]:
    """Yields the code objects and types in a key."""
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
    """Returns the globals that a user's function uses, without modules, types and imports."""
    if is_library_file(function.__code__.co_filename):
        return {}
    namespace = function.__globals__
    names = names_in(function.__code__)
    return {name: namespace[name] for name in names if _is_captured(namespace, name)}


def _is_captured(namespace: Mapping[str, Any], name: str) -> bool:
    value = namespace.get(name, ModuleType)
    if isinstance(value, ModuleType | type | BuiltinFunctionType):
        return False
    # A function of another module is imported, and is not state of this one.
    return not isinstance(value, FunctionType) or value.__globals__ is namespace


def copied(function: Any, copies: dict[int, Any] | None = None) -> Any:
    """Returns a copy of a loss; calling it does not change the objects that `function` captures.

    A closure, a partial, a method or a callable object is copied with its lists, counters, metrics
    and buffers. Parameters are shared, because no loss changes them, and so are large tensors. For
    an object with a model or much data, such as a trainer, only the attributes used by the code are
    copied. Globals of library functions are not copied.

    Args:
        function: the loss.
        copies: a dict that receives all copies, by the id of the original.
    """
    return _copied(function, {} if copies is None else copies)


def _copied(value: Any, memo: dict[int, Any], code: CodeType | None = None) -> Any:
    """Returns a copy of `value`, captured by a function with this code."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (type, *_PLAIN)) or hasattr(type(value), "__del__"):
        return value  # `__del__` of a copy would release resources of the original
    if isinstance(value, partial):
        args = [_copied(argument, memo) for argument in value.args]
        keywords = {key: _copied(argument, memo) for key, argument in value.keywords.items()}
        return partial(_copied(value.func, memo), *args, **keywords)
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
        memo[id(value)] = twin = type(value)()  # first, because it may contain itself
        if isinstance(twin, dict):
            twin.update({key: _copied(item, memo, code) for key, item in value.items()})
        else:
            twin.extend(_copied(item, memo, code) for item in value)
    elif type(value) is tuple:
        memo[id(value)] = tuple(_copied(item, memo, code) for item in value)
    elif isinstance(value, nn.Module) or not _holds_much(value):
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            # deepcopy then takes them as copied already, so parameters and large tensors stay
            # shared.
            memo |= {id(tensor): tensor for tensor in tensors if not _is_state(tensor)}
        with suppress(Exception):  # a class may refuse; then copy its attributes one by one
            memo[id(value)] = copy.deepcopy(value, memo)
    return memo[id(value)] if id(value) in memo else _object_copied(value, memo, code)


def _is_state(tensor: Tensor) -> bool:
    """Returns whether a loss may change a tensor that is small enough to be copied."""
    if tensor.requires_grad or isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= _COPIED_BYTES


def _function_copied(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    code, state = function.__code__, _globals_of(function)
    if not (state or function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    # One copy of the namespace for all functions of a module, so that they still share their
    # globals.
    new_globals = memo.setdefault(id(function.__globals__), {**function.__globals__})
    namespace = new_globals if state else function.__globals__
    twin = FunctionType(code, namespace, function.__name__, None, cells)
    twin.__dict__.update(function.__dict__)
    memo[id(function)] = twin  # first, because one of its cells may contain it
    for name, value in state.items():
        new_globals[name] = _copied(value, memo, code)
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    twin.__defaults__ = tuple(_copied(default, memo, code) for default in defaults)
    twin.__kwdefaults__ = {name: _copied(default, memo, code) for name, default in keywords.items()}
    for new_cell, cell in zip(cells, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not set yet
            new_cell.cell_contents = _copied(cell.cell_contents, memo, code)
    return twin


def _holds_much(value: Any) -> bool:
    """Returns whether an object holds a model, an optimizer or much data."""

    def is_much(held: Any) -> bool:
        with suppress(Exception):  # most objects have no length, and a class may raise any error
            return isinstance(held, nn.Module | Optimizer) or len(held) > _SMALL
        return False

    return is_much(value) or any(map(is_much, getattr(value, "__dict__", {}).values()))


def _object_copied(value: Any, memo: dict[int, Any], code: CodeType | None) -> Any:
    """Returns a copy of an object with copies of the attributes that the code uses.

    Other attributes are shared. An object without a `__dict__` is returned unchanged.
    """
    kind = type(value)
    calls = [code, getattr(kind.__call__, "__code__", None) if callable(value) else None]
    try:
        # Without `__init__`, which may have effects.
        twin = object.__new__(kind)
        attributes = vars(value)
    except TypeError:  # not a Python class
        return value
    memo[id(value)] = twin
    seen = set[CodeType]()
    used = {name for called in calls if called for name in _names_used(called, kind, seen)}
    for name, held in attributes.items():
        twin.__dict__[name] = _copied(held, memo, code) if name in used else held
    return twin


def _names_used(code: CodeType, kind: type, seen: set[CodeType]) -> Iterator[str]:
    """Yields the names in a code object, and in the methods of `kind` that it uses."""
    if code in seen:
        return
    seen.add(code)
    names = [*code.co_names, *(text for text in code.co_consts if isinstance(text, str))]
    yield from names
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    for name in names:
        for base in kind.__mro__:
            member: Any = vars(base).get(name)
            functions = member, getattr(member, "fget", None), getattr(member, "__func__", None)
            inner += [f.__code__ for f in functions if isinstance(f, FunctionType)]
    for inner_code in inner:
        yield from _names_used(inner_code, kind, seen)
