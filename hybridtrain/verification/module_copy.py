"""Copies of a module that behave like the module.

`copy.deepcopy` drops the hooks of parameters. It rejects Python modules, and tensors computed from
other tensors (the `weight` of `torch.nn.utils.weight_norm` or of a pruned layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hybridtrain._base.patched_forwards import let_functions_call_copies
from hybridtrain._base.torch_private import deepcopy_of_modules
from hybridtrain.pipeline import remove_aliases

T = TypeVar("T")


def copy_modules(modules: T, convert: Callable[[Tensor], Tensor] | None = None) -> T:
    """Returns a deep copy of a module, or of a tuple or list of modules that share parts.

    The copied parameters have their hooks and no gradient. Compiled code is not copied: the copy
    runs the plain modules.

    Args:
        modules: the module, or a tuple or list of modules.
        convert: returns the copy of a parameter, a buffer or another tensor of a module.

    Raises:
        Exception: raised by `copy.deepcopy` for attributes that cannot be copied.
    """
    parts = list(_parts(modules))
    memo: dict[int, Any] = {}
    for part in parts:
        for value in _values(part):
            # an alias in a pipeline copies the parameter that it replaces
            is_alias = isinstance(value, Tensor) and "__deepcopy__" in vars(value)
            if isinstance(value, Tensor) and id(value) not in memo and not is_alias:
                if convert is not None:
                    memo[id(value)] = convert(value)
                elif value.grad_fn is not None:
                    # The graph that it belongs to is not the copy's; its hook or parametrization
                    # computes it anew.
                    memo[id(value)] = value.detach().clone()
            elif isinstance(value, ModuleType):
                memo[id(value)] = value
    copied = deepcopy_of_modules(modules, memo, _parts)
    # A `forward` that was replaced by a function has the original module in its closure.
    let_functions_call_copies(zip(parts, _parts(copied), strict=False), memo)
    for original, twin in zip(parts, _parts(copied), strict=True):
        for name, parameter in original._parameters.items():
            twin_parameter = twin._parameters[name]
            if parameter is not None and twin_parameter is not None:
                # deepcopy has copied it, and it would be added to.
                twin_parameter.grad = None
                _copy_hooks(parameter, twin_parameter)
        if not isinstance(twin, torch.jit.ScriptModule):
            remove_aliases(twin)
    return copied


def _parts(modules: Any) -> Iterable[nn.Module]:
    """Yields all modules without duplicates."""
    todo, seen = [modules], set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, nn.Module):
            for part in value.modules():
                if id(part) not in seen:
                    seen.add(id(part))
                    yield part
        else:
            todo.extend(reversed(value))


def _values(module: nn.Module) -> Iterable[Any]:
    for value in list(vars(module).values()):
        yield value
        if isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value


def _copy_hooks(parameter: nn.Parameter, twin: nn.Parameter) -> None:
    if twin._backward_hooks is None:  # one of two names of a tied parameter
        for hook in (parameter._backward_hooks or {}).values():
            twin.register_hook(hook)
    if not getattr(twin, "_post_accumulate_grad_hooks", None):
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            twin.register_post_accumulate_grad_hook(hook)
