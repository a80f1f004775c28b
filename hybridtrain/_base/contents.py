"""The contents of mutable objects, to restore them in place.

Only containers, NumPy arrays, and objects with attributes have contents. Modules, tensors, classes
and functions have none: other code saves them, or nothing does. Objects with only `__slots__` are
not entered.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

# An object that leads to more than this many others is left alone: it probably holds a data set.
_MAX_OBJECTS = 2_000

_NOT_ENTERED = (
    *(nn.Module, Tensor, torch.Generator, type, types.ModuleType, types.FunctionType),
    *(types.BuiltinFunctionType, types.MethodType),
)

# Pairs of an object and what it contains directly; each object in it has a pair of its own.
Contents = list[tuple[Any, Any]]


def contents_of(value: Any) -> Contents:
    """Returns the contents of a value and of all objects in it; nothing if there are too many."""
    found: Contents = []
    seen: set[int] = set()
    todo: deque[Any] = deque([value])
    while todo:
        item = todo.popleft()
        if id(item) in seen or isinstance(item, _NOT_ENTERED):
            continue
        if type(item) is tuple:
            todo.extend(item)
            # Tuples cannot change, but their items can.
            continue
        contents = _shallow(item)
        if contents is None:
            continue
        seen.add(id(item))
        found.append((item, contents))
        # Nothing rather than a part: a part would be restored to a state that never was.
        if len(found) > _MAX_OBJECTS:
            return []
        items, attributes = contents
        if isinstance(items, dict):
            todo.extend(items.values())
        elif isinstance(items, list):
            todo.extend(items)
        todo.extend(attributes.values())
    return found


def has_changed(contents: Contents) -> bool:
    """Returns whether an object has other contents now."""
    return any(not _same(_shallow(item), before) for item, before in contents)


def exchanged(contents: Contents) -> Contents:
    """Puts contents back into their objects; returns those that they had."""
    # All are read before any is written: one may contain another.
    present = [(item, _shallow(item)) for item, _ in contents]
    for item, (items, attributes) in contents:
        if isinstance(item, dict):
            if not _same_items(dict(item), items):
                # In place, so that all references see the old contents; and cleared, for the order
                # of the keys.
                item.clear()
                item.update(items)
        elif isinstance(item, set):
            item.clear()
            item.update(items)
        elif isinstance(item, list | deque | bytearray):
            item.clear()
            item.extend(items)
        elif items is not None:
            item[...] = items  # an array
        if attributes:
            present_attributes: dict[str, Any] = item.__dict__
            present_attributes.clear()
            present_attributes.update(attributes)
    return present


def _shallow(value: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns the items of a value and its attributes; None if it can have neither."""
    attributes = getattr(value, "__dict__", None)
    attributes = dict(attributes) if type(attributes) is dict else {}
    numpy = sys.modules.get("numpy")
    if isinstance(value, dict):
        return dict(value), attributes
    if isinstance(value, list | deque):
        return list(value), attributes
    if isinstance(value, set):
        return set(value), attributes
    if isinstance(value, bytearray):
        return bytes(value), attributes
    if numpy is not None and type(value) is numpy.ndarray:
        return value.copy(), attributes
    return (None, attributes) if attributes else None


def _same(present: Any, before: Any) -> bool:
    (items, attributes), (old_items, old_attributes) = present or (None, {}), before
    return _same_items(items, old_items) and _same_items(attributes, old_attributes)


def _same_items(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            map(_same_value, first.values(), second.values())
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_same_value, first, second))
    if first is None or isinstance(first, bytes | set):
        return bool(first == second)
    return bool((first == second).all()) if first.shape == second.shape else False  # arrays


def _same_value(first: Any, second: Any) -> bool:
    if first is second:
        return True
    plain = (bool, int, float, str, bytes)
    return type(first) is type(second) and isinstance(first, plain) and first == second
