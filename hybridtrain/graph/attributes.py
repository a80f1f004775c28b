"""The places where Python looks up an attribute, and the values there.

Only `engine="distributed"` needs this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import CellType, MemberDescriptorType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from hybridtrain.graph.output_capture import INSTALLED
from hybridtrain.graph.reads import MISSING, Read, is_same
from hybridtrain.graph.traced_graph import is_library

# Tables of parameters, hooks etc., `training`, and the marker of transformers' hooks.
TABLES = frozenset(vars(nn.Module())) | {INSTALLED}


def resolved(owner: Any, name: str, label: str) -> Iterator[Read]:
    """Yields the places where Python looks up an attribute, with the values there."""
    kind = type(owner)
    attributes = dict_of(owner)
    raw: Any = MISSING
    earlier_bases: list[type] = []  # classes that Python searches before the defining one
    for base in kind.__mro__:
        if name in vars(base):
            raw = vars(base)[name]
            break
        earlier_bases.append(base)
    if raw is not MISSING and hasattr(type(raw), "__set__"):  # a property, a slot
        if isinstance(raw, MemberDescriptorType):
            read = partial(getattr, owner, name, MISSING)
            yield Read(read, None, read(), label)
        elif not is_library(base.__module__):
            yield Read(table_of(base), name, raw, label)
        return
    if attributes is not None and name in attributes:
        yield Read(attributes, name, attributes[name], label)
        return
    if attributes is not None:
        yield Read(attributes, name, MISSING, label)
    if raw is not MISSING:
        for earlier_base in earlier_bases:
            if not is_library(earlier_base.__module__):
                yield Read(table_of(earlier_base), name, MISSING, label)
        if not is_library(base.__module__):
            yield Read(table_of(base), name, raw, label)
    elif isinstance(owner, nn.Module):
        for table in (owner._parameters, owner._modules):
            if name in table:
                return  # a replaced module or parameter is detected for the model as a whole
        buffers = owner._buffers
        yield Read(buffers, name, buffers.get(name, MISSING), label)
        if name in buffers:
            return
    if _looks_up(kind):
        read = partial(_looked_up, owner, name)
        if is_same(value := read(), read()):
            yield Read(read, None, value, label)


_class_tables: WeakKeyDictionary[type, Any] = WeakKeyDictionary()


def table_of(holder: Any) -> Any:
    """Returns `vars` of a class or Python module: for a class the same object each time."""
    if not isinstance(holder, type):
        return vars(holder)
    return _class_tables.setdefault(holder, vars(holder))


def _looks_up(kind: type) -> bool:
    """Returns whether a user's class overrides attribute lookup."""
    return any(
        ("__getattr__" in vars(base) or "__getattribute__" in vars(base))
        for base in kind.__mro__
        if not is_library(base.__module__)
    )


def _looked_up(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:  # raised by the user's lookup: treated as a missing attribute
        return MISSING


def dict_of(value: Any) -> Any:
    """Returns the `__dict__` of an object, or None."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def slots_of(kind: type) -> list[str]:
    """Returns the names of the slots in the user's classes that `kind` derives from."""
    return [
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and not is_library(base.__module__)
    ]


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, a function or a class."""
    if isinstance(value, type):
        return {n: v for n, v in vars(value).items() if not n.startswith("_abc")}
    attributes = dict(dict_of(value) or {})
    for name in slots_of(type(value)):
        with suppress(AttributeError):
            attributes[name] = object.__getattribute__(value, name)
    if isinstance(value, nn.Module):
        hidden = ("_tensor_constant", "_parameter_constant")  # belongs to torch.fx
        names = [name for name in attributes if name not in TABLES and not name.startswith(hidden)]
        return {name: attributes[name] for name in names}
    return attributes


def content_of(cell: CellType) -> Any:
    """Returns the content of a cell; MISSING if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
