"""PyTorch's private names that this project uses: the place to look when a release breaks it.

Each says which private name it uses, and why no public one does the same. Two are used in place:
`torch.utils._pytree`, everywhere, which has no public name; and `nn.Module._apply`, overridden by
`graph.segment.Segment`, since `nn.Module.to` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Of torch.utils._python_dispatch: the public modes see calls of torch functions only, and not the
# operators that they compute with.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GRAD_MODE_SETTER", "TorchDispatchMode", "has_hooks", "operator_schema"]

# graph --------------------------------------------------------------------------------------------

# torch._C._set_grad_enabled: all of torch.no_grad, enable_grad and set_grad_enabled call it.
GRAD_MODE_SETTER = (torch._C, "_set_grad_enabled")


def has_hooks(module: nn.Module) -> bool:
    """Returns whether `module` has hooks around its forward or backward.

    Uses `nn.Module._forward_hooks` and its three kin: hooks can be registered, but not listed.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def operator_schema(function: Callable[..., Any] | str) -> torch.FunctionSchema | None:
    """Returns the schema of an operator of an exported graph; None for any other function.

    Uses `torch._ops.OpOverload._schema`: nothing else tells which arguments an operator writes to,
    and which its result is a view of.
    """
    return function._schema if isinstance(function, torch._ops.OpOverload) else None
