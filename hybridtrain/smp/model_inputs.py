"""The arguments of a call of the model as the inputs of a batch."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from hybridtrain.errors import UserError
from hybridtrain.graph import is_chain


def inputs_of(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments of a call of `net` as the inputs of a batch.

    Raises:
        UserError: `net` cannot be called with them.
    """
    if len(args) == 1 and not kwargs and (isinstance(args[0], Tensor) or is_chain(net)):
        return args[0]
    try:
        signature = inspect.signature(net.forward)
    except ValueError:  # of TorchScript
        return kwargs or args
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{type(net).__name__}.forward{signature}: {error}") from None
    by_name: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            if kwargs:
                raise UserError(
                    f"{type(net).__name__}.forward{signature}: pass its arguments all by position"
                )
            return args
        by_name |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return by_name
