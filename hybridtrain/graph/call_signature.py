"""Maps arguments of a module's forward to their names, and a batch's inputs to arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

from hybridtrain.errors import BatchError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Signature:
    """How a forward is called.

    Args:
        of_forward: its signature.

    Attributes:
        of_forward: the same.
        names: the names of its parameters, in order, without `*args` and `**kwargs`.
        nones: those that are None by default.
        takes_args: whether it has `*args`.
        takes_more: whether it has `**kwargs`.
        passed: by the keys of a dict of inputs, the arguments that are passed by position, and
            those by keyword. Every micro-batch asks, and binding takes longer than a small layer.
    """

    def __init__(self, of_forward: inspect.Signature) -> None:
        parameters = of_forward.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.of_forward = of_forward
        self.names = dict.fromkeys(parameter.name for parameter in named)
        self.nones = frozenset(p.name for p in named if p.default is None)
        self.takes_args = inspect.Parameter.VAR_POSITIONAL in kinds
        self.takes_more = inspect.Parameter.VAR_KEYWORD in kinds
        self.passed: dict[tuple[Any, ...], tuple[Sequence[str], Sequence[str]]] = {}
        self._required = frozenset(p.name for p in named if p.default is p.empty)
        # those that may be passed by position; None: only `bind` knows
        self._by_position: Sequence[str] | None = None
        if not self.takes_args and inspect.Parameter.POSITIONAL_ONLY not in kinds:
            self._by_position = [p.name for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments by name, in the order of the parameters.

        Raises:
            TypeError: the forward does not take them.
        """
        if self._by_position is not None and len(args) <= len(self._by_position):
            by_name = dict(zip(self._by_position, args, strict=False))
            is_twice = not by_name.keys().isdisjoint(kwargs)
            by_name.update(kwargs)
            is_known = self.takes_more or by_name.keys() <= self.names.keys()
            if is_known and not is_twice and self._required <= by_name.keys():
                ordered = {name: by_name[name] for name in self.names if name in by_name}
                ordered.update(by_name)
                return ordered
        bound = self.of_forward.bind(*args, **kwargs)
        inputs: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            is_more = self.of_forward.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            inputs.update(value if is_more else {name: value})
        return inputs


# By the function of a forward, and whether it is a method.
_known: WeakKeyDictionary[Callable[..., Any], dict[bool, Signature]] = WeakKeyDictionary()


def signature_of(forward: Callable[..., Any]) -> Signature:
    """Returns how a forward is called; `forward` may belong to a TorchScript module."""
    function: Any = forward
    if is_method := inspect.ismethod(forward):
        function = forward.__func__  # a bound method is a new object each time
    if not inspect.isfunction(function):
        return Signature(_inspected(forward))
    of_function = _known.get(function)
    if of_function is None:
        of_function = _known.setdefault(function, {})
    if is_method not in of_function:
        of_function[is_method] = Signature(_inspected(forward))
    return of_function[is_method]


def arguments_of(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that the inputs of a batch are to a module's forward.

    A dict with arguments of `module.forward` as keys is passed by keyword. A tuple or list is
    passed by position, if the forward takes several arguments. Anything else is the only argument.

    Raises:
        BatchError: `module.forward` cannot be called with `inputs`.
    """
    signature = signature_of(module.forward)
    if type(inputs) is dict and (names := signature.passed.get(tuple(inputs))) is not None:
        return tuple([inputs[name] for name in names[0]]), {k: inputs[k] for k in names[1]}
    of_forward = signature.of_forward
    parameters = list(of_forward.parameters.values())
    attempts: list[tuple[Sequence[Any], Mapping[Any, Any]]] = [((inputs,), {})]
    if isinstance(inputs, Mapping):
        is_value = not any(key in of_forward.parameters for key in inputs)
        attempts = [((), inputs), *(attempts if is_value else [])]
    elif isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        takes_several = sum(p.kind in _POSITIONAL for p in parameters) > 1
        if takes_several or signature.takes_args:
            attempts = [(inputs, {})]
    for args, kwargs in attempts:
        with suppress(TypeError):  # also if a key is not a string
            bound = of_forward.bind(*args, **kwargs)
            if kwargs and type(inputs) is dict:
                count = len(bound.args)
                signature.passed[tuple(inputs)] = list(bound.arguments)[:count], list(bound.kwargs)
            return bound.args, bound.kwargs
    raise BatchError(
        f"cannot call {type(module).__name__}.forward{of_forward} with the inputs of this "
        f"batch, a {type(inputs).__name__}: pass one value, a tuple of positional "
        "arguments, or a dict of keyword arguments"
    )


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
