"""What a batch's inputs are to a model's forward: one value, positional values, or keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain.errors import BatchError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Inputs:
    """The arguments that a forward gets, however they are given.

    TraceGuards:
        positional: the names of those that are passed by position.
        keywords: the names of those that are passed by keyword.
        constants: the values of those that hold no tensor (`use_cache=False`).
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of `values`."""
        return self.positional + self.keywords

    def call(self, forward: Callable[..., Any], values: list[Any]) -> Any:
        """`forward` with `values`, which are in the order of `names`."""
        count = len(self.positional)
        keywords = dict(zip(self.keywords, values[count:], strict=True))
        return forward(*values[:count], **keywords)


def bind(module: nn.Module, given: Any) -> tuple[Inputs, list[Any]]:
    """How `module` is called with a batch's inputs: which arguments, and their values.

    A dict whose keys are arguments of `module.forward` is passed by keyword; a tuple or list, to a
    forward that takes several arguments, by position; anything else is the one argument.
    """
    signature = inspect.signature(module.forward)
    parameters = list(signature.parameters.values())
    bound, is_value = None, True
    if isinstance(given, Mapping):
        bound = _try(signature, (), given)
        is_value = not any(key in signature.parameters for key in given)
    elif isinstance(given, tuple | list) and not hasattr(given, "_fields"):
        several = sum(p.kind in _POSITIONAL for p in parameters) > 1
        if several or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            bound = _try(signature, tuple(given), {})
            is_value = False
    if bound is None and is_value:
        bound = _try(signature, (given,), {})
    if bound is None:
        raise BatchError(
            f"{type(module).__name__}.forward{signature} cannot be called with the inputs of this "
            f"batch, a {type(given).__name__}: give one value, a tuple of its positional "
            f"arguments, or a dict of its keyword arguments"
        )
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    extra = [f"input_{number}" for number in range(len(bound.args) - len(positional))]
    names = (*(positional + extra)[: len(bound.args)], *bound.kwargs)
    values = [*bound.args, *bound.kwargs.values()]
    constants = {
        name: value
        for name, value in zip(names, values, strict=True)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }
    count = len(bound.args)
    return Inputs(names[:count], names[count:], constants), values


def has_optional(module: nn.Module) -> bool:
    """Whether calls of `module` may leave arguments out."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.default is not p.empty for p in parameters)


def required(module: nn.Module) -> Inputs | None:
    """The arguments that every call of `module` must give; None if no argument is required."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    positional = tuple(p.name for p in needed if p.kind in _POSITIONAL)
    keywords = tuple(p.name for p in needed if p.kind is p.KEYWORD_ONLY)
    return Inputs(positional, keywords) if positional or keywords else None


def _try(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[Any, Any]
) -> inspect.BoundArguments | None:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:  # also where a key is no string
        return None
