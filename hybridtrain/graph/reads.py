"""The values that a traced forward has read, and the check for later changes.

Only `engine="distributed"` needs this file.

A graph contains the values that its forward read during the trace: numbers and flags of modules and
configs, entries of dicts and lists, globals, closures, class attributes, functions, buffers. A
`Recorder` records them, and `Reads` compares them with the current values before each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_, itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

SIMPLE = {
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
}  # fmt: skip
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_CONSTANT = (tuple, frozenset)


class _Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = _Missing()


class Read(NamedTuple):
    """A value that was read: `table[key]`, or `table()` if `key` is None; MISSING if absent."""

    table: Any
    key: Any
    value: Any
    label: str


def items_of(container: Any) -> Iterable[Any]:
    """Returns the entries of a container; for a dict its keys and values."""
    return chain(container, container.values()) if isinstance(container, dict) else container


class Reads:
    """The values that a forward has read, for comparison with the current values.

    Args:
        reads: the values.
        containers: lists, dicts and sets that were read, each with its name.
    """

    def __init__(
        self, reads: Iterable[Read] = (), containers: Iterable[tuple[Any, str]] = ()
    ) -> None:
        unique = {
            (read.label, None) if read.key is None else (id(read.table), read.key): read
            for read in reads
        }
        self._reads = list(unique.values())
        mutable = {id(c): (c, name) for c, name in containers if not isinstance(c, _CONSTANT)}
        self._containers = [(c, name, list(items_of(c))) for c, name in mutable.values()]
        self.look()

    def __len__(self) -> int:
        """The number of values."""
        return len(self._reads) + len(self._containers)

    @classmethod
    def merged(cls, parts: Iterable[tuple[str, Reads]]) -> Reads:
        """Merges the reads of several traced modules, each with the prefix of its names."""
        reads: list[Read] = []
        containers: list[tuple[Any, str]] = []
        for prefix, part in parts:
            reads += [r._replace(label=named_in_model(prefix, r.label)) for r in part._reads]
            containers += [(c, named_in_model(prefix, name)) for c, name, _ in part._containers]
        return cls(reads, containers)

    def look(self) -> None:
        """Makes the current tensors the expected values."""
        self._reads = [
            read._replace(value=current) if isinstance(current := _now(read), Tensor) else read
            for read in self._reads
        ]
        self._containers = [
            (
                c,
                name,
                items if is_same(items, current := list(items_of(c)), tensors=False) else current,
            )
            for c, name, items in self._containers
        ]
        self._prepare()

    def _prepare(self) -> None:
        tables: dict[int, tuple[Any, list[Read]]] = {}
        for read in self._reads:
            if read.key is not None:
                tables.setdefault(id(read.table), (read.table, []))[1].append(read)
        self._absent, self._pick, self._tables, self._values = [], [], [], []
        for table, part in tables.values():
            if absent := tuple(read.key for read in part if read.value is MISSING):
                self._absent.append((table.keys(), absent))
            if present := [read for read in part if read.value is not MISSING]:
                present.append(present[-1])  # of a single name, an itemgetter returns no tuple
                self._pick.append(itemgetter(*(read.key for read in present)))
                self._tables.append(table)
                self._values += [read.value for read in present]
        self._dynamic = [read for read in self._reads if read.key is None]
        self._views: list[Iterable[Any]] = []
        for container, *_ in self._containers:
            self._views.append(container)
            if isinstance(container, dict):
                self._views.append(container.values())
        self._items = list(chain.from_iterable(self._views))

    def change(self) -> str | None:
        """Returns the first change, such as "b.scale has changed from 1 to 2", or None."""
        if not (self._reads or self._containers) or self._is_same():
            return None
        return self._first_change()

    def _is_same(self) -> bool:
        """Compares by identity, which is fast: 1000 values take about 30 us."""
        try:
            current_values = list(chain.from_iterable(map(_pick_from, self._pick, self._tables)))
        except KeyError:
            return False
        items = list(chain.from_iterable(self._views))
        return (
            all(map(is_, current_values, self._values))
            and len(items) == len(self._items)
            and all(map(is_, items, self._items))
            and all(keys.isdisjoint(names) for keys, names in self._absent)
            and all(is_same(read.value, _now(read)) for read in self._dynamic)
        )

    def _first_change(self) -> str | None:
        """Compares by value, and records equal values that are different objects."""
        for number, read in enumerate(self._reads):
            current = _now(read)
            if current is not read.value:
                if not is_same(read.value, current):
                    return (
                        f"{read.label} has changed from {_shown(read.value)} to {_shown(current)}"
                    )
                self._reads[number] = read._replace(value=current)
                self._follow(read.value, current)
        for number, (container, name, items) in enumerate(self._containers):
            current = list(items_of(container))
            if len(current) != len(items) or not all(map(is_, current, items)):
                if not is_same(items, current):
                    former: Any = items
                    if isinstance(container, dict):
                        half = len(items) // 2
                        former = dict(zip(items[:half], items[half:], strict=True))
                    return f"{name} has changed from {_shown(former)} to {_shown(container)}"
                self._containers[number] = container, name, current
        self._prepare()
        return None

    def _follow(self, old: Any, new: Any) -> None:
        """Watches the list, dict or set that has replaced an equal one."""
        for number, (container, name, items) in enumerate(self._containers):
            if container is old:
                self._containers[number] = new, name, list(items_of(new))
                for before, after in zip(items, items_of(new), strict=True):
                    if before is not after:
                        self._follow(before, after)


# Begins the label of a value in a submodule of the traced module.
MODULE = "@"


def named_in_model(prefix: str, label: str) -> str:
    """Returns a value's name in the user's model, from its label in the traced module."""
    if not label.startswith(MODULE):
        return label
    inside = label.removeprefix(MODULE)
    if not prefix and inside.startswith("."):
        return f"the model{inside}"
    return prefix.removesuffix(".") + inside if inside.startswith(".") else prefix + inside


def _pick_from(pick: Callable[[Any], tuple[Any, ...]], table: Any) -> tuple[Any, ...]:
    return pick(table)


def _now(read: Read) -> Any:
    return read.table() if read.key is None else read.table.get(read.key, MISSING)


def is_same(was: Any, now: Any, tensors: bool = True) -> bool:
    """Returns whether two values are identical, or equal simple values or containers.

    With `tensors=False`, any two tensors count as equal.
    """
    if was is now:
        return True
    if type(was) is not type(now):
        return not tensors and isinstance(was, Tensor) and isinstance(now, Tensor)
    if type(was) in SIMPLE:
        return bool(was == now or (was != was and now != now))
    if isinstance(was, list | tuple | deque):
        if len(was) != len(now):
            return False
        return all(is_same(old, new, tensors) for old, new in zip(was, now, strict=True))
    if isinstance(was, dict):
        return is_same([*was, *was.values()], [*now, *now.values()], tensors)
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
