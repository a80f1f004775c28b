"""A stretch of a forward as a module: statements that a graph calls unchanged."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybridtrain.graph.outline import StretchCode
from hybridtrain.graph.traced_graph import Untraceable

_SIMPLE = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_FIXED = (nn.Module, FunctionType, BuiltinFunctionType, ModuleType, type)


# In the notes of a node: whether its value is a list, dict or set.
_CONTAINER = "container"
# Methods that change one, and that tensors do not have.
_CONTAINER_METHODS = {
    "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
}  # fmt: skip


class Stretch(nn.Module):
    """Statements of the forward of `owner`.

    The submodules that they may call are submodules of this one, the same objects.

    Attributes:
        key: what makes two stretches the same.
        touches: the names of the attributes of `owner`, and of globals, that statements taken out
            of its forward set, and that these may read or set.
        inplace: whether they may change a tensor in place, as `nn.ReLU` declares it.
    """

    def __init__(
        self,
        owner: nn.Module,
        code: StretchCode,
        fixed: Mapping[str, Any],
        names: Sequence[str],
        changes: frozenset[str],
    ) -> None:
        super().__init__()
        self.key = (id(owner), code.name, *((name, id(value)) for name, value in fixed.items()))
        self.touches = (code.changes | code.uses) & changes
        self.inplace = code.in_place
        self.owner = (owner,)  # in a tuple, to keep it from becoming a submodule
        self._code = code
        self._fixed = dict(fixed)
        self._names = tuple(names)
        parts = [owner._modules[name] for name in sorted(code.modules)]
        for number, part in enumerate([*parts, *fixed.values()]):
            if isinstance(part, nn.Module) and part is not owner:
                self.add_module(f"part{number}", part)

    def state(self) -> list[MutableMapping[str, Any]]:
        """Returns where the values are that a recomputation must find as they were."""
        held = vars(self.owner[0]), self._code.function.__globals__
        return [NamedValues(values, self.touches) for values in held] if self.touches else []

    def forward(self, *values: Any) -> Any:
        """Returns the variables that the statements set, or what they return."""
        values = tree_map(lambda leaf: leaf, values)  # lists may be appended to
        given = dict(zip(self._names, values, strict=True))
        return self._code.function(self.owner[0], **self._fixed, **given)


class NamedValues(MutableMapping[str, Any]):
    """Some entries of a dict."""

    def __init__(self, values: dict[str, Any], names: Collection[str]) -> None:
        self._values = values
        self._names = sorted(names)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def variables(
    owner: nn.Module, code: StretchCode, values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values that a stretch reads: those for its module to keep, and its arguments.

    Raises:
        Untraceable: it reads an object that it might change, or that may differ at each call.
    """
    fixed: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for name in code.inputs:
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, _FIXED):
            fixed[name] = value
            continue
        for leaf in tree_leaves(value):
            if not issubclass(type(leaf), (*_SIMPLE, fx.Proxy, slice)):
                kind = type(leaf).__name__
                raise Untraceable(f"{name!r} is a {kind}, which statements taken out may change")
        if is_container(value) and sum(value is each for each in values.values()) > 1:
            raise Untraceable(f"{name!r} has two names, and statements taken out may change it")
        given[name] = value
    for local, name in code.tensors.items():
        given[local] = getattr(owner, name)
    return fixed, given


def is_container(value: Any) -> bool:
    """Returns whether statements may change `value` without setting a variable."""
    if issubclass(type(value), fx.Proxy):
        return bool(value.node.meta.get(_CONTAINER))
    return isinstance(value, list | dict | set)


def changes_container(node: fx.Node) -> bool:
    """Returns whether `node` changes a list, dict or set that a stretch has returned."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_method" and node.target in _CONTAINER_METHODS:
        return True
    writes = node.op == "call_method" or node.target in (operator.iadd, operator.setitem)
    return writes and bool(node.args[0].meta.get(_CONTAINER))


def outputs(code: StretchCode, values: Mapping[str, Any], result: Any) -> Any:
    """Returns the results of a stretch as the forward goes on with them."""
    if code.returns:
        return result
    found: list[Any] = []
    for number, name in enumerate(code.results):
        value = values.get(name)
        if name in code.outputs or is_container(value):
            found.append(result[number])
            found[-1].node.meta[_CONTAINER] = is_container(value)
        else:
            found.append(value)
    return tuple(found)
