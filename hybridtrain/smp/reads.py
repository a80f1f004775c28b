"""What the forwards of a model read besides their inputs, and whether a step has changed it.

In a plain loop, a forward sees what the lines before it have assigned for its batch. In a step, the
first halves of all bodies run before the first forward, and other stages are in other processes. So
a step must not change what a forward reads.

The forward's code names what it reads: global variables, variables of enclosing functions, default
arguments, attributes. `values_read` records their contents, and `check_unchanged` compares them.
It does not look into the standard library and installed packages, whose loggers and caches change
at any time, except for the package of the forward itself.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hybridtrain.errors import UserError

_DEPTH = 4  # calls from a forward, or from a step, that are followed
_MOST_VALUES = 100_000  # of one variable, beyond which changes are not seen
_MOST_BYTES = 1 << 24  # of an array or tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

# special methods that only describe or construct an object
_NOT_OPERATIONS = {"__init__", "__new__", "__repr__", "__str__", "__post_init__", "__del__"}


@dataclass(frozen=True)
class Place:
    """A variable or attribute that a forward reads.

    Attributes:
        name: its name.
        what: what it is, for errors.
        reader: the forward that reads it.
        is_state: True for a parameter or buffer, which forwards may also change.
    """

    name: str
    what: str
    reader: str
    is_state: bool = False

    def __str__(self) -> str:
        return f"{self.what}, which {self.reader} reads"


def values_read(net: nn.Module) -> dict[Place, Any]:
    """Returns a record of the contents of all that the forwards of `net`'s modules read."""
    found: dict[Place, Any] = {}
    by_roots: dict[tuple[int, ...], _Code] = {}
    for path, module in net.named_modules():
        kind, own = type(module), vars(module)
        roots: list[Any] = []
        if not isinstance(module, torch.jit.ScriptModule):  # its forward is no Python
            roots.append(own.get("forward", kind.forward))
            roots += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        reader = f"{kind.__name__}.forward"
        key = tuple(map(id, roots))
        if key not in by_roots:
            by_roots[key] = code = _Code(kind)
            for root in roots:
                code.follow(root)
            for place, value in code.variables(reader):
                found[place] = _record(value, code)
        code = by_roots[key]
        for name in code.names & own.keys() if not _is_of_torch(kind) else ():
            attribute = ".".join(filter(None, (path, name)))
            if type(own[name]) not in _PLAIN:  # `plain_attributes` has these
                found[Place(name, f"{attribute} of the model", reader)] = _record(own[name], code)
        tensors = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, tensor in tensors:
            attribute = ".".join(filter(None, (path, name)))
            version = None if tensor.is_inference() else tensor._version
            found[Place(name, f"{attribute} of the model", reader, is_state=True)] = version
    return found


def check_unchanged(
    step: str, before: Mapping[Place, Any], net: nn.Module, names: Collection[str] | None = None
) -> None:
    """Refuses a step that has changed what a forward reads.

    Args:
        step: the name of the step's function.
        before: the result of `values_read` before it ran.
        net: the model.
        names: compare only places with these names, not parameters and buffers; None: all.

    Raises:
        UserError: names the variable and the forward.
    """
    for place, value in values_read(net).items():
        if names is not None and (place.is_state or place.name not in names):
            continue
        if place in before and before[place] != value:
            raise UserError(f"{step} changes {place}: {_ADVICE}")


def check_globals(function: Callable[..., Any], net: nn.Module) -> None:
    """Refuses a step with code that sets a global variable which a forward reads.

    Raises:
        UserError: names the variable and the forward.
    """
    stored = {
        instruction.argval
        for code in codes(function, depth=0)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    module_globals = getattr(function, "__globals__", None)
    for module in net.modules() if stored else ():
        forward = type(module).forward
        if getattr(forward, "__globals__", None) is not module_globals:
            continue
        if read := stored & {name for code in codes(forward) for name in code.co_names}:
            raise UserError(
                f"{function.__name__} sets the global variable {min(read)}, which "
                f"{type(module).__name__}.forward reads: {_ADVICE}"
            )


_ADVICE = (
    "stages run several micro-batches at a time, some in other processes. Change it outside the "
    "step, or pass it to the model as an argument"
)


def plain_attributes(net: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the numbers, flags and strings among the attributes of `net`'s modules."""
    return {
        (name, key): value
        for name, module in net.named_modules()
        for key, value in vars(module).items()
        if type(value) in (bool, int, float, str)
    }


def check_attributes(name: str, before: dict[tuple[str, str], Any], net: nn.Module) -> None:
    """Refuses a step that has changed an attribute of a module.

    Raises:
        UserError: names the attribute.
    """
    for place, value in plain_attributes(net).items():
        if before.get(place) != value:
            attribute = ".".join(filter(None, place))
            raise UserError(
                f"{name} changes {attribute} of the model from {before.get(place)!r} to {value!r}: "
                f"{_ADVICE}"
            )


def names_in(function: Callable[..., Any]) -> set[str]:
    """Returns the names in the code of `function` and of the functions that it calls."""
    return set(chain.from_iterable(map(_names_of, codes(function))))


def codes(function: Any, depth: int = _DEPTH) -> Iterator[types.CodeType]:
    """Returns the code of `function` and of the functions that it mentions.

    It finds functions by their global or enclosed names, and as attributes of values with such
    names.
    """
    return _codes(function, set(), depth)


def _codes(function: Any, seen: set[int], depth: int) -> Iterator[types.CodeType]:
    function = getattr(function, "__wrapped__", function)
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    names: set[str] = set()
    for code in _nested(function.__code__):
        names |= set(code.co_names)
        yield code
    if not depth:
        return
    for value in dict(_referenced(function, names)).values():
        yield from _codes(value, seen, depth - 1)
        if isinstance(value, types.ModuleType | type) or hasattr(value, "__dict__"):
            owner = value if isinstance(value, types.ModuleType | type) else type(value)
            if getattr(owner, "__name__", "").partition(".")[0] in ("torch", "numpy"):
                continue
            for name in names:
                yield from _codes(getattr(owner, name, None), seen, depth - 1)


def _referenced(function: types.FunctionType, names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Returns the values of a function's global and enclosed variables."""
    for name in names & function.__globals__.keys():
        yield name, function.__globals__[name]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (name for name in code.co_consts if isinstance(name, str))  # as in getattr(x, "y")
    yield from code.co_freevars


class _Code:
    """The code of a module's forward, with what it calls.

    Attributes:
        names: the names in it, of variables and attributes.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.names: set[str] = set()
        self._package = _package(kind.__module__)
        self._functions: dict[int, types.FunctionType] = {}
        self._owners: dict[int, type] = {}  # classes that may have methods it calls
        self._add_owner(kind)

    def follow(self, function: Any, depth: int = _DEPTH) -> None:
        """Adds a function and what it calls; ignores other values."""
        for attribute in ("__wrapped__", "func", "fget", "__func__"):  # decorated, partial, ...
            function = inner if callable(inner := _stored(function, attribute)) else function
        is_new = isinstance(function, types.FunctionType) and id(function) not in self._functions
        if not is_new or not self.opens(function.__module__):
            return
        self._functions[id(function)] = function
        names = set(chain.from_iterable(map(_names_of, _nested(function.__code__))))
        new_names = names - self.names
        self.names |= names
        if not depth:
            return
        for _, value in _referenced(function, names):
            self.follow(value, depth - 1)
            if isinstance(value, types.ModuleType):
                if self.opens(value.__name__):
                    for name in names & vars(value).keys():
                        self.follow(vars(value)[name], depth - 1)
            elif not isinstance(value, types.FunctionType):
                self._add_owner(value if isinstance(value, type) else type(value), depth)
        for owner in list(self._owners.values()):  # methods with a name that was not seen before
            for name in new_names & vars(owner).keys():
                self.follow(vars(owner)[name], depth - 1)

    def _add_owner(self, kind: type, depth: int = _DEPTH) -> None:
        for owner in kind.__mro__:
            if id(owner) in self._owners or not self.opens(owner.__module__):
                continue
            self._owners[id(owner)] = owner
            if not issubclass(owner, nn.Module):
                for name, value in list(vars(owner).items()):
                    is_operation = name.startswith("__") and name not in _NOT_OPERATIONS
                    if is_operation or name in self.names:
                        self.follow(value, depth - 1)

    def variables(self, reader: str) -> Iterator[tuple[Place, Any]]:
        """Returns the variables and class attributes that the code reads, with their values."""
        for function in self._functions.values():
            names = {name for code in _nested(function.__code__) for name in code.co_names}
            for name in names & function.__globals__.keys():
                value = function.__globals__[name]
                if not isinstance(value, types.ModuleType):
                    yield Place(name, f"the global variable {name}", reader), value
                elif self.opens(value.__name__):
                    for attribute in names & vars(value).keys():
                        what = f"the global variable {value.__name__}.{attribute}"
                        yield Place(attribute, what, reader), vars(value)[attribute]
            for name, value in _referenced(function, set()):
                yield Place(name, f"the variable {name} of an enclosing function", reader), value
            code = function.__code__
            positional = code.co_varnames[: code.co_argcount]
            defaults = function.__defaults__ or ()
            named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
            for name, value in (named | (function.__kwdefaults__ or {})).items():
                yield (
                    Place(name, f"the default of {function.__name__}'s argument {name}", reader),
                    value,
                )
        for owner in self._owners.values():
            for name in self.names & vars(owner).keys():
                place = Place(name, f"the class attribute {owner.__name__}.{name}", reader)
                yield place, vars(owner)[name]

    def opens(self, module: str | None) -> bool:
        """Returns whether to look into what a module defines."""
        return (
            module is not None
            and (not _is_installed(module) or _package(module) == self._package)
            and _package(module) != "torch"
        )


@dataclass
class _Same:
    """A value that is compared by its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


@dataclass
class _Budget:
    values: int = _MOST_VALUES
    parents: set[int] = field(default_factory=set)


def _record(value: Any, code: _Code, budget: _Budget | None = None) -> Any:
    """Returns a record of `value`, which differs after a change of its contents.

    Args:
        value: any value.
        code: of attributes of objects, those that this code mentions count.
        budget: how much may still be recorded.
    """
    budget = budget or _Budget()
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return _Same(value), *_content(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        is_small = value.nbytes <= _MOST_BYTES
        return value.shape, value.dtype.str, hash(value.tobytes()) if is_small else None
    budget.values -= 1
    if budget.values < 0 or id(value) in budget.parents:
        return None  # a cycle, or too large
    parts = _parts_of(value, code)
    if parts is None:
        return _Same(value)
    budget.parents.add(id(value))
    try:
        return type(value), [_record(part, code, budget) for part in parts]
    finally:
        budget.parents.discard(id(value))


def _parts_of(value: Any, code: _Code) -> list[Any] | None:
    """Returns the parts of a container or object; None if it is compared by its identity."""
    kind = type(value)
    attributes = None
    if isinstance(value, types.SimpleNamespace | Namespace) or (
        code.opens(kind.__module__) and not isinstance(value, type | types.FunctionType | nn.Module)
    ):
        slots = chain.from_iterable(getattr(owner, "__slots__", ()) for owner in kind.__mro__)
        values = {name: getattr(value, name, None) for name in slots} | _attributes(value)
        attributes = [
            part for name in sorted(values.keys() & code.names) for part in (name, values[name])
        ]
    items: list[Any] | None = None
    try:
        if isinstance(value, Mapping):
            items = list(chain.from_iterable(value.items()))
        elif isinstance(value, Set):
            items = sorted(value, key=repr)
        elif isinstance(value, list | tuple | deque | array | bytearray | np.ndarray):
            items = list(value)
    except Exception:  # of a class of the script
        items = None
    if items is None and attributes is None:
        return None
    return [*(items or ()), *(attributes or ())]


def _attributes(value: Any) -> dict[str, Any]:
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if isinstance(attributes, dict) else {}


def _content(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    is_read = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_read or tensor.nbytes > _MOST_BYTES or tensor.is_quantized:
        return version, None
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return version, hash(data.view(torch.uint8).numpy().tobytes()) if data.numel() else None


def _stored(value: Any, attribute: str) -> Any:
    """Returns an attribute that the object itself has, and not by a `__getattr__`."""
    if isinstance(
        value, property | functools.partial | functools.cached_property | types.MethodType
    ):
        return getattr(value, attribute, None)
    if isinstance(value, staticmethod | classmethod | types.FunctionType):
        return getattr(value, attribute, None)
    return None


def _is_of_torch(kind: type) -> bool:
    return _package(kind.__module__) == "torch"


def _package(module: str) -> str:
    return module.partition(".")[0]


@cache
def _is_installed(module: str) -> bool:
    """Returns whether a module is of the standard library or an installed package."""
    package = _package(module)
    if package == "__main__" or package == "__mp_main__":
        return False
    if package == "hybridtrain" or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
