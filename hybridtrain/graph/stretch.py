"""A stretch of a forward as a module: statements that a graph calls as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from hybridtrain.graph.outline import StretchCode
from hybridtrain.graph.traced_graph import Untraceable

_SIMPLE = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size)
_FIXED = (nn.Module, FunctionType, BuiltinFunctionType, ModuleType, type)


class Stretch(nn.Module):
    """Statements of the forward of `owner`.

    The submodules that they may call are submodules of this one, the same objects.

    Attributes:
        key: what makes two stretches the same.
        changes: the names of the attributes of `owner` that they may set.
        inplace: whether they may change a tensor in place, as `nn.ReLU` declares it.
    """

    def __init__(
        self, owner: nn.Module, code: StretchCode, fixed: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        super().__init__()
        self.key = (id(owner), code.name, *((name, id(value)) for name, value in fixed.items()))
        self.changes = code.changes
        self.inplace = code.in_place
        self.owner = (owner,)  # in a tuple, to keep it from becoming a submodule
        self._code = code
        self._fixed = dict(fixed)
        self._names = tuple(names)
        parts = [owner._modules[name] for name in sorted(code.modules)]
        for number, part in enumerate([*parts, *fixed.values()]):
            if isinstance(part, nn.Module) and part is not owner:
                self.add_module(f"part{number}", part)

    def forward(self, *values: Any) -> Any:
        """Returns the variables that the statements set, or what they return."""
        values = tree_map(lambda leaf: leaf, values)  # lists may be appended to
        given = dict(zip(self._names, values, strict=True))
        return self._code.function(self.owner[0], **self._fixed, **given)


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
        if isinstance(value, _FIXED) or any(value is each for each in vars(owner).values()):
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
    return isinstance(value, list | dict | set)


def outputs(
    code: StretchCode, values: Mapping[str, Any], result: fx.Proxy
) -> Any:
    """Returns the results of a stretch as the forward goes on with them."""
    if code.returns:
        return result
    return tuple(
        result[number] if name in code.outputs or is_container(values.get(name)) else values.get(name)
        for number, name in enumerate(code.results)
    )
