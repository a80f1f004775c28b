"""A closed binary format for values that processes of a run exchange: decoding runs no code.

Reading a pickle can run arbitrary code. This format has a tag for each supported kind of value, and
rejects everything else, both when encoding and when decoding:

    plain values    None, bool, int, float, complex, str, bytes, range, slice, enum members
    containers      tuple, list, dict, set, frozenset, and registered pytree nodes
    PyTorch, NumPy  tensors, dtypes, devices, sizes, layouts, arrays, scalars, `TreeSpec`
    library         paths, dates, times, Decimal, Fraction, UUID
    classes         by name, if this process knows them

Objects of subclasses of str, int, float and bytes arrive as the base type. Encoded bytes name a
class but never import one. A process knows the dataclasses, named tuples, enums and error types of
hybridtrain, nodes registered with `torch.utils._pytree`, and classes passed to `allow`: the classes
that the model's own modules define or import. Objects are created without calling a constructor,
except for pytree nodes, which have registered their own.

    value      tag, then content that depends on the tag
    integer    length, its bytes (little-endian, signed)
    text       length, UTF-8
    container  number of values, the values
    length     8 bytes; at most the number of remaining bytes
"""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, treespec_leaf

from hybridtrain._base.values import register
from hybridtrain.errors import UserError

MOST_DEPTH = 100
"""The deepest nesting of values."""

MOST_VALUES = 1 << 22
"""The largest number of values that one message may contain."""

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_LEAF = treespec_leaf()
_SINGLES: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b"E": ..., b"*": _LEAF}
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
} | {"Tensor": Tensor, "object": object, "NoneType": type(None), "namedtuple": namedtuple}
_TORCH: dict[str, Any] = {
    str(value): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,5})?")
_NUMPY_DTYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[SU]\d{1,9}|[mM]8(\[\w{1,5}\])?)")
_TEXTS: dict[type, tuple[bytes, Callable[[str], Any]]] = {
    Decimal: (b"1", Decimal),
    UUID: (b"2", UUID),
    datetime: (b"3", datetime.fromisoformat),
    date: (b"4", date.fromisoformat),
    time: (b"5", time.fromisoformat),
}
_FROM_TEXT = dict(_TEXTS.values())
_PLAIN: tuple[Any, ...] = (str, int, float, bytes)
_SEQUENCES: dict[type, bytes] = {tuple: b"t", list: b"l", torch.Size: b"z"}
_allowed: dict[str, type] = {}


class CodecError(UserError):
    """A value cannot be encoded, or bytes cannot be decoded."""


def allow(kinds: Iterable[type]) -> None:
    """Lets this process exchange objects of these dataclasses, named tuples and enums."""
    # By name, as decoded: the sender's class is the receiver's class of that name.
    _allowed.update({_name(kind): kind for kind in kinds if _is_data(kind)})


def classes_around(kinds: Iterable[type]) -> set[type]:
    """Returns the data classes that the Python modules of `kinds` define or import.

    Includes classes of modules imported by name (`import outputs`), and nested classes.
    """
    modules = {
        sys.modules[base.__module__]
        for kind in kinds
        for base in kind.__mro__
        if base.__module__ in sys.modules and base.__module__.partition(".")[0] not in _LIBRARIES
    }
    # Only modules of the same package: a library that it imports may define any class.
    packages = {module.__name__.partition(".")[0] for module in modules}
    modules |= {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in packages
    }
    classes: set[type] = set()
    rest = [value for module in modules for value in vars(module).values()]
    seen: set[int] = set()
    while rest:
        value = rest.pop()
        if not isinstance(value, type) or id(value) in seen:
            continue
        seen.add(id(value))
        if _is_data(value):
            classes.add(value)
        prefix = f"{value.__qualname__}."
        rest += [
            inner
            for inner in vars(value).values()
            if isinstance(inner, type) and inner.__qualname__.startswith(prefix)
        ]
    return classes


_LIBRARIES = frozenset(["builtins", "torch", "typing", "collections", "abc"])


def encode(value: Any) -> bytes:
    """Returns `value` as bytes.

    Raises:
        CodecError: the value contains an unsupported type; names it.
    """
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decodes the bytes of `encode`.

    Raises:
        CodecError: the bytes are invalid. Memory and time are bounded by the number of bytes.
    """
    try:
        reader = _Reader(memoryview(data))
        value = reader.value(0)
        if reader.left:
            raise CodecError(f"{reader.left} extra bytes follow the value")
    except CodecError:
        raise
    except Exception as error:  # raised by a constructor, such as Decimal's
        raise CodecError(f"{type(error).__name__}: {error}") from error
    return value


def _write(value: Any, parts: list[bytes], depth: int) -> None:
    if depth > MOST_DEPTH:
        raise CodecError(f"values are nested more than {MOST_DEPTH} levels deep")
    kind = type(value)

    def tagged(tag: bytes, *inner: Any) -> None:
        parts.append(tag)
        for content in inner:
            _write(content, parts, depth + 1)

    def several(tag: bytes, items: Iterable[Any]) -> None:
        # The number is written first.
        items = list(items)
        parts.append(tag + _LENGTH.pack(len(items)))
        for item in items:
            _write(item, parts, depth + 1)

    def sized(tag: bytes, data: bytes) -> None:
        parts.extend((tag + _LENGTH.pack(len(data)), data))

    if value is None or kind is bool or value is ...:
        parts.append(next(tag for tag, single in _SINGLES.items() if single is value))
    elif kind is int:
        # One bit more than the number needs, for the sign.
        sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif kind is float:
        parts.append(b"f" + _FLOAT.pack(value))
    elif kind is complex:
        parts.append(b"j" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag))
    elif kind is str:
        sized(b"s", value.encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        sized(b"b", value)
    elif kind in _SEQUENCES:
        several(_SEQUENCES[kind], value)
    elif kind is dict:
        several(b"d", (part for pair in value.items() for part in pair))
    elif kind is set or kind is frozenset:
        # in the same order for equal sets in all processes
        # Callers compare encodings, also of different processes, whose sets are in any order.
        encoded = sorted(map(encode, value))
        parts.append((b"S" if kind is set else b"Z") + _LENGTH.pack(len(encoded)))
        parts.extend(encoded)
    elif kind is slice or kind is range:
        tagged(b":" if kind is slice else b"r", value.start, value.stop, value.step)
    elif isinstance(value, TreeSpec):
        _write_structure(value, parts, depth)
    elif kind in (torch.dtype, torch.layout, torch.memory_format):
        sized(b"q", str(value).encode())
    elif kind is torch.device:
        sized(b"v", str(value).encode())
    elif kind is Tensor or kind is nn.Parameter:
        _write_tensor(value, parts, depth)
    elif kind is np.ndarray or isinstance(value, np.generic):
        # No object arrays: their bytes are addresses.
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            raise CodecError(f"it contains a NumPy value of dtype {value.dtype}")
        tagged(b"a" if kind is np.ndarray else b"g", value.dtype.str, value.shape, value.tobytes())
    elif kind in _TEXTS:
        text = value.isoformat() if isinstance(value, (date, time)) else str(value)
        sized(_TEXTS[kind][0], text.encode())
    elif kind is timedelta:
        tagged(b"6", value.days, value.seconds, value.microseconds)
    elif kind is Fraction:
        tagged(b"7", value.numerator, value.denominator)
    elif isinstance(value, PurePath):
        sized(b"P", str(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, Enum):
        # By name, and a combination of flags has none.
        if kind.__members__.get(value.name or "") is not value:
            raise CodecError(f"it contains {value!r}, a combination of flags")
        tagged(b"e", kind, value.name)
    elif isinstance(value, type) or value is namedtuple:
        sized(b"c", _name_of_known(value).encode())
    elif _is_named_tuple(kind):
        several(b"n", (kind, *value))
    elif kind in SUPPORTED_NODES:
        children, context = SUPPORTED_NODES[kind].flatten_fn(value)
        several(b"p", (kind, context, *children))
    elif _is_data(kind):
        names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
        values = [getattr(value, name) for name in names]
        several(b"o", (kind, tuple(names), *values))
    elif (plain := next((p for p in _PLAIN if isinstance(value, p)), None)) is not None:
        _write(plain(value), parts, depth)  # for example torch.__version__
    else:
        name = f" ({value.__qualname__})" if hasattr(value, "__qualname__") else ""
        raise CodecError(f"it contains an object of {kind.__module__}.{kind.__qualname__}{name}")


def _write_structure(spec: TreeSpec, parts: list[bytes], depth: int) -> None:
    if spec.type is None:
        parts.append(b"*")
        return
    children = spec.children()
    parts.append(b"y" + _LENGTH.pack(len(children) + 2))
    for part in (spec.type, spec.context, *children):
        _write(part, parts, depth + 1)


def _write_tensor(tensor: Tensor, parts: list[bytes], depth: int) -> None:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise CodecError(
            f"it contains a tensor of layout {tensor.layout}, but only dense tensors can be sent"
        )
    data = b""
    if not tensor.is_meta:
        # Lazy bits are resolved, because the bytes of the memory are sent.
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    parts.append(b"x")
    facts = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad, data)
    for fact in facts:
        _write(fact, parts, depth + 1)


class _Reader:
    """Reads values from bytes, in order."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._values = 0

    @property
    def left(self) -> int:
        """The number of unread bytes."""
        return len(self._data) - self._at

    def value(self, depth: int) -> Any:
        """Reads a value at nesting depth `depth`."""
        self._values += 1
        # Before the tag is read: recursion and the number of objects are bounded by these alone.
        if depth > MOST_DEPTH or self._values > MOST_VALUES:
            raise CodecError("nested too deep" if depth > MOST_DEPTH else "too many values")
        tag = bytes(self._take(1))
        if tag in _SINGLES:
            return _SINGLES[tag]
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](self._text())
        if (read := _READERS.get(tag)) is None:
            raise CodecError(f"unknown tag {tag!r}")
        return read(self, depth)

    def _take(self, size: int) -> memoryview:
        if size > self.left:
            raise CodecError(f"expected {size} more bytes, found {self.left}")
        self._at += size
        return self._data[self._at - size : self._at]

    def _length(self) -> int:
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > self.left:  # each value takes at least one byte
            raise CodecError(f"length {length} exceeds the remaining {self.left} bytes")
        return int(length)

    def _bytes(self) -> memoryview:
        return self._take(self._length())

    def _text(self) -> str:
        return str(self._bytes(), "utf-8", "surrogatepass")

    def _floats(self, number: int) -> list[float]:
        return [_FLOAT.unpack(self._take(_FLOAT.size))[0] for _ in range(number)]

    def _items(self, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(self._length())]

    def _of(self, kind: type | tuple[type, ...], depth: int) -> Any:
        value = self.value(depth + 1)
        if not isinstance(value, kind):
            raise CodecError(f"unexpected {type(value).__name__}")
        return value

    def _dict(self, depth: int) -> dict[Any, Any]:
        items = self._items(depth)
        return dict(zip(items[::2], items[1::2], strict=True))

    def _slice(self, depth: int) -> slice:
        return slice(*(self.value(depth + 1) for _ in range(3)))

    def _range(self, depth: int) -> range:
        return range(*(self._of(int, depth) for _ in range(3)))

    def _device(self, depth: int) -> torch.device:
        text = self._text()
        if not _DEVICE.fullmatch(text):
            raise CodecError("invalid device")
        return torch.device(text)

    def _tensor(self, depth: int) -> Tensor:
        dtype, shape = self._of(torch.dtype, depth), self._shape(depth)
        device, requires_grad = self._of(torch.device, depth), self._of(bool, depth)
        data = bytearray(self._of(bytes, depth))
        if device.type == "meta":
            tensor = torch.empty(shape, dtype=dtype, device=device)
        elif data:
            # A bytearray of its own, so that the tensor can be written, and does not hold the whole
            # message.
            tensor = torch.frombuffer(data, dtype=dtype).reshape(shape).to(device)
        else:
            if 0 not in shape:
                raise CodecError("a tensor without data")
            tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.requires_grad_() if requires_grad else tensor

    def _shape(self, depth: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._of(tuple, depth)
        # By exact type: a bool is an int, too.
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
            raise CodecError("invalid shape")
        return shape

    def _array(self, depth: int) -> Any:
        kind = self._of(str, depth)
        if not _NUMPY_DTYPE.fullmatch(kind):
            raise CodecError("invalid dtype")
        shape = self._shape(depth)
        data = bytearray(self._of(bytes, depth))  # makes it writable
        if not data and 0 in shape:
            return np.empty(shape, dtype=np.dtype(kind))
        return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape)

    def _class(self, depth: int) -> Any:
        name = self._text()
        if (kind := _find(name)) is None:
            raise CodecError(
                f"{name[:200]!r} is not a class that this process knows: define or import it in "
                f"the module that defines the model's layers"
            )
        return kind

    def _enum(self, depth: int) -> Any:
        kind, name = self.value(depth + 1), self._of(str, depth)
        if not (isinstance(kind, type) and issubclass(kind, Enum)):
            raise CodecError("invalid enum")
        return kind.__members__[name]

    def _named_tuple(self, depth: int) -> Any:
        kind, *values = self._items(depth)
        if not _is_named_tuple(kind) or len(values) != len(kind._fields):
            raise CodecError("invalid named tuple")
        # Not by `kind(...)`, which may have been overridden.
        return tuple.__new__(kind, values)

    def _node(self, depth: int) -> Any:
        kind, context, *children = self._items(depth)
        _check_node(kind, context, children)
        # Code of the process itself that was registered for this, with checked arguments.
        return SUPPORTED_NODES[kind].unflatten_fn(children, context)

    def _object(self, depth: int) -> Any:
        kind, names, *values = self._items(depth)
        is_dataclass = isinstance(kind, type) and _is_data(kind) and dataclasses.is_dataclass(kind)
        # Only fields: any other attribute could replace a method of the object.
        if not is_dataclass or not {field.name for field in dataclasses.fields(kind)} >= set(names):
            raise CodecError("invalid dataclass")
        value = object.__new__(kind)
        for name, inner in zip(names, values, strict=True):
            # Frozen dataclasses refuse the ordinary way.
            object.__setattr__(value, name, inner)
        return value

    def _structure(self, depth: int) -> TreeSpec:
        kind, context, *children = self._items(depth)
        if not all(isinstance(child, TreeSpec) for child in children):
            raise CodecError("invalid structure")
        if isinstance(kind, type) and kind not in SUPPORTED_NODES and _is_data(kind):
            # As the sender has done when it flattened its value.
            register(kind)
        _check_node(kind, context, children)
        return TreeSpec(kind, context, children)


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"i": lambda reader, _: int.from_bytes(reader._bytes(), "little", signed=True),
    b"f": lambda reader, _: reader._floats(1)[0],
    b"j": lambda reader, _: complex(*reader._floats(2)),
    b"s": lambda reader, _: reader._text(),
    b"b": lambda reader, _: bytes(reader._bytes()),
    b"t": lambda reader, depth: tuple(reader._items(depth)),
    b"l": _Reader._items,
    b"z": lambda reader, depth: torch.Size(reader._items(depth)),
    b"d": _Reader._dict,
    b"S": lambda reader, depth: set(reader._items(depth)),
    b"Z": lambda reader, depth: frozenset(reader._items(depth)),
    b":": _Reader._slice,
    b"r": _Reader._range,
    b"q": lambda reader, _: _TORCH[reader._text()],
    b"v": _Reader._device,
    b"x": _Reader._tensor,
    b"a": _Reader._array,
    b"g": lambda reader, depth: reader._array(depth)[()],
    b"6": lambda reader, depth: timedelta(*(reader._of(int, depth) for _ in range(3))),
    b"7": lambda reader, depth: Fraction(reader._of(int, depth), reader._of(int, depth)),
    b"P": lambda reader, _: Path(reader._text()),
    b"c": _Reader._class,
    b"e": _Reader._enum,
    b"n": _Reader._named_tuple,
    b"p": _Reader._node,
    b"o": _Reader._object,
    b"y": _Reader._structure,
}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _name_of_known(kind: Any) -> str:
    """Returns the name with which `_find` finds a class.

    Raises:
        CodecError: processes do not know the class.
    """
    name = str(kind.__name__)
    if _TYPES.get(name) is kind:
        return name
    name = _name(kind)
    if _find(name) is not kind:
        raise CodecError(f"it contains the unknown class {kind.__module__}.{kind.__qualname__}")
    return name


def _find(name: str) -> Any:
    """Returns the class of this name if this process knows it, and None otherwise."""
    if name in _TYPES:
        return _TYPES[name]
    if name in _allowed:
        return _allowed[name]
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = vars(value).get(part) if isinstance(value, (ModuleType, type)) else None
    # A name that leads to a class by another way, such as an import, is refused.
    if not isinstance(value, type) or _name(value) != name:
        return None
    is_ours = module.partition(".")[0] == "hybridtrain"
    if value in SUPPORTED_NODES or (is_ours and (_is_data(value) or issubclass(value, UserError))):
        return value
    return None


def _is_data(kind: type) -> bool:
    """Returns whether objects of `kind` are only their fields, so that creating one runs no
    code.
    """
    if issubclass(kind, Enum) or _is_named_tuple(kind):
        return True
    if not dataclasses.is_dataclass(kind) or issubclass(kind, nn.Module):
        return False
    # `__del__` would run on an object whose constructor never has.
    return kind.__new__ is object.__new__ and not hasattr(kind, "__del__")


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _check_node(kind: Any, context: Any, children: list[Any]) -> None:
    """Raises a CodecError unless `kind` is a registered node that calls nothing in `context`."""
    if kind not in SUPPORTED_NODES:
        raise CodecError("invalid node")
    if kind is namedtuple and not (
        _is_named_tuple(context) and len(context._fields) == len(children)
    ):
        raise CodecError("invalid named tuple")
    if kind is defaultdict:
        factory, keys = context
        # The factory is called for missing keys, so it must be one of the plain types.
        if len(keys) != len(children) or factory not in (None, *_TYPES.values()):
            raise CodecError("invalid defaultdict")
