"""A snapshot of the state that a model's code can reach, to restore it after a run.

The forward of a module may change more than buffers: counters in attributes, lists in closures of
hooks, caches in globals, generators. `PythonState` walks from a module to all mutable objects in
its attributes, hooks, closures and named globals, and restores their contents in place. Objects
keep their identity, so every reference sees the restored contents.

Reading and writing bypass the methods of the objects: their `__getattr__`, `__setattr__`, `__eq__`
or `__class__` may compute, refuse or raise. Only what has changed is written, so nothing that
cannot be written (members of enums, frozen objects, read-only arrays) needs a rule of its own.

The walk does not enter library code (anything under `site-packages` or the standard library),
iterators, open files, and objects without a `__dict__` or `__slots__`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from contextlib import contextmanager
from enum import EnumMeta
from functools import cache, cached_property, partial
from operator import attrgetter, is_
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridtrain._base.tensors import have_same_values, put_values
from hybridtrain._base.user_code import is_library_file, names_in, state_functions
from hybridtrain.errors import UserError

# The walk stops after this many objects, because the model probably holds a data set.
_MAX_OBJECTS = 200_000

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, ModuleType,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


_MISSING = object()


class _Saved(NamedTuple):
    """The contents of an object, or of one place in it.

    Attributes:
        owner: the object.
        name: the attribute; empty for all contents.
        restore: writes the contents if they have changed.
    """

    owner: Any
    name: str
    restore: Callable[[], object]

    def __str__(self) -> str:
        if issubclass(type(self.owner), type):
            owner = f"the class {self.owner.__qualname__}"
        elif isinstance(self.owner, dict) and isinstance(self.owner.get("__name__"), str):
            owner = f"the module {self.owner['__name__']}"
        else:
            owner = f"an object of type {type(self.owner).__qualname__}"
        return f"{self.name!r} of {owner}" if self.name else owner


class PythonState:
    """The contents of `roots` and of everything reachable from them.

    Args:
        roots: modules, functions or other objects.
        parameters: whether to save parameters too; buffers and other tensors are always saved.
        without: a module whose parts the walk does not enter.

    Attributes:
        is_complete: False if there are more objects than the walk enters.
    """

    def __init__(
        self, *roots: Any, parameters: bool = False, without: nn.Module | None = None
    ) -> None:
        self._saved: list[_Saved] = []
        self._kept: list[Any] = []  # keeps the objects alive, so that ids stay unique
        self._seen: set[int] = set()
        if without is not None:
            parts = (*without.modules(), *without.parameters(), *without.buffers())
            # Seen already, so the walk stops at them.
            self._seen.update(map(id, parts))
        self._parameters = parameters
        self._savers: dict[type, Callable[[Any], Iterable[Any]]] = {}  # by type: a walk meets few
        todo: deque[Any] = deque(roots)
        # Breadth first: what is near to the module matters more if the limit ends the walk.
        while todo and len(self._seen) < _MAX_OBJECTS:
            value = todo.popleft()
            # not isinstance, which reads the attribute `__class__`: proxies compute it
            if issubclass(type(value), _ATOMS) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            todo.extend(self._save(value))
        self._savers.clear()  # its methods hold this object, and so the saved tensors, in a circle
        self.is_complete = not todo

    def restore(self) -> None:
        """Restores the contents, in place.

        Raises:
            UserError: something has changed and cannot be written; everything else is restored.
        """
        # All are tried, so that one that cannot be written leaves the others restored.
        failures = _failures_of(self._saved)
        # a view that cannot be written is right once the object that it shows is restored
        if failures and (failures := _failures_of([saved for saved, _ in failures])):
            saved, error = failures[0]
            raise UserError(
                f"the model's code changes {saved}, which cannot be restored after a run that "
                f"must change nothing ({type(error).__name__}: {error}). Keep that state in an "
                "attribute or a registered buffer of a module"
            ) from error

    def _note(self, restore: Callable[..., object], owner: Any, *args: Any, name: str = "") -> None:
        self._saved.append(_Saved(owner, name, partial(restore, owner, *args)))

    def _save(self, value: Any) -> Iterable[Any]:
        """Saves the contents of one object; returns the objects in it."""
        kind = type(value)
        if kind not in self._savers:
            self._savers[kind] = self._saver_of(kind)
        return self._savers[kind](value)

    def _saver_of(self, kind: type) -> Callable[[Any], Iterable[Any]]:
        if issubclass(kind, Tensor):
            return self._save_tensor
        if issubclass(kind, FunctionType):
            return self._save_function
        if issubclass(kind, MethodType):
            return attrgetter("__self__", "__func__")
        if issubclass(kind, BuiltinFunctionType):  # such as the `append` of a list
            return lambda value: [value.__self__]
        if issubclass(kind, partial):
            return attrgetter("func", "args", "keywords")
        if issubclass(kind, nn.Module):
            return self._save_object
        if issubclass(kind, tuple | frozenset):
            # The items cannot be replaced, but they may be mutable themselves.
            iterate = _base_of(kind, tuple, frozenset).__iter__
            return lambda value: [*iterate(value), *self._save_object(value)]
        if issubclass(kind, MutableMapping | MutableSet | list | deque | bytearray):
            return self._save_container
        return self._save_other

    def _save_other(self, value: Any) -> Iterable[Any]:
        if (functions := _functions_of_generator(value)) is not None:
            read, write = functions
            # Read now: the state is an argument of `write`.
            self._saved.append(_Saved(value, "", partial(write, read())))
            return ()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and issubclass(type(value), numpy.ndarray):
            self._note(_restore_array, value, numpy.array(value, subok=False), numpy.ndarray)
        return self._save_object(value)

    def _save_tensor(self, tensor: Tensor) -> Iterable[Any]:
        hooks = [tensor._backward_hooks] if tensor._backward_hooks else []
        is_parameter = isinstance(tensor, nn.Parameter)
        # A tensor of a graph is a result, and is made again by the next forward.
        is_saved = self._parameters if is_parameter else not tensor.requires_grad
        if is_saved and not tensor.is_meta and not is_lazy(tensor):
            self._note(_restore_tensor, tensor, tensor.detach().clone())
        return hooks

    def _save_container(self, value: Any) -> Iterable[Any]:
        return [*self._save_items(value, type(value)), *self._save_object(value)]

    def _save_items(self, value: Any, kind: type) -> Iterable[Any]:
        if issubclass(kind, list | deque | bytearray):
            contents = _contents(value)
            self._note(_restore_sequence, value, contents)
            return () if issubclass(kind, bytearray) else contents
        if issubclass(kind, dict):
            items = _items(value)
            self._note(_restore_dict, value, items)
            return [item for _, item in items]
        try:
            contents, again = _contents(value), _contents(value)
        except Exception:  # it cannot be read, so the run cannot depend on its contents
            return ()
        if not _are_identical(contents, again):  # it computes its items
            return ()
        if issubclass(kind, MutableSet):
            self._note(_restore_set, value, contents)
            return contents
        self._note(_restore_mapping, value, contents)
        return [item for _, item in contents]

    def _save_function(self, function: FunctionType) -> Iterable[Any]:
        held: list[Any] = [*(function.__defaults__ or ())]
        held += (function.__kwdefaults__ or {}).values()
        if function.__dict__:
            held.append(function.__dict__)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            contents = _contents_of_cell(cell)
            self._note(_restore_cell, cell, contents, name=name)
            if contents is not _MISSING:
                held.append(contents)
        if not is_library_file(function.__code__.co_filename):
            namespace = function.__globals__
            for name in names_in(function.__code__):
                value: Any = namespace.get(name)
                if issubclass(type(value), type):
                    held += self._save_class(value)
                # The name is restored too: the code may assign it by `global`.
                elif name in namespace and not issubclass(type(value), ModuleType):
                    self._note(_restore_item, namespace, name, value, name=name)
                    held.append(value)
        return held

    def _save_object(self, value: Any) -> Iterable[Any]:
        held: list[Any] = []
        kind = type(value)
        is_of_library = _is_of_library(kind)
        if not is_of_library or issubclass(kind, nn.Module | dict | list):
            try:
                attributes = object.__getattribute__(value, "__dict__")
            except Exception:  # it has none, or a property of that name
                attributes = None
            if type(attributes) is dict:
                held.append(attributes)
        if is_of_library and not issubclass(kind, nn.Module):
            return held
        for base in type.mro(kind):
            namespace = _namespace(base)
            if "__slots__" in namespace:
                for name, slot in namespace.items():
                    if issubclass(type(slot), MemberDescriptorType):
                        contents = _contents_of_slot(value, slot)
                        self._note(_restore_slot, value, slot, contents, name=name)
                        if contents is not _MISSING:
                            held.append(contents)
            held += self._save_class(base)
        return held

    def _save_class(self, kind: type) -> Iterable[Any]:
        if id(kind) in self._seen or _is_of_library(kind):
            return ()
        self._seen.add(id(kind))
        held: list[Any] = []
        # the names of an enum are fixed, and its tables hold members that are made on demand
        is_enum = issubclass(type(kind), EnumMeta)
        attributes = {
            name: contents
            for name, contents in list(_namespace(kind).items())
            if not (is_enum and name.startswith("_"))
        }
        if not is_enum:
            self._note(_restore_class, kind, attributes)
        for name, contents in attributes.items():
            if issubclass(type(contents), property):
                held += [f for f in (contents.fget, contents.fset) if f is not None]
            elif issubclass(type(contents), classmethod | staticmethod):
                held.append(contents.__func__)
            elif issubclass(type(contents), cached_property):
                held.append(contents.func)
            elif issubclass(type(contents), FunctionType) or not name.startswith("__"):
                held.append(contents)
        return held


@contextmanager
def undone(net: nn.Module, devices: Iterable[torch.device] = ()) -> Iterator[PythonState]:
    """Restores buffers, and the state reachable from the code of `net`, after the block.

    Args:
        net: a module; its parameters are not restored.
        devices: devices with default generators to restore, in addition to the CPU.
    """
    state = PythonState(net)
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield state
        finally:
            state.restore()


def _failures_of(saved: Iterable[_Saved]) -> list[tuple[_Saved, Exception]]:
    """Restores each of `saved`; returns those that cannot be written, with the errors."""
    failures = []
    for part in saved:
        try:
            part.restore()
        except Exception as error:
            failures.append((part, error))
    return failures


def _is_of_library(kind: type) -> bool:
    name = _namespace(kind).get("__module__") or kind.__module__
    return isinstance(name, str) and _is_library_module(name)


@cache
def _is_library_module(name: str) -> bool:
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and is_library_file(file)


def _namespace(kind: type) -> Any:
    """Returns the attributes of the class itself, bypassing its metaclass."""
    return type.__getattribute__(kind, "__dict__")


def _are_identical(first: Any, second: Any) -> bool:
    """Returns whether two sequences have the same objects, or the same pairs of objects."""
    return len(first) == len(second) and all(
        a is b or (type(a) is type(b) is tuple and len(a) == len(b) == 2 and all(map(is_, a, b)))
        for a, b in zip(first, second, strict=True)
    )


def _items(values: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return list(_base_of(type(values), OrderedDict, dict).items(values))


def _contents(value: Any) -> list[Any]:
    """Returns the items of a sequence or set, or the pairs of a mapping."""
    if issubclass(type(value), MutableMapping):
        return list(value.items())
    base = _base_of(type(value), list, deque, bytearray, set, type(value))
    return list(base.__iter__(value))


def _base_of(kind: type, *bases: Any) -> Any:
    """Returns the first of `bases` that the type `kind` is derived from.

    Its methods, unlike those of a derived type, only read and write the contents.
    """
    return next(base for base in bases if issubclass(kind, base))


def _contents_of_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _contents_of_slot(value: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:  # not assigned yet
        return _MISSING


def _functions_of_generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Returns functions that read and set the state of a generator; None for other objects."""
    if issubclass(type(value), torch.Generator):
        return value.get_state, value.set_state
    return state_functions(value)


def _restore_tensor(tensor: Tensor, value: Tensor) -> None:
    try:
        if have_same_values(tensor, value):
            # No write where nothing changed: a version counter that moves would look like a change
            # in place.
            return
    except Exception:  # a type without comparison, or without data
        pass
    with torch.no_grad():
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            put_values(tensor, value)
        else:  # the run has resized it
            tensor.data = value.clone()


def _restore_dict(values: dict[Any, Any], saved: list[tuple[Any, Any]]) -> None:
    current = _items(values)
    if _are_identical(current, saved):
        return
    base = _base_of(type(values), OrderedDict, dict)
    # Order matters too; a dict whose keys are the same is written without a moment in which it is
    # empty.
    if not _are_identical([key for key, _ in current], [key for key, _ in saved]):
        base.clear(values)
    for key, item in saved:
        base.__setitem__(values, key, item)


def _restore_mapping(values: MutableMapping[Any, Any], saved: list[tuple[Any, Any]]) -> None:
    if not _are_identical(_contents(values), saved):
        values.clear()
        values.update(saved)


def _restore_item(namespace: dict[str, Any], name: str, value: Any) -> None:
    if namespace.get(name) is not value:
        namespace[name] = value


def _restore_cell(cell: CellType, contents: Any) -> None:
    if _contents_of_cell(cell) is contents:
        return
    if contents is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def _restore_slot(value: Any, slot: MemberDescriptorType, contents: Any) -> None:
    if _contents_of_slot(value, slot) is contents:
        return
    if contents is _MISSING:
        slot.__delete__(value)
    else:
        slot.__set__(value, contents)


def _restore_class(kind: type, saved: dict[str, Any]) -> None:
    current = dict(_namespace(kind))
    for name in {**saved, **current}:
        before = saved.get(name, _MISSING)
        if name.startswith("__") or current.get(name, _MISSING) is before:
            continue
        if before is _MISSING:
            type.__delattr__(kind, name)
        else:
            type.__setattr__(kind, name, before)


def _restore_sequence(values: Any, saved: list[Any]) -> None:
    if _are_identical(_contents(values), saved):
        return
    base = _base_of(type(values), list, deque, bytearray)
    if base is deque:
        base.clear(values)
        base.extend(values, saved)
    else:
        base.__setitem__(values, slice(None), saved)


def _restore_set(values: Any, saved: list[Any]) -> None:
    contents = _contents(values)
    if {*map(id, contents)} != {*map(id, saved)}:
        base = _base_of(type(values), set, type(values))
        base.clear(values)
        for item in saved:
            base.add(values, item)


def _restore_array(array: Any, saved: Any, base: Any) -> None:
    if array.shape != saved.shape or base.tobytes(array) != base.tobytes(saved):
        base.__setitem__(array, ..., saved)
