"""Records the values that a forward reads while it is traced.

Only `engine="distributed"` needs this file.

A `Recorder` records reads while the forward runs, and rejects a forward that changes any of these
values, because its graph would not repeat the change. There are three ways to reach a value:

1. `owner.name`: classes get a `__getattribute__` that records the name (nn.Module, and the class of
   every object that is reached). If a class cannot be changed, all its attributes count as read.
2. a global, `Class.name`, `module.name`: a trace function sees each of the user's functions that
   begins to run, and records the names in its code that its modules and classes have.
3. a closure, a default argument, an entry of a container: recorded when the function or container
   is reached; all entries of a container count as read.
"""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn

from hybridtrain.graph.attributes import (
    TABLES,
    attributes_of,
    content_of,
    dict_of,
    resolved,
    slots_of,
    table_of,
)
from hybridtrain.graph.changes import (
    Settled,
    State,
    attribute_state,
    cell_state,
    container_state,
    global_state,
)
from hybridtrain.graph.code_names import imported, instructions_with_lines, names_used
from hybridtrain.graph.output_capture import is_collector
from hybridtrain.graph.reads import CONTAINERS, MISSING, MODULE, SIMPLE, Read, Reads, named_in_model
from hybridtrain.graph.shadows import Shadows
from hybridtrain.graph.traced_graph import Untraceable, is_library, is_user_code

_CACHED = type(cache(lambda: None))
_OURS = __name__.rpartition(".")[0]  # the tracers' package
_NO_STATE = (Tensor, fx.Proxy, fx.Node, fx.Graph, Enum, torch.SymInt, torch.SymFloat, torch.SymBool)
# Library code that reads attributes on behalf of the user's code.
_READS_FOR_USER = ("torch.nn.", "collections", "types", "functools", "copy")
# Classes of the standard library whose instances are often settings or state of a model.
_PLAIN_OBJECTS = ("types", "argparse", "_thread", "collections")


# Code of this project that reads an attribute on behalf of the user's code.
ASKS_FOR_USER: set[CodeType] = set()


class Recorder:
    """Records the values that the user's code reads from `module` and all reachable objects.

    Use one recorder for one or several runs of the same forward. Recorders of further runs share
    `settled`: the first run may set a number or flag that later runs do not change
    (`config.problem_type`, which models of transformers derive from their first labels).
    """

    def __init__(self, module: nn.Module, settled: Settled, shadows: Shadows) -> None:
        self._module = module
        self._thread = threading.get_ident()
        # insertion order is the order of the reads, so that the last ones can be removed
        self._attributes: dict[tuple[int, str], Any] = {}
        self._codes: dict[CodeType | None, dict[str, Any] | None] = {}
        self._holders: dict[int, Any] = {}  # classes and Python modules
        self._cells: dict[int, tuple[CellType, str]] = {}
        self._whole: dict[int, Any] = {}  # objects that count as read with all attributes
        self._contexts: dict[int, ContextVar[Any]] = {}
        self._defaults: dict[int, tuple[Any, str]] = {}
        self._journals: tuple[dict[Any, Any], ...] = (
            self._attributes, self._codes, self._holders, self._cells, self._whole, self._contexts,
            self._defaults,
        )  # fmt: skip
        self._states: dict[int, State] = {}  # state that the forward must not change
        self._cached: dict[int, Any] = {}
        self._visited: dict[int, Any] = {}  # also keeps the ids valid
        self._paths = {id(part): f"{MODULE}{name}" for name, part in module.named_modules()}
        self._patched: dict[type, Any] = {}
        self._busy = False
        self._keeps = True
        self._settled = settled
        self._shadows = shadows

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the reads of this thread in the block.

        Raises:
            Untraceable: the block changed a list, an object or a global; the changes are undone.
        """
        # a trace function gets fewer events than a profile function; a debugger may have set one
        watch: Any = sys.settrace
        before: Any = None
        if sys.gettrace() is not None:
            watch, before = sys.setprofile, sys.getprofile()
        # Python may call these at any time, not only from the forward
        for callback in gc.callbacks:
            self._codes.setdefault(getattr(callback, "__code__", None), None)
        self._patch(nn.Module)
        for part in self._module.modules():
            self._patch_overridden(type(part))
        watch(self._called)
        try:
            with self.unchanged():
                yield
        finally:
            watch(before)
            for kind, original in reversed(self._patched.items()):
                if original is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = original  # type: ignore[method-assign]
            self._patched.clear()

    @contextmanager
    def clearing_caches(self) -> Iterator[None]:
        """Clears each reached lru_cache, which may hold stand-ins for tensors."""
        try:
            yield
        finally:
            for cached in self._cached.values():
                cached.cache_clear()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undoes changes made in the block, and raises `Untraceable` if there were any."""
        try:
            yield
        finally:
            self.refuse_changes()

    def mark(self) -> list[int]:
        """Returns a mark for `forget_since`."""
        return [len(journal) for journal in self._journals]

    def forget_since(self, mark: Sequence[int]) -> None:
        """Removes the reads after `mark`, made by code that is not part of the graph."""
        for journal, length in zip(self._journals, mark, strict=True):
            for key in list(journal)[length:]:
                del journal[key]
        self._visited.clear()  # objects reached again count as read again

    def reads(self) -> Reads:
        """Returns the reads with their current values."""
        reads = list(self._found())
        named = [(read.value, read.label) for read in reads] + list(self._defaults.values())
        containers: dict[int, tuple[Any, str]] = {}
        for value, name in named:  # may grow meanwhile
            if isinstance(value, CONTAINERS) and id(value) not in containers:
                containers[id(value)] = value, name
                items = value.items() if isinstance(value, dict) else enumerate(value)
                named += [(item, f"{name}[{key!r}]") for key, item in items]
        return Reads(reads, containers.values())

    # --- while the forward runs

    def _patch_overridden(self, kind: type) -> None:
        usual: Any = nn.Module.__getattribute__
        if kind.__getattribute__ is not usual:
            self._patch(kind)

    def _patch(self, kind: type) -> bool:
        """Makes a class record reads of its instances; returns whether this was possible."""
        if kind in self._patched:
            return True
        original: Any = kind.__getattribute__

        def get(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                self._note(owner, name, MISSING)
                raise
            self._note(owner, name, value)
            return value

        before = vars(kind).get("__getattribute__")
        try:
            kind.__getattribute__ = get  # type: ignore[method-assign,assignment]
        except TypeError:
            return False  # a class implemented in C
        self._patched[kind] = before
        return True

    def _note(self, owner: Any, name: str, value: Any) -> None:
        """Records a read of `owner.name`, made two frames up."""
        if self._busy or threading.get_ident() != self._thread:
            return
        key = id(owner), name
        if key in self._attributes or name in TABLES or name.startswith("__"):
            return
        frame = sys._getframe(2)
        while frame.f_code in ASKS_FOR_USER and frame.f_back is not None:
            frame = frame.f_back
        is_users = is_user_code(frame)
        if not is_users and not _module_of(frame).startswith(_READS_FOR_USER):
            return
        self._busy = True
        try:
            self._attributes[key] = owner
            path = self._paths.setdefault(id(owner), type(owner).__name__)
            self._visited.setdefault(id(owner), owner)
            # PyTorch's modules rebuild internal lists while torch.export replaces parameters
            self._keeps = is_users
            if isinstance(owner, nn.Module):
                self._keep_attributes(owner, path)
            for kind in type(owner).__mro__:
                self._visit(kind, kind.__name__)
                self._visit(vars(kind).get(name), f"{path}.{name}")
            self._visit(value, f"{path}.{name}")
        finally:
            self._busy, self._keeps = False, True

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        """Records the code of a user's function that begins to run."""
        code = frame.f_code
        if event != "call" or code in self._codes or code.co_name == "__del__":
            return
        held = frame.f_globals if is_user_code(frame) else None
        if held is not None and _is_importing(frame):
            return
        self._codes[code] = held
        if held is None:
            return
        busy, self._busy = self._busy, True
        try:
            names = names_used(code)
            module = str(held.get("__name__"))
            for name in names.globals:
                if name in held:
                    self._visit(held[name], f"the global {module}.{name}")
            for name in names.stored:
                self._keep(("global", id(held), name), global_state(held, name, module))
            for level, name in names.imports:
                self._visit(imported(level, name, held), name)
            self._shadows.put_into(frame)
        finally:
            self._busy = busy

    def _visit(self, value: Any, path: str) -> None:
        """Records a value that code can reach, and values reachable from it by unrecorded reads."""
        kind = type(value)
        if kind in SIMPLE or id(value) in self._visited or value is MISSING:
            return
        if issubclass(kind, _NO_STATE):
            return
        self._visited[id(value)] = value
        self._paths.setdefault(id(value), path)
        if issubclass(kind, nn.Module):
            self._patch_overridden(kind)
        elif issubclass(kind, ModuleType):
            self._holders[id(value)] = value
        elif issubclass(kind, type):
            if not is_library(value.__module__) and not issubclass(value, Enum):
                self._holders[id(value)] = value
                self._keep_attributes(value, value.__name__)
                for name, content in list(vars(value).items()):
                    if isinstance(content, CONTAINERS) and not name.startswith("__"):
                        self._visit(content, f"{path}.{name}")
        elif kind is FunctionType:
            self._visit_function(value, path)
        elif kind is MethodType and type(value.__self__).__module__.startswith(_OURS):
            return  # a stand-in for a Python builtin, in a global of the user's code
        elif kind in (MethodType, staticmethod, classmethod):
            self._visit(value.__func__, path)
            self._visit(getattr(value, "__self__", None), path)
        elif kind is property:
            self._visit(value.fget, path)
        elif kind is partial:
            for part in (value.func, value.args, value.keywords):
                self._visit(part, path)
        elif kind is _CACHED:
            self._cached[id(value)] = value
            self._visit(value.__wrapped__, path)
        elif kind is ContextVar:
            self._contexts[id(value)] = value
        elif issubclass(kind, CONTAINERS) and is_collector(value):
            return
        elif issubclass(kind, CONTAINERS):
            self._keep(id(value), container_state(value, path))
            for key, item in list(value.items() if issubclass(kind, dict) else enumerate(value)):
                self._visit(item, f"{path}[{key!r}]")
            if dict_of(value) is not None:
                self._visit_object(value, path)
        else:
            self._visit_object(value, path)

    def _visit_function(self, function: FunctionType, path: str) -> None:
        if is_library(function.__module__):
            return
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name != "__class__":
                label = f"{name} in the closure of {function.__qualname__}"
                self._cells[id(cell)] = cell, label
                self._keep(id(cell), cell_state(cell, label))
                self._visit(content_of(cell), label)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            label = f"a default argument of {function.__qualname__}"
            self._defaults[id(default)] = default, label
            self._visit(default, label)
        self._whole[id(function)] = function
        self._keep_attributes(function, function.__qualname__)

    def _visit_object(self, value: Any, path: str) -> None:
        home = type(value).__module__
        if not home.startswith("torch") and (dict_of(value) is not None or slots_of(type(value))):
            if not is_library(home) or home in _PLAIN_OBJECTS:
                self._visit(type(value), type(value).__name__)
                self._keep_attributes(value, path)
            if not self._patch(type(value)):
                self._whole[id(value)] = value
                for name, content in attributes_of(value).items():
                    self._visit(content, f"{path}.{name}")

    def _keep_attributes(self, value: Any, label: str) -> None:
        if id(value) not in self._states:
            self._keep(id(value), attribute_state(value, label))

    def _keep(self, key: Any, state: State) -> None:
        if self._keeps:
            self._states.setdefault(key, state)

    def refuse_changes(self) -> None:
        """Undoes changes made by the forward, and raises `Untraceable` if there were any."""
        busy, self._busy = self._busy, True
        try:
            changed = [
                change
                for key, state in list(self._states.items())
                for change in state.changes()
                if not self._settles(key, state, *change)
            ]
            for state, name, old in changed[::-1]:
                state.write(name, old)
        finally:
            self._busy = busy
        if changed:
            self._settled.put_back()
            state, name, _ = changed[0]
            change = named_in_model("", state.describe(name)).replace(f" {MODULE}.", " the model.")
            why = f"changes {change.replace(MODULE, '')}, which a graph would not repeat"
            raise Untraceable(why, self._line_that_stores(str(name)))

    def _settles(self, key: Any, state: State, _: State, name: Any, old: Any) -> bool:
        """Returns whether a change may stay: a simple value, set for the first time."""
        new = state.now().get(name, MISSING)
        if not state.may_settle or type(new) not in SIMPLE:
            return False
        if not self._settled.add((key, name), partial(state.write, name, old)):
            return False
        self._states[key] = replace(state, before=dict(state.now()))
        return True

    def _line_that_stores(self, name: str) -> str:
        """Returns the user's line that assigns to a global, or ""."""
        for code in list(self._codes):
            for number, instruction in instructions_with_lines(code):
                stores = instruction.opname == "STORE_GLOBAL" and instruction.argval == name
                if code is not None and stores:
                    text = linecache.getline(code.co_filename, number).strip()
                    return f"{code.co_filename}:{number}: `{text}`"
        return ""

    # --- after the forward

    def _found(self) -> Iterator[Read]:
        attributes: set[str] = set()
        for code, held in self._codes.items():
            if code is not None and held is not None:
                names = names_used(code)
                attributes |= names.attributes
                for name in names.globals & held.keys():
                    yield Read(held, name, held[name], f"the global {held.get('__name__')}.{name}")
        for holder in self._holders.values():
            table = table_of(holder)
            for name in attributes & table.keys():
                if not name.startswith("__"):
                    yield Read(table, name, table[name], f"{holder.__name__}.{name}")
        for cell, label in self._cells.values():
            yield Read(partial(content_of, cell), None, content_of(cell), label)
        for context in self._contexts.values():
            read = partial(context.get, MISSING)
            yield Read(read, None, read(), f"the ContextVar {context.name}")
        for (_, name), owner in self._attributes.items():
            yield from resolved(owner, name, f"{self._paths[id(owner)]}.{name}")
        for whole in self._whole.values():
            for name, value in vars(whole).items():
                yield Read(vars(whole), name, value, f"{self._paths[id(whole)]}.{name}")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether `frame` is part of an import, which creates globals and reads no state."""
    while frame is not None:
        if _module_of(frame) == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False
