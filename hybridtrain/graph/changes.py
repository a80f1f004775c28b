"""State that a traced forward must not change, because its graph would not repeat the change.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import nn

from hybridtrain.graph.attributes import attributes_of, content_of
from hybridtrain.graph.output_capture import INSTALLED
from hybridtrain.graph.reads import CONTAINERS, MISSING, SIMPLE, items_of


@dataclass(frozen=True)
class State:
    """The content of an object before the forward.

    Attributes:
        before: the values before the forward, by name.
        now: returns the current values.
        write: `write(name, value)` restores a value; MISSING removes the name.
        describe: `describe(name)` returns its description for a message.
        may_settle: whether the first run may permanently set a simple value.
    """

    before: Mapping[Any, Any]
    now: Callable[[], Mapping[Any, Any]]
    write: Callable[[Any, Any], None]
    describe: Callable[[Any], str]
    may_settle: bool = True

    def changes(self) -> list[tuple[State, Any, Any]]:
        """Returns the changes as (this state, name, old value)."""
        current, former = self.now(), self.before
        return [
            (self, name, former.get(name, MISSING))
            for name in {**former, **current}
            if not _are_alike(current.get(name, MISSING), former.get(name, MISSING))
        ]


def _are_alike(first: Any, second: Any) -> bool:
    """Returns whether two values are identical, or equal containers of simple values."""
    return first is second or (
        type(first) is type(second) and _is_plain(first) and bool(first == second)
    )


def _is_plain(value: Any) -> bool:
    """Returns whether `value` is a container of simple values, or of such containers."""
    if type(value) not in (dict, list, tuple, set):
        return False
    items = [*value, *value.values()] if type(value) is dict else value
    return all(type(item) in SIMPLE or _is_plain(item) for item in items)


class Settled:
    """Values that a run of the forward has set once and later runs may not change."""

    def __init__(self) -> None:
        self._old: dict[Any, Callable[[], None]] = {}

    def add(self, key: Any, put_back: Callable[[], None]) -> bool:
        """Records a change; returns False if this value had changed before."""
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


def attribute_state(value: Any, label: str) -> State:
    """Returns the state of the attributes of an object, a function or a class."""

    def write(name: str, old: Any) -> None:
        if isinstance(value, type):
            delattr(value, name) if old is MISSING else setattr(value, name, old)
        elif old is MISSING:
            object.__delattr__(value, name)
        else:
            object.__setattr__(value, name, old)

    def now() -> Mapping[str, Any]:
        attributes = attributes_of(value)
        for name in ("__getattribute__", INSTALLED):
            attributes.pop(name, None)
        return attributes

    noun = "its attribute" if isinstance(value, nn.Module) else "the attribute"
    owner = "" if isinstance(value, nn.Module) else f" of {label}"
    settles = not isinstance(value, nn.Module)
    return State(now(), now, write, lambda name: f"{noun} {name!r}{owner}", settles)


def global_state(held: dict[str, Any], name: str, module: str) -> State:
    """Returns the state of the global `name` in the globals `held` of a Python module."""

    def now() -> Mapping[str, Any]:
        return {name: held[name]} if name in held else {}

    def write(name: str, old: Any) -> None:
        if old is MISSING:
            del held[name]
        else:
            held[name] = old

    return State(now(), now, write, lambda name: f"the global {module}.{name}")


def cell_state(cell: CellType, label: str) -> State:
    """Returns the state of a variable of a closure."""

    def now() -> Mapping[str, Any]:
        return {"": content_of(cell)}

    def write(_: str, old: Any) -> None:
        if old is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = old

    return State(now(), now, write, lambda _: label)


def container_state(container: Any, path: str) -> State:
    """Returns the state of the entries of a container."""
    saved = copy(container) if type(container) in CONTAINERS else container

    def now() -> Mapping[Any, Any]:
        return dict(enumerate(items_of(container)))

    def write(_: Any, __: Any) -> None:
        if type(container) in (list, dict, set, deque):
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(saved)

    name = path.rpartition(".")[2]
    label = path if " " in path else f"its attribute {name!r}"
    return State(now(), now, write, lambda _: label, False)
