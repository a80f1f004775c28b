"""A snapshot of the state that a model's code can reach, to restore it after a run.

The forward of a module may change more than buffers: counters in attributes, lists in closures of
hooks, caches in globals, generators. `PythonState` walks from a module to all mutable objects in
its attributes, hooks, closures and named globals, and restores their contents in place. Objects
keep their identity, so every reference sees the restored contents.

The walk does not enter library code (anything under `site-packages` or the standard library),
iterators, open files, and objects without a `__dict__` or `__slots__`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSet
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hybridtrain._base.user_code import is_library_file, names_in, state_functions

# The walk stops after this many objects, because the model probably holds a data set.
_MAX_OBJECTS = 200_000

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type, ModuleType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


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
        self._restores: list[Callable[[], object]] = []
        self._kept: list[Any] = []  # keeps the objects alive, so that ids stay unique
        self._seen: set[int] = set()
        if without is not None:
            parts = (*without.modules(), *without.parameters(), *without.buffers())
            self._seen.update(map(id, parts))
        self._parameters = parameters
        todo: deque[Any] = deque(roots)
        while todo and len(self._seen) < _MAX_OBJECTS:
            value = todo.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            todo.extend(self._save(value))
        self.is_complete = not todo

    def restore(self) -> None:
        """Restores the contents, in place."""
        for restore in self._restores:
            restore()

    def _save(self, value: Any) -> Iterable[Any]:
        """Saves the contents of one object; returns the objects in it."""
        if isinstance(value, Tensor):
            return self._save_tensor(value)
        if isinstance(value, FunctionType):
            return self._save_function(value)
        if isinstance(value, MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, tuple | frozenset):
            return value
        if isinstance(value, MutableMapping):
            return self._save_dict(value)
        if isinstance(value, list | deque | bytearray):
            self._restores.append(partial(_restore_sequence, value, list(value)))
            return () if isinstance(value, bytearray) else list(value)
        if isinstance(value, MutableSet):
            self._restores.append(partial(_restore_set, value, set(value)))
            return list(value)
        if (restore := _restore_of_generator(value)) is not None:
            self._restores.append(restore)
            return ()
        if type(value).__module__ == "numpy" and hasattr(value, "copy"):
            self._restores.append(partial(_restore_array, value, value.copy()))
            return ()
        return self._save_object(value)

    def _save_tensor(self, tensor: Tensor) -> Iterable[Any]:
        hooks = [tensor._backward_hooks] if tensor._backward_hooks else []
        is_parameter = isinstance(tensor, nn.Parameter)
        is_saved = self._parameters if is_parameter else not tensor.requires_grad
        if is_saved and not tensor.is_meta and not is_lazy(tensor):
            self._restores.append(partial(_restore_tensor, tensor, tensor.detach().clone()))
        return hooks

    def _save_dict(self, values: MutableMapping[Any, Any]) -> Iterable[Any]:
        try:
            saved = dict(values)
        except Exception:  # a mapping that computes its items
            return ()
        self._restores.append(partial(_restore_dict, values, saved))
        return list(saved.values())

    def _save_function(self, function: FunctionType) -> Iterable[Any]:
        held: list[Any] = [*(function.__defaults__ or ())]
        held += (function.__kwdefaults__ or {}).values()
        if function.__dict__:
            held.append(function.__dict__)
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._restores.append(partial(setattr, cell, "cell_contents", contents))
            held.append(contents)
        if not is_library_file(function.__code__.co_filename):
            namespace = function.__globals__
            for name in names_in(function.__code__):
                value = namespace.get(name)
                if isinstance(value, type):
                    held += () if _is_of_library(value.__module__) else self._save_class(value)
                elif name in namespace and not isinstance(value, ModuleType):
                    self._restores.append(partial(_restore_item, namespace, name, value))
                    held.append(value)
        return held

    def _save_object(self, value: Any) -> Iterable[Any]:
        held: list[Any] = []
        kind = type(value)
        if isinstance(getattr(value, "__dict__", None), dict):
            if not isinstance(value, nn.Module) and _is_of_library(kind.__module__):
                return ()
            held.append(value.__dict__)
        for base in kind.__mro__:
            if _is_of_library(base.__module__):
                continue
            for name in _slots(base):
                if hasattr(value, name):
                    contents = getattr(value, name)
                    self._restores.append(partial(object.__setattr__, value, name, contents))
                    held.append(contents)
            held += self._save_class(base)
        return held

    def _save_class(self, kind: type) -> Iterable[Any]:
        if id(kind) in self._seen:
            return ()
        self._seen.add(id(kind))
        held: list[Any] = []
        for name, contents in list(vars(kind).items()):
            function = getattr(contents, "__func__", contents)  # for example of a classmethod
            if isinstance(contents, property):
                held += [f for f in (contents.fget, contents.fset) if f is not None]
            elif isinstance(function, FunctionType):
                held.append(function)
            elif not name.startswith("__"):
                if isinstance(contents, bool | int | float | str | tuple | None | Tensor):
                    self._restores.append(partial(setattr, kind, name, contents))
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


@cache
def _is_of_library(name: str) -> bool:
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and is_library_file(file)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _restore_of_generator(value: Any) -> Callable[[], object] | None:
    """Returns a function that resets a random number generator; None for other objects."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if (functions := state_functions(value)) is None:
        return None
    read, write = functions
    return partial(write, read())


def _restore_tensor(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            tensor.data.copy_(value)
        else:  # the run has resized it
            tensor.data = value.clone()


def _restore_dict(values: MutableMapping[Any, Any], saved: dict[Any, Any]) -> None:
    current = dict(values)
    if current.keys() == saved.keys() and all(current[key] is saved[key] for key in saved):
        return
    values.clear()
    values.update(saved)


def _restore_item(namespace: dict[str, Any], name: str, value: Any) -> None:
    if namespace.get(name) is not value:
        namespace[name] = value


def _restore_sequence(values: Any, saved: list[Any]) -> None:
    if len(values) != len(saved) or any(a is not b for a, b in zip(values, saved, strict=True)):
        values.clear()
        values.extend(saved)


def _restore_set(values: Any, saved: set[Any]) -> None:
    if set(values) != saved:
        values.clear()
        values |= saved


def _restore_array(array: Any, saved: Any) -> None:
    if getattr(array, "shape", None) == saved.shape and array.flags.writeable:
        array[...] = saved
