"""The kinds of values in inputs, between layers and in outputs: tensors, containers, constants.

A container is a pytree node: tuples, lists, dicts, named tuples and registered types, such as the
outputs of `transformers`. Dataclasses are registered here. A constant cannot contain a tensor and
is immutable. Any other object, such as a subclass of dict or an object with attributes, may hold
tensors or per-sample values that cannot be found, cut, moved or merged. Such an object is an error
if it would cross a stage boundary or leave the model.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Mapping
from copy import copy as shallow_copy
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    keystr,
    register_pytree_node,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
)

_PLAIN = frozenset(
    [
        *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(types.BuiltinFunctionType, types.ModuleType),
    ]
)
_LEAVES = frozenset((Tensor, bool, int, float, str, type(None)))
_IMMUTABLE = (Enum, Decimal, Fraction, UUID, PurePath, date, time, timedelta, tzinfo, type)


def is_constant(leaf: Any) -> bool:
    """Returns whether `leaf` cannot contain a tensor and is immutable."""
    kind = type(leaf)
    if kind in _PLAIN:
        return True
    if kind is types.FunctionType:
        # Any of these could hold a tensor.
        return not (leaf.__closure__ or leaf.__defaults__ or leaf.__kwdefaults__ or vars(leaf))
    if kind is slice:
        return all(map(is_constant, (leaf.start, leaf.stop, leaf.step)))
    if kind is frozenset:
        return all(map(is_constant, leaf))
    if isinstance(leaf, _IMMUTABLE):
        return True
    numpy = sys.modules.get("numpy")
    # Looked up and not imported: without NumPy no object can be one of its types.
    return numpy is not None and isinstance(leaf, numpy.generic) and not leaf.dtype.hasobject


def is_flat(tree: Any) -> bool:
    """Returns whether `tree` is a dict of tensors and constants, as most batches of a call are.

    Looking at such a dict directly is faster than with pytree functions.
    """
    return type(tree) is dict and _LEAVES.issuperset(map(type, tree.values()))


def flat_values(tree: Any) -> tuple[Any, list[Any]] | None:
    """Returns the kind and the values of a container of tensors and constants.

    Looking at it directly is several times faster than flattening it as a pytree. Two containers of
    a kind have the same class and length, and the same keys in the same order.

    Returns:
        None for any other value, such as a container of containers.
    """
    values, keys = tree, None
    if isinstance(tree, dict):
        values, keys = list(tree.values()), tuple(tree)
    elif type(tree) is not tuple and type(tree) is not list:
        return None
    if not _LEAVES.issuperset(map(type, values)):
        return None
    return (type(tree), keys or len(values)), list(values)


def is_array(leaf: Any) -> bool:
    """Returns whether `leaf` is a NumPy array with at least one dimension."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.ndim > 0


def same_constant(first: Any, second: Any) -> bool:
    """Returns whether two constants have the same type and are equal, where NaN equals NaN."""
    if first is second:
        return True
    if type(first) is not type(second) or not is_constant(first):
        return False
    return bool(first == second) or bool(first != first and second != second)


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of `tree`, and registers its dataclasses as pytree nodes.

    Already registered types, such as the outputs of `transformers`, keep their registration.
    """
    if type(tree) is Tensor:  # the most frequent tree
        return [tree]
    while True:
        # Again after each registration: a dataclass may contain another one.
        leaves = tree_leaves(tree)
        unknown = {type(leaf) for leaf in leaves if _is_new_dataclass(type(leaf))}
        if not unknown:
            return leaves
        for kind in unknown:
            register(kind)


def _is_new_dataclass(kind: type) -> bool:
    if kind in SUPPORTED_NODES or not dataclasses.is_dataclass(kind):
        return False
    # except types that hold more than attributes, such as a subclass of dict
    return kind.__new__ is object.__new__ and not issubclass(kind, torch.nn.Module)


def register(kind: type) -> None:
    """Registers a dataclass as a pytree node, with all attributes of its objects as children.

    PyTorch's `register_dataclass` calls the class to create an object, which would run
    `__post_init__` again and drop attributes that are not fields.
    """
    if kind in SUPPORTED_NODES:
        return
    fields = [field.name for field in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        further = [name for name in getattr(value, "__dict__", ()) if name not in fields]
        # An attribute that was deleted, or a field that was never set, is left out.
        names = [name for name in (*fields, *further) if hasattr(value, name)]
        return [getattr(value, name) for name in names], tuple(names)

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        values, names = flatten(value)
        return list(zip(map(GetAttrKey, names), values, strict=True)), names

    def unflatten(values: Any, names: Any) -> Any:
        value: Any = object.__new__(kind)
        for name, inner in zip(names, values, strict=True):
            object.__setattr__(value, name, inner)
        return value

    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)


def named_leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of `tree` with their paths, such as `output['loss'][0]`, for messages.

    It also works for containers without registered key paths.

    Args:
        tree: a pytree.
        name: the name of the whole tree.
    """

    def is_part(value: Any) -> bool:
        return value is not tree

    children, spec = tree_flatten(tree, is_leaf=is_part)
    if spec.is_leaf():
        return [(name, tree)]
    try:
        names = [keystr(path) for path, _ in tree_flatten_with_path(tree, is_leaf=is_part)[0]]
    except ValueError:
        keys = list(tree) if isinstance(tree, Mapping) else []
        keys = keys if len(keys) == len(children) else list(range(len(children)))
        names = [f"[{key!r}]" for key in keys]
    pairs = zip(names, children, strict=True)
    return [leaf for part, child in pairs for leaf in named_leaves(child, name + part)]


def as_base(kind: type) -> str:
    """Returns advice for an error message on how to convert a value of type `kind`."""
    for base, call in ((Mapping, "dict(...)"), (list, "list(...)"), (tuple, "tuple(...)")):
        if issubclass(kind, base):
            return f"convert it with {call}"
    if kind.__module__.partition(".")[0] == "numpy":
        return "convert it with torch.from_numpy(...)"
    return "extract its tensors"


def find_unknown(tree: Any, name: str = "") -> tuple[str, Any] | None:
    """Returns the path and value of the first leaf that is neither a tensor nor a constant."""
    leaves = leaves_of(tree)
    if all(isinstance(leaf, Tensor) or is_constant(leaf) for leaf in leaves):
        return None
    pairs = named_leaves(tree, name)
    return next(
        pair for pair in pairs if not isinstance(pair[1], Tensor) and not is_constant(pair[1])
    )


def structure_copy(
    value: Any,
    of_tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    copies: dict[int, Any] | None = None,
) -> Any:
    """Returns arguments as they are now, so that a later change of their objects does not show.

    A cache of keys and values, for example, grows in a forward. Containers, and objects with
    attributes, are copied with what they hold; modules, classes and functions are not.

    Args:
        value: the arguments.
        of_tensor: returns the copy of a tensor; by default the tensor itself.
        copies: the copies so far, by the `id` of the original.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        copies[id(value)] = of_tensor(value)
        return copies[id(value)]
    if isinstance(value, nn.Module | type | types.FunctionType | types.ModuleType):
        return value
    if type(value) is tuple:
        return tuple(structure_copy(item, of_tensor, copies) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(structure_copy(item, of_tensor, copies) for item in value)
    is_container = isinstance(value, list | dict | set)
    if not is_container and type(getattr(value, "__dict__", None)) is not dict:
        return value
    try:
        copy = shallow_copy(value)
    except Exception:  # an object that refuses to be copied, such as one with a lock
        return value
    if copy is value:
        return value
    copies[id(value)] = copy  # before its items, which may hold it
    if isinstance(copy, list):
        copy[:] = [structure_copy(item, of_tensor, copies) for item in copy]
    elif isinstance(copy, dict):
        for key, item in list(copy.items()):
            copy[key] = structure_copy(item, of_tensor, copies)
    attributes: dict[str, Any] = getattr(copy, "__dict__", {})
    for name, item in list(attributes.items()):
        attributes[name] = structure_copy(item, of_tensor, copies)
    return copy
