"""The values that a traced forward has read, and whether they still hold.

A graph contains whatever its forward read while it was traced: numbers and flags of modules and
configs, entries of dicts and lists, globals, closures, class attributes, functions, buffers. A
`Recorder` notes these reads while the forward runs, and refuses a forward that changes any of
them, which a graph would not do again. `Reads` compares them before each step.

Three ways lead to a value, and each is watched where it is taken:

1. `owner.name`: classes get a `__getattribute__` that notes the name (nn.Module, and the class of
   every object that is reached). Where a class cannot be changed, all its attributes count as read.
2. a global, `Class.name`, `module.name`: a trace function sees each function of the user's that
   begins to run; the names in its code are noted, and those that its modules and classes have.
3. a closure, a default argument, an entry of a container: noted with the function or container
   that has been reached; a container counts as read with all its entries.
"""

from __future__ import annotations

import dis
import gc
import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from importlib.util import resolve_name
from itertools import chain
from operator import is_, itemgetter
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from hybridtrain.graph.output_capture import INSTALLED, is_collector
from hybridtrain.graph.traced_graph import Untraceable, is_library, is_user_code, line_of

_SIMPLE = {
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
}  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CACHED = type(cache(lambda: None))
_OURS = __name__.rpartition(".")[0]  # the package of the tracers
# Tables of parameters, hooks and the like, `training`, and the mark of hooks of transformers.

_TABLES = frozenset(vars(nn.Module())) | {INSTALLED}
_NO_STATE = (Tensor, fx.Proxy, fx.Node, fx.Graph, Enum, torch.SymInt, torch.SymFloat, torch.SymBool)
# Code outside the user's that reads attributes on behalf of the user's.
_READS_FOR_USER = ("torch.nn.", "collections", "types", "functools", "copy")
# Classes of the standard library whose instances are often settings or state of a model.
_PLAIN_OBJECTS = ("types", "argparse", "_thread", "collections")


# Code of this project that reads an attribute where the user's code has asked for it.
ASKS_FOR_USER: set[CodeType] = set()


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


class _Read(NamedTuple):
    """A value that was read: `table[key]`, or what `table(key)` returns; MISSING if not there."""

    table: Any
    key: Any
    value: Any
    label: str


class Recorder:
    """Notes what the user's code reads from `module` and from all that it reaches from there.

    Use one for one run of the forward, or for several of the same forward. Those of several runs
    share `settled`: a number or flag may be set in the first run, if it is left alone in the others
    (`config.problem_type`, which models of transformers derive from their first labels).
    """

    def __init__(self, module: nn.Module, settled: Settled, shadows: Shadows) -> None:
        self._module = module
        self._thread = threading.get_ident()
        # insertion order is the order of the reads, so that the last ones can be forgotten
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
        self._states: dict[int, _State] = {}  # what the forward must not change
        self._cached: dict[int, Any] = {}
        self._visited: dict[int, Any] = {}  # which also keeps the ids valid
        self._paths = {id(part): f"{_MODULE}{name}" for name, part in module.named_modules()}
        self._patched: dict[type, Any] = {}
        self._busy = False
        self._keeps = True
        self._settled = settled
        self._shadows = shadows

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes what this thread reads in the block.

        Raises:
            Untraceable: the block has changed a list, an object or a global that it has reached;
                they are put back.
        """
        # a trace function sees fewer events than a profile function; a debugger may have one
        watch: Any = sys.settrace
        before: Any = None
        if sys.gettrace() is not None:
            watch, before = sys.setprofile, sys.getprofile()
        # Python may call these at any moment: the forward did not
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
        """Clears each lru_cache that was reached: it may hold stand-ins for tensors."""
        try:
            yield
        finally:
            for cached in self._cached.values():
                cached.cache_clear()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Puts back what the block changes, and then raises `Untraceable`."""
        try:
            yield
        finally:
            self.refuse_changes()

    def mark(self) -> list[int]:
        """Returns what `forget_since` takes."""
        return [len(journal) for journal in self._journals]

    def forget_since(self, mark: Sequence[int]) -> None:
        """Forgets what was read after `mark`, by code that does not come into the graph."""
        for journal, length in zip(self._journals, mark, strict=True):
            for key in list(journal)[length:]:
                del journal[key]
        self._visited.clear()  # what is reached again counts as read again

    def reads(self) -> Reads:
        """Returns what was read, with the values that there are now."""
        reads = list(self._found())
        named = [(read.value, read.label) for read in reads] + list(self._defaults.values())
        containers: dict[int, tuple[Any, str]] = {}
        for value, name in named:  # which grows meanwhile
            if isinstance(value, _CONTAINERS) and id(value) not in containers:
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
        """Lets a class note what is read from its instances; returns whether that was possible."""
        if kind in self._patched:
            return True
        original: Any = kind.__getattribute__

        def get(owner: Any, name: str) -> Any:
            try:
                value = original(owner, name)
            except AttributeError:
                self._note(owner, name, _MISSING)
                raise
            self._note(owner, name, value)
            return value

        before = vars(kind).get("__getattribute__")
        try:
            kind.__getattribute__ = get  # type: ignore[method-assign,assignment]
        except TypeError:
            return False  # a class written in C
        self._patched[kind] = before
        return True

    def _note(self, owner: Any, name: str, value: Any) -> None:
        """Notes that `name` of `owner` is read, in the frame before the last one."""
        if self._busy or threading.get_ident() != self._thread:
            return
        key = id(owner), name
        if key in self._attributes or name in _TABLES or name.startswith("__"):
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
        """Notes the code of a function of the user's that begins to run."""
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
            names = _names_in(code)
            module = str(held.get("__name__"))
            for name in names.globals:
                if name in held:
                    self._visit(held[name], f"the global {module}.{name}")
            for name in names.stored:
                self._keep(("global", id(held), name), _global_state(held, name, module))
            for level, name in names.imports:
                self._visit(_imported(level, name, held), name)
            self._shadows.put_into(frame)
        finally:
            self._busy = busy

    def _visit(self, value: Any, path: str) -> None:
        """Notes a value that code can reach, and what it reaches from there unseen."""
        kind = type(value)
        if kind in _SIMPLE or id(value) in self._visited or value is _MISSING:
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
                    if isinstance(content, _CONTAINERS) and not name.startswith("__"):
                        self._visit(content, f"{path}.{name}")
        elif kind is FunctionType:
            self._visit_function(value, path)
        elif kind is MethodType and type(value.__self__).__module__.startswith(_OURS):
            return  # a stand-in for a function of Python's, in a global of the user's code
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
        elif issubclass(kind, _CONTAINERS) and is_collector(value):
            return
        elif issubclass(kind, _CONTAINERS):
            self._keep(id(value), _container_state(value, path))
            for key, item in list(value.items() if issubclass(kind, dict) else enumerate(value)):
                self._visit(item, f"{path}[{key!r}]")
            if _dict_of(value) is not None:
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
                self._keep(id(cell), _cell_state(cell, label))
                self._visit(_content(cell), label)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            label = f"a default argument of {function.__qualname__}"
            self._defaults[id(default)] = default, label
            self._visit(default, label)
        self._whole[id(function)] = function
        self._keep_attributes(function, function.__qualname__)

    def _visit_object(self, value: Any, path: str) -> None:
        home = type(value).__module__
        if not home.startswith("torch") and (_dict_of(value) is not None or _slots(type(value))):
            if not is_library(home) or home in _PLAIN_OBJECTS:
                self._visit(type(value), type(value).__name__)
                self._keep_attributes(value, path)
            if not self._patch(type(value)):
                self._whole[id(value)] = value
                for name, content in _attributes_of(value).items():
                    self._visit(content, f"{path}.{name}")

    def _keep_attributes(self, value: Any, label: str) -> None:
        if id(value) not in self._states:
            self._keep(id(value), _attribute_state(value, label))

    def _keep(self, key: Any, state: _State) -> None:
        if self._keeps:
            self._states.setdefault(key, state)

    def refuse_changes(self) -> None:
        """Puts back what the forward has changed, and then raises `Untraceable`."""
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
            what = _named("", state.describe(name)).replace(f" {_MODULE}.", " the model.")
            why = f"changes {what.replace(_MODULE, '')}, which a graph would not"
            raise Untraceable(why, self._line_that_stores(str(name)))

    def _settles(self, key: Any, state: _State, _: _State, name: Any, old: Any) -> bool:
        """Returns whether a change may stay: a simple value, set for the first time."""
        new = state.now().get(name, _MISSING)
        if not state.may_settle or type(new) not in _SIMPLE:
            return False
        if not self._settled.add((key, name), partial(state.write, name, old)):
            return False
        self._states[key] = replace(state, before=dict(state.now()))
        return True

    def _line_that_stores(self, name: str) -> str:
        """Returns the user's line that assigns to a global; "" if there is none."""
        for code in list(self._codes):
            for number, instruction in _instructions_with_lines(code):
                stores = instruction.opname == "STORE_GLOBAL" and instruction.argval == name
                if code is not None and stores:
                    text = linecache.getline(code.co_filename, number).strip()
                    return f"{code.co_filename}:{number}: `{text}`"
        return ""

    # --- after the forward

    def _found(self) -> Iterator[_Read]:
        attributes: set[str] = set()
        for code, held in self._codes.items():
            if code is not None and held is not None:
                names = _names_in(code)
                attributes |= names.attributes
                for name in names.globals & held.keys():
                    yield _Read(held, name, held[name], f"the global {held.get('__name__')}.{name}")
        for holder in self._holders.values():
            table = _table(holder)
            for name in attributes & table.keys():
                if not name.startswith("__"):
                    yield _Read(table, name, table[name], f"{holder.__name__}.{name}")
        for cell, label in self._cells.values():
            yield _Read(partial(_content, cell), None, _content(cell), label)
        for context in self._contexts.values():
            read = partial(context.get, _MISSING)
            yield _Read(read, None, read(), f"the ContextVar {context.name}")
        for (_, name), owner in self._attributes.items():
            yield from _resolved(owner, name, f"{self._paths[id(owner)]}.{name}")
        for whole in self._whole.values():
            for name, value in vars(whole).items():
                yield _Read(vars(whole), name, value, f"{self._paths[id(whole)]}.{name}")


def _resolved(owner: Any, name: str, label: str) -> Iterator[_Read]:
    """Yields the places where Python looks for an attribute, with what is there."""
    kind = type(owner)
    attributes = _dict_of(owner)
    raw: Any = _MISSING
    before: list[type] = []  # the classes where it is looked for first
    for base in kind.__mro__:
        if name in vars(base):
            raw = vars(base)[name]
            break
        before.append(base)
    if raw is not _MISSING and hasattr(type(raw), "__set__"):  # a property, a slot
        if isinstance(raw, MemberDescriptorType):
            read = partial(getattr, owner, name, _MISSING)
            yield _Read(read, None, read(), label)
        elif not is_library(base.__module__):
            yield _Read(_table(base), name, raw, label)
        return
    if attributes is not None and name in attributes:
        yield _Read(attributes, name, attributes[name], label)
        return
    if attributes is not None:
        yield _Read(attributes, name, _MISSING, label)
    if raw is not _MISSING:
        for other in before:
            if not is_library(other.__module__):
                yield _Read(_table(other), name, _MISSING, label)
        if not is_library(base.__module__):
            yield _Read(_table(base), name, raw, label)
    elif isinstance(owner, nn.Module):
        for table in (owner._parameters, owner._modules):
            if name in table:
                return  # another module or parameter is noticed for the model as a whole
        buffers = owner._buffers
        yield _Read(buffers, name, buffers.get(name, _MISSING), label)
        if name in buffers:
            return
    if _looks_up(kind):
        read = partial(_looked_up, owner, name)
        if _same(value := read(), read()):
            yield _Read(read, None, value, label)


_class_tables: WeakKeyDictionary[type, Any] = WeakKeyDictionary()


def _table(holder: Any) -> Any:
    """Returns `vars` of a class or Python module: for a class the same object each time."""
    if not isinstance(holder, type):
        return vars(holder)
    return _class_tables.setdefault(holder, vars(holder))


def _looks_up(kind: type) -> bool:
    """Returns whether a class of the user's has its own way to find attributes."""
    return any(
        ("__getattr__" in vars(base) or "__getattribute__" in vars(base))
        for base in kind.__mro__
        if not is_library(base.__module__)
    )


def _looked_up(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:
        return _MISSING


def _dict_of(value: Any) -> Any:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def _slots(kind: type) -> list[str]:
    return [
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and not is_library(base.__module__)
    ]


def _attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, a function or a class."""
    if isinstance(value, type):
        return {n: v for n, v in vars(value).items() if not n.startswith("_abc")}
    attributes = dict(_dict_of(value) or {})
    for name in _slots(type(value)):
        with suppress(AttributeError):
            attributes[name] = object.__getattribute__(value, name)
    if isinstance(value, nn.Module):
        hidden = ("_tensor_constant", "_parameter_constant")  # torch.fx's own
        names = [name for name in attributes if name not in _TABLES and not name.startswith(hidden)]
        return {name: attributes[name] for name in names}
    return attributes


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _imported(level: int, name: str, held: Mapping[str, Any]) -> Any:
    """Returns a Python module that code with the globals `held` imports while it runs."""
    try:
        full = resolve_name("." * level + name, str(held.get("__package__") or ""))
    except ImportError:
        return None
    return sys.modules.get(full)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether `frame` is a part of an import, which makes globals and reads no state."""
    while frame is not None:
        if _module_of(frame) == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


_STRUCTURE = ("MATCH_SEQUENCE", "MATCH_MAPPING")


def _instructions_with_lines(code: CodeType | None) -> Iterator[tuple[int, dis.Instruction]]:
    line = 0
    for each in dis.get_instructions(code) if code is not None else ():
        if each.positions is not None:
            line = each.positions.lineno or line
        yield line, each


class _Names(NamedTuple):
    globals: frozenset[str]
    stored: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    matches: bool  # with patterns of sequences or mappings


@cache
def _names_in(code: CodeType) -> _Names:
    """Returns the names that a function's code has: globals, attributes and texts, imports."""
    globals_, stored, attributes = set[str](), set[str](), set[str]()
    imports = set[tuple[int, str]]()
    previous: list[Any] = [None, None]
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            globals_.add(str(each.argval))
            if not each.opname.startswith("LOAD"):
                stored.add(str(each.argval))
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            attributes.add(str(each.argval))
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            attributes.add(each.argval)  # getattr(type(self), "name")
        elif each.opname == "IMPORT_NAME" and isinstance(previous[0], int):
            imports.add((previous[0], str(each.argval)))
        previous = [previous[1], each.argval]
    matches = any(each.opname in _STRUCTURE for each in dis.get_instructions(code))
    names = frozenset(globals_), frozenset(stored), frozenset(attributes)
    return _Names(*names, frozenset(imports), matches)


@dataclass(frozen=True)
class _State:
    """The content of an object before the forward.

    Attributes:
        before: the values by name.
        now: returns the present ones.
        write: gives a name its old value; MISSING: there was none.
        describe: returns what to call it in a message.
        may_settle: whether the first run may leave another simple value.
    """

    before: Mapping[Any, Any]
    now: Callable[[], Mapping[Any, Any]]
    write: Callable[[Any, Any], None]
    describe: Callable[[Any], str]
    may_settle: bool = True

    def changes(self) -> list[tuple[_State, Any, Any]]:
        """Returns what has changed: this state, the name, the old value."""
        now, before = self.now(), self.before
        return [
            (self, name, before.get(name, _MISSING))
            for name in {**before, **now}
            if not _are_alike(now.get(name, _MISSING), before.get(name, _MISSING))
        ]


def _are_alike(one: Any, other: Any) -> bool:
    """Returns whether two values are one object, or equal containers of simple values."""
    return one is other or (type(one) is type(other) and _is_plain(one) and bool(one == other))


def _is_plain(value: Any) -> bool:
    """Returns whether `value` is a container of simple values, or of such containers."""
    if type(value) not in (dict, list, tuple, set):
        return False
    items = [*value, *value.values()] if type(value) is dict else value
    return all(type(item) in _SIMPLE or _is_plain(item) for item in items)


class Settled:
    """The values that runs of a forward have set once, and may not set again."""

    def __init__(self) -> None:
        self._old: dict[Any, Callable[[], None]] = {}

    def add(self, key: Any, put_back: Callable[[], None]) -> bool:
        """Notes a change; returns False if there was one before."""
        if key in self._old:
            return False
        self._old[key] = put_back
        return True

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Undoes the changes if the block raises."""
        try:
            yield
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Undoes the changes."""
        for put_back in self._old.values():
            put_back()
        self._old.clear()


class Shadows:
    """Functions that stand for Python's own in the globals of the user's code while it is traced.

    `type(x)` and `hasattr(x, name)` cannot be answered by a stand-in `x` itself.
    """

    def __init__(self, functions: Mapping[str, Any], matches: bool = False) -> None:
        self._functions = functions
        self._matches = matches  # whether a `match` on structure is answered otherwise, too
        self._held: list[tuple[dict[str, Any], str]] = []

    def put_into(self, frame: FrameType) -> None:
        """Lets the function that `frame` begins to run find them."""
        held = frame.f_globals
        for name in _names_in(frame.f_code).globals & self._functions.keys():
            if name not in held:
                held[name] = self._functions[name]
                self._held.append((held, name))
        if self._matches and _names_in(frame.f_code).matches:
            place = line_of(frame, frame.f_code.co_firstlineno)
            Untraceable("has a match statement on the structure of a value", place)  # noted

    @contextmanager
    def removed_at_end(self) -> Iterator[None]:
        """Takes them out of all globals at the end of the block."""
        try:
            yield
        finally:
            for held, name in self._held:
                held.pop(name, None)
            self._held.clear()


def _attribute_state(value: Any, label: str) -> _State:
    def write(name: str, old: Any) -> None:
        if isinstance(value, type):
            delattr(value, name) if old is _MISSING else setattr(value, name, old)
        elif old is _MISSING:
            object.__delattr__(value, name)
        else:
            object.__setattr__(value, name, old)

    def now() -> Mapping[str, Any]:
        attributes = _attributes_of(value)
        for name in ("__getattribute__", INSTALLED):
            attributes.pop(name, None)
        return attributes

    what = "its attribute" if isinstance(value, nn.Module) else "the attribute"
    whose = "" if isinstance(value, nn.Module) else f" of {label}"
    settles = not isinstance(value, nn.Module)
    return _State(now(), now, write, lambda name: f"{what} {name!r}{whose}", settles)


def _global_state(held: dict[str, Any], name: str, module: str) -> _State:
    def now() -> Mapping[str, Any]:
        return {name: held[name]} if name in held else {}

    def write(name: str, old: Any) -> None:
        if old is _MISSING:
            del held[name]
        else:
            held[name] = old

    return _State(now(), now, write, lambda name: f"the global {module}.{name}")


def _cell_state(cell: CellType, label: str) -> _State:
    def now() -> Mapping[str, Any]:
        return {"": _content(cell)}

    def write(_: str, old: Any) -> None:
        if old is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = old

    return _State(now(), now, write, lambda _: label)


def _container_state(container: Any, path: str) -> _State:
    before = copy(container) if type(container) in _CONTAINERS else container

    def now() -> Mapping[Any, Any]:
        return dict(enumerate(_items(container)))

    def write(_: Any, __: Any) -> None:
        if type(container) in (list, dict, set, deque):
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(before)

    name = path.rpartition(".")[2]
    label = path if " " in path else f"its attribute {name!r}"
    return _State(now(), now, write, lambda _: label, False)


def _items(container: Any) -> Iterable[Any]:
    return chain(container, container.values()) if isinstance(container, dict) else container


class Reads:
    """The values that a forward has read, compared with the present ones.

    Args:
        reads: the values.
        containers: lists, dicts and sets that were read, each with its name.
    """

    def __init__(
        self, reads: Iterable[_Read] = (), containers: Iterable[tuple[Any, str]] = ()
    ) -> None:
        unique = {
            (read.label, None) if read.key is None else (id(read.table), read.key): read
            for read in reads
        }
        self._reads = list(unique.values())
        mutable = {id(c): (c, name) for c, name in containers if not isinstance(c, _CONSTANT)}
        self._containers = [(c, name, list(_items(c))) for c, name in mutable.values()]
        self.look()

    def __len__(self) -> int:
        """The number of values."""
        return len(self._reads) + len(self._containers)

    @classmethod
    def merged(cls, several: Iterable[tuple[str, Reads]]) -> Reads:
        """Returns several as one; the names of the modules in each begin with its prefix."""
        reads: list[_Read] = []
        containers: list[tuple[Any, str]] = []
        for prefix, part in several:
            reads += [r._replace(label=_named(prefix, r.label)) for r in part._reads]
            containers += [(c, _named(prefix, name)) for c, name, _ in part._containers]
        return cls(reads, containers)

    def look(self) -> None:
        """Takes the tensors that there are now for the right ones."""
        self._reads = [
            read._replace(value=now) if isinstance(now := _now(read), Tensor) else read
            for read in self._reads
        ]
        self._containers = [
            (c, name, items if _same(items, now := list(_items(c)), tensors=False) else now)
            for c, name, items in self._containers
        ]
        self._prepare()

    def _prepare(self) -> None:
        tables: dict[int, tuple[Any, list[_Read]]] = {}
        for read in self._reads:
            if read.key is not None:
                tables.setdefault(id(read.table), (read.table, []))[1].append(read)
        self._absent, self._pick, self._tables, self._values = [], [], [], []
        for table, part in tables.values():
            if absent := tuple(read.key for read in part if read.value is _MISSING):
                self._absent.append((table.keys(), absent))
            if there := [read for read in part if read.value is not _MISSING]:
                there.append(there[-1])  # of a single name, an itemgetter returns no tuple
                self._pick.append(itemgetter(*(read.key for read in there)))
                self._tables.append(table)
                self._values += [read.value for read in there]
        self._dynamic = [read for read in self._reads if read.key is None]
        self._views: list[Iterable[Any]] = []
        for container, *_ in self._containers:
            self._views.append(container)
            if isinstance(container, dict):
                self._views.append(container.values())
        self._items = list(chain.from_iterable(self._views))

    def change(self) -> str | None:
        """Returns the first change, as "b.scale has changed from 1 to 2"; None if there is none."""
        return None if self._is_same() else self._first_change()

    def _is_same(self) -> bool:
        """Compares by identity, which is quick: 1000 values in about 30 us."""
        try:
            now = list(chain.from_iterable(map(_pick_from, self._pick, self._tables)))
        except KeyError:
            return False
        items = list(chain.from_iterable(self._views))
        return (
            all(map(is_, now, self._values))
            and len(items) == len(self._items)
            and all(map(is_, items, self._items))
            and all(keys.isdisjoint(names) for keys, names in self._absent)
            and all(_same(read.value, _now(read)) for read in self._dynamic)
        )

    def _first_change(self) -> str | None:
        """Compares by value, and notes equal values that are other objects."""
        for number, read in enumerate(self._reads):
            now = _now(read)
            if now is not read.value:
                if not _same(read.value, now):
                    return f"{read.label} has changed from {_shown(read.value)} to {_shown(now)}"
                self._reads[number] = read._replace(value=now)
                self._follow(read.value, now)
        for number, (container, name, items) in enumerate(self._containers):
            now = list(_items(container))
            if len(now) != len(items) or not all(map(is_, now, items)):
                if not _same(items, now):
                    was: Any = items
                    if isinstance(container, dict):
                        half = len(items) // 2
                        was = dict(zip(items[:half], items[half:], strict=True))
                    return f"{name} has changed from {_shown(was)} to {_shown(container)}"
                self._containers[number] = container, name, now
        self._prepare()
        return None

    def _follow(self, old: Any, new: Any) -> None:
        """Watches a list, dict or set in place of the equal one that it has replaced."""
        for number, (container, name, items) in enumerate(self._containers):
            if container is old:
                self._containers[number] = new, name, list(_items(new))
                for before, after in zip(items, _items(new), strict=True):
                    if before is not after:
                        self._follow(before, after)


_CONSTANT = (tuple, frozenset)


_MODULE = "@"  # begins the name of what a module of the traced one has


def _named(prefix: str, label: str) -> str:
    """Returns a name in the user's model for one in the traced module."""
    if not label.startswith(_MODULE):
        return label
    inside = label.removeprefix(_MODULE)
    if not prefix and inside.startswith("."):
        return f"the model{inside}"
    return prefix.removesuffix(".") + inside if inside.startswith(".") else prefix + inside


def _pick_from(pick: Callable[[Any], tuple[Any, ...]], table: Any) -> tuple[Any, ...]:
    return pick(table)


def _now(read: _Read) -> Any:
    return read.table() if read.key is None else read.table.get(read.key, _MISSING)


def _same(was: Any, now: Any, tensors: bool = True) -> bool:
    """Returns whether two values are one object, or equal ones of simple types or containers.

    `tensors=False` takes any two tensors for the same.
    """
    if was is now:
        return True
    if type(was) is not type(now):
        return not tensors and isinstance(was, Tensor) and isinstance(now, Tensor)
    if type(was) in _SIMPLE:
        return bool(was == now or (was != was and now != now))
    if isinstance(was, list | tuple | deque):
        if len(was) != len(now):
            return False
        return all(_same(one, other, tensors) for one, other in zip(was, now, strict=True))
    if isinstance(was, dict):
        return _same([*was, *was.values()], [*now, *now.values()], tensors)
    if isinstance(was, set | frozenset):
        return bool(was == now)
    if isinstance(was, MethodType):
        return was.__func__ is now.__func__ and was.__self__ is now.__self__
    return not tensors and isinstance(was, Tensor)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, FunctionType):
        return f"the function {value.__qualname__}"
    text = repr(value).splitlines() or [""]
    return text[0] if len(text) == 1 and len(text[0]) <= 80 else f"{text[0][:70]}..."
