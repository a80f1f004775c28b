"""A tree of values as JSON, with its tensors stored separately.

JSON's own types (dicts with string keys, lists, strings, numbers, true, false, null) are written
unchanged. Any other value becomes a dict with one key that begins with `$`:

    {"$tensor": "state.0.weight.exp_avg"}      a tensor, by its name in the safetensors file
    {"$array": "..."}, {"$number": "..."}      an array or a number of numpy
    {"$tuple": [...]}, {"$set": [...]}, {"$dict": [[key, value], ...]}
    {"$bytes": "base64"}, {"$float": "nan"}, {"$complex": [re, im]}, {"$dtype": "float32"},
    {"$device": "cuda:0"}, {"$path": "..."}

Nothing is pickled, and reading creates no other types.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Set
from pathlib import Path, PurePath
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridtrain.errors import CheckpointError


def pack(what: str, tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Returns `tree` as JSON types, and its tensors by name.

    Subclasses of dict, list and tuple become plain ones.

    Args:
        what: the name of `tree` in errors.
        tree: dicts, lists, tuples, sets, tensors, NumPy arrays and plain values.

    Raises:
        CheckpointError: the tree contains a value of an unsupported type; the message names its
            place.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(tree, what, "", tensors), tensors


def unpack(content: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the tree that `pack` converted.

    Raises:
        ValueError: `content` is not a result of `pack`, or a tensor is missing.
    """
    if isinstance(content, list):
        return [unpack(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    # `pack` writes a dict that looks like this as `$dict`.
    if len(content) != 1 or not (kind := next(iter(content))).startswith("$"):
        return {key: unpack(item, tensors) for key, item in content.items()}
    if kind not in _READERS:
        raise ValueError(f"{kind} is unknown")
    try:
        return _READERS[kind](content[kind], tensors)
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{kind} cannot be {content[kind]!r}: {error!r}") from None


def _pack(value: Any, what: str, path: str, tensors: dict[str, Tensor]) -> Any:
    def inner(item: Any, key: Any) -> Any:
        return _pack(item, what, f"{path}.{key}" if path else str(key), tensors)

    def store(kind: str, tensor: Tensor) -> dict[str, str]:
        name = unused = path or "value"
        number = 1
        # Keys with dots in them can give two tensors the same path.
        while name in tensors:
            number += 1
            name = f"{unused}#{number}"
        tensors[name] = tensor
        return {kind: name}

    # By exact type: a bool is an int, and a subclass may print differently.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Tensor):
        return store("$tensor", value.detach())
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            # a copy: the array may be read-only or change while it is written
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            raise _refused(value, what, path) from None
        return store("$array" if isinstance(value, np.ndarray) else "$number", tensor)
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        plain = all(type(key) is str for key in value)
        if plain and not (len(value) == 1 and next(iter(value)).startswith("$")):
            return {key: inner(item, key) for key, item in value.items()}
        # Keys may be anything that can be stored, such as the numbers of parameters.
        pairs = [[inner(key, f"{key}.key"), inner(item, key)] for key, item in value.items()]
        return {"$dict": pairs}
    if isinstance(value, list):
        return [inner(item, i) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [inner(item, i) for i, item in enumerate(value)]}
    if isinstance(value, Set):
        return {"$set": [inner(item, i) for i, item in enumerate(value)]}
    for types, kind, render in _PLAIN:
        if isinstance(value, types):
            return {kind: render(value)}
    raise _refused(value, what, path)


def _refused(value: Any, what: str, path: str) -> CheckpointError:
    place = f" at {path}" if path else ""
    return CheckpointError(
        f"cannot save {what}: it contains a {type(value).__module__}.{type(value).__qualname__}"
        f"{place}, but a checkpoint stores tensors, dicts, lists, numbers and strings: return "
        f"these from state_dict() or get_extra_state()"
    )


_PLAIN: tuple[tuple[type | UnionType, str, Callable[[Any], Any]], ...] = (
    (bytes | bytearray, "$bytes", lambda value: base64.b64encode(value).decode()),
    (complex, "$complex", lambda value: [str(value.real), str(value.imag)]),
    (torch.dtype, "$dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "$device", str),
    (PurePath, "$path", str),
)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return dtype


_READERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$array": lambda name, tensors: tensors[name].numpy().copy(),
    "$number": lambda name, tensors: tensors[name].numpy()[()],
    "$tuple": lambda items, tensors: tuple(unpack(item, tensors) for item in items),
    "$set": lambda items, tensors: {unpack(item, tensors) for item in items},
    "$dict": lambda pairs, tensors: {unpack(k, tensors): unpack(v, tensors) for k, v in pairs},
    "$bytes": lambda text, _: base64.b64decode(text),
    "$float": lambda text, _: float(text),
    "$complex": lambda parts, _: complex(float(parts[0]), float(parts[1])),
    "$dtype": lambda name, _: _dtype(name),
    "$device": lambda name, _: torch.device(name),
    "$path": lambda name, _: Path(name),
}
