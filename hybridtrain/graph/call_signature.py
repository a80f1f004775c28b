"""Maps a batch's inputs to the arguments of a module's forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from hybridtrain.errors import BatchError, phrase

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class CallSignature:
    """The arguments of a call of a module's forward.

    Attributes:
        module: the module.
        positional: the names of positional arguments.
        keywords: the names of keyword arguments.
        constants: the arguments that contain no tensor (`use_cache=False`), by name.
        tensors: the names of the arguments that are tensors.
    """

    module: nn.Module
    positional: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    tensors: frozenset[str] = frozenset()

    @classmethod
    def of_inputs(cls, module: nn.Module, inputs: Any) -> tuple[CallSignature, list[Any]]:
        """Returns the arguments that a batch passes to `module`, and their values.

        A dict with arguments of `module.forward` as keys is passed by keyword. A tuple or list is
        passed by position, if the forward takes several arguments. Anything else is the only
        argument.

        Raises:
            BatchError: `module.forward` cannot be called with `inputs`.
        """
        signature = _signature(module)
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
                break
        else:
            raise BatchError(
                f"cannot call {type(module).__name__}.forward{signature} with the inputs of this "
                f"batch, a {type(inputs).__name__}: pass one value, a tuple of positional "
                "arguments, or a dict of keyword arguments"
            )
        names = [p.name for p in parameters if p.kind in _POSITIONAL][: len(bound.args)]
        names += [f"input_{number}" for number in range(len(bound.args) - len(names))]
        by_name = dict(zip(names, bound.args, strict=True)) | bound.kwargs
        constants = {
            name: value
            for name, value in by_name.items()
            if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        }
        tensors = frozenset(name for name, value in by_name.items() if isinstance(value, Tensor))
        values = list(by_name.values())
        return cls(module, tuple(names), tuple(bound.kwargs), constants, tensors), values

    @classmethod
    def of_required(cls, module: nn.Module) -> CallSignature:
        """Returns the arguments that every call of `module` must pass."""
        parameters = _signature(module).parameters.values()
        required = [p for p in parameters if p.default is p.empty]
        positional = tuple(p.name for p in required if p.kind in _POSITIONAL)
        return cls(module, positional, tuple(p.name for p in required if p.kind is p.KEYWORD_ONLY))

    @property
    def names(self) -> tuple[str, ...]:
        """All arguments, in the order of their values."""
        return self.positional + self.keywords

    def split(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Splits `values`, in the order of `names`, into args and kwargs."""
        count = len(self.positional)
        return tuple(values[:count]), dict(zip(self.keywords, values[count:], strict=True))

    def graph_inputs(self, inputs: Any) -> list[Any]:
        """Returns the arguments of the traced graph for the inputs of a batch.

        Raises:
            BatchError: the batch passes other arguments than the model was traced with.
        """
        signature, values = self.of_inputs(self.module, inputs)
        by_name = dict(zip(signature.names, values, strict=True))
        model = type(self.module).__name__
        for name, constant in self.constants.items():
            if name in by_name and not _equal(by_name[name], constant):
                raise BatchError(
                    f"{model} was traced with {name}={_shown(constant)}, but this batch passes "
                    f"{name}={_shown(by_name[name])}: only tensors may change. Pass the same "
                    "value in each batch as in example_inputs=, or create another "
                    f"{phrase('HybridModel')} of the same module for the other value"
                )
        if set(by_name) != set(self.names):
            raise BatchError(
                f"{model} was traced with {', '.join(self.names) or 'no arguments'}, but this "
                f"batch passes {', '.join(signature.names) or 'no arguments'}: pass the same "
                "arguments in every batch as in example_inputs=. To predict without labels, for "
                "example, load model.state_dict() into the plain module, or into another "
                f"{phrase('HybridModel')}"
            )
        if not self.tensors <= signature.tensors:
            name = min(self.tensors - signature.tensors)
            raise BatchError(
                f"{model} was traced with a tensor as {name}, but this batch passes a "
                f"{type(by_name[name]).__name__}"
            )
        return [by_name[name] for name in self.names]


def _equal(first: Any, second: Any) -> bool:
    """Returns whether two values without tensors are equal.

    Arrays are equal if all elements are equal; an object that cannot be compared equals only
    itself.
    """
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        if type(first) is not type(second) or first.dtype != second.dtype:
            return False
        return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    first_leaves, spec = tree_flatten(first)
    if first_leaves and first_leaves[0] is first:
        try:
            return bool(first == second) or bool(first != first and second != second)  # NaN
        except Exception:  # ambiguous, such as an array inside an object
            return False
    second_leaves, other_spec = tree_flatten(second)
    return spec == other_spec and all(map(_equal, first_leaves, second_leaves))


def _shown(value: Any) -> str:
    """Formats a value for a message: tensors and arrays as shapes, shortened."""

    def short(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | np.ndarray):
            kind = "a tensor" if isinstance(leaf, Tensor) else "an array"
            return _Shown(f"{kind} of shape {tuple(leaf.shape)}")
        return leaf

    text = repr(tree_map(short, value))
    return text if len(text) <= 100 else f"{text[:100]}..."


class _Shown:
    """A value with a given `repr`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _signature(module: nn.Module) -> inspect.Signature:
    """Returns the signature of a module's forward, also for a TorchScript module."""
    try:
        return inspect.signature(module.forward)
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
                for argument in cast(Any, module.forward).schema.arguments[1:]  # the first is self
            ]
        )


def arguments_of(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that the inputs of a batch are to a module's forward.

    Raises:
        BatchError: as in `CallSignature.of_inputs`.
    """
    signature, values = CallSignature.of_inputs(module, inputs)
    return signature.split(values)


def optional_arguments(module: nn.Module) -> list[str]:
    """Returns the names of the arguments that calls of `module` may omit."""
    parameters = _signature(module).parameters.values()
    return [p.name for p in parameters if p.default is not p.empty]
