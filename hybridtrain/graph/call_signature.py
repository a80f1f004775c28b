"""Maps a batch's inputs to the arguments of a module's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import nn

from hybridtrain.errors import BatchError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Signature(NamedTuple):
    """How a forward is called.

    Attributes:
        of_forward: its signature.
        names: by the keys of a dict of inputs, the arguments that are passed by position, and those
            by keyword. Every micro-batch asks, and binding takes longer than a small layer.
    """

    of_forward: inspect.Signature
    names: dict[tuple[Any, ...], tuple[Sequence[str], Sequence[str]]]


# By the function of a forward, and whether it is a method.
_known: WeakKeyDictionary[Callable[..., Any], dict[bool, _Signature]] = WeakKeyDictionary()


def arguments_of(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that the inputs of a batch are to a module's forward.

    A dict with arguments of `module.forward` as keys is passed by keyword. A tuple or list is
    passed by position, if the forward takes several arguments. Anything else is the only argument.

    Raises:
        BatchError: `module.forward` cannot be called with `inputs`.
    """
    signature, known_names = _signature(module)
    if type(inputs) is dict and (names := known_names.get(tuple(inputs))) is not None:
        return tuple([inputs[name] for name in names[0]]), {k: inputs[k] for k in names[1]}
    parameters = list(signature.parameters.values())
    attempts: list[tuple[Sequence[Any], Mapping[Any, Any]]] = [((inputs,), {})]
    if isinstance(inputs, Mapping):
        is_value = not any(key in signature.parameters for key in inputs)
        attempts = [((), inputs), *(attempts if is_value else [])]
    elif isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        takes_several = sum(p.kind in _POSITIONAL for p in parameters) > 1
        if takes_several or any(p.kind is p.VAR_POSITIONAL for p in parameters):
            attempts = [(inputs, {})]
    for args, kwargs in attempts:
        with suppress(TypeError):  # also if a key is not a string
            bound = signature.bind(*args, **kwargs)
            if kwargs and type(inputs) is dict:
                count = len(bound.args)
                known_names[tuple(inputs)] = list(bound.arguments)[:count], list(bound.kwargs)
            return bound.args, bound.kwargs
    raise BatchError(
        f"cannot call {type(module).__name__}.forward{signature} with the inputs of this "
        f"batch, a {type(inputs).__name__}: pass one value, a tuple of positional "
        "arguments, or a dict of keyword arguments"
    )


def _signature(module: nn.Module) -> _Signature:
    """Returns the signature of a module's forward, also for a TorchScript module."""
    forward: Any = module.forward
    is_method = inspect.ismethod(forward)
    # a bound method is a new object each time
    function = forward.__func__ if is_method else forward
    if not inspect.isfunction(function):
        return _Signature(_inspected(forward), {})
    of_function = _known.setdefault(function, {})
    if is_method not in of_function:
        of_function[is_method] = _Signature(_inspected(forward), {})
    return of_function[is_method]


def _inspected(forward: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(forward)
    except ValueError:
        return inspect.Signature(
            [
                inspect.Parameter(
                    argument.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=argument.default_value
                    if argument.has_default_value()
                    else inspect.Parameter.empty,
                )
                for argument in cast(Any, forward).schema.arguments[1:]  # the first is self
            ]
        )
