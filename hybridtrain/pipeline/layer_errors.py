"""What a failed layer tells: its inputs, advice, and values that changed before their backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import (
    allowing_torch_func,
    backward_of_batch_norm,
    saved_hooks,
)
from hybridtrain.errors import UserError, argument, setting
from hybridtrain.pipeline import offload
from hybridtrain.pipeline.layer_state import Change, StageState
from hybridtrain.pipeline.tensor_digest import digest


def error_hints() -> dict[str, str]:
    """Returns advice for errors that are likely in a pipeline, by a part of PyTorch's message."""
    return {
        "leaf Variable that requires grad": (
            "the layer changes its input in place: declare it with an attribute inplace = True on "
            "its module, as nn.ReLU does"
        ),
        "Expected more than 1 value per channel": (
            f"a micro-batch is too small for a batch norm: lower {argument('chunks')}, or set "
            f"{setting('drop_last', True)} so that there is no short last batch"
        ),
        "'lengths' argument should be a 1D CPU int64 tensor": (
            "all tensors of a batch are moved to the first stage's device: pass lengths.cpu() to "
            "pack_padded_sequence"
        ),
        **dict.fromkeys(
            ["No available kernel", "No viable backend for scaled_dot_product_attention"],
            f"{argument('attention')} allows one kernel, which these inputs do not suit (type, "
            f"mask, dropout, size of a head): set {setting('attention', 'auto')}",
        ),
        "does not have a deterministic implementation": (
            f"{argument('deterministic')}, and {argument('replicas')} on GPUs, allow deterministic "
            "algorithms only, so that results can be repeated bitwise: replace the operation, "
            "or remove the argument that you have set"
        ),
    }


@contextmanager
def guarding_saved(state: StageState) -> Iterator[None]:
    """Compares tensors between the time autograd saves them in the block and their backward.

    Finds parameters and buffers that a forward changes through .data: the backward of an earlier
    micro-batch would use the later values, and PyTorch does not increment the version.

    Raises:
        UserError: in the backward, that the values have changed; names the layer.
    """
    # A copy, since a comparison in the block may add to it; these were known before.
    changes = dict(state.uncounted)
    hooks = saved_hooks()  # outer ones, which PyTorch does not call around the hooks here
    # these compare versions themselves, and the tensor must be able to leave its device
    are_of_offload = hooks is not None and hooks[1] is offload.unpack

    def pack(tensor: Tensor) -> Any:
        change = None
        if tensor.layout == torch.strided and not tensor.is_meta:
            change = changes.get(storage_id(tensor))
        # Only of tensors that are known to change unseen: a digest reads all of the memory.
        before = None if change is None else digest(tensor)
        packed = None if hooks is None else hooks[0](tensor)
        held = None if are_of_offload and change is None else tensor
        return held, tensor._version, change, before, packed

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor | None
        tensor, version, change, before, packed = packed
        value: Tensor = tensor if hooks is None else hooks[1](packed)
        # a batch norm saves its running statistics, but does not use them
        if tensor is None or backward_of_batch_norm():
            return value
        if change is not None and before is not None:
            if not torch.equal(before, digest(tensor)):  # type: ignore[arg-type]
                raise changed_before_backward(change)
        elif tensor._version != version and (other := state.change_of(str(tensor.shape))):
            raise changed_before_backward(other)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), allowing_torch_func():
        yield


def changed_before_backward(change: Change) -> UserError:
    """Returns the error for a tensor that the next micro-batch's forward changes too early."""
    return UserError(
        f"{change}, but the backward of a micro-batch needs the values of its own forward, and "
        f"in a pipeline the forward of the next micro-batch runs before and changes "
        f"them. Compute with a copy ({change.name}.clone()), or recompute the layer from its own "
        f"state: {argument('recompute')}[{change.layer!r}]"
    )


def describe(value: Any) -> str:
    """Returns the shapes and types in a pytree, for an error message."""
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in tree_leaves(value)
    ]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
