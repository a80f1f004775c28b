"""Tensors of which each replica has a part, as FSDP2 makes of parameters: torch's `DTensor`s.

Everything else asks here, so that a plain tensor and one in parts are handled by the same lines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is distributed over the replicas."""
    return isinstance(tensor, DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` that this process has; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Returns all values of `tensor` as a plain tensor; a collective call of the replicas.

    A plain tensor is returned unchanged.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def load_(target: Tensor, whole: Tensor) -> None:
    """Copies `whole`, a plain tensor that every replica has, into `target` or its part of it."""
    if isinstance(target, DTensor):
        own = whole.to(target.device, target.dtype)
        # without communication: each takes its part of what it was given
        parts = distribute_tensor(own, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(parts.to_local())
    else:
        target.copy_(whole)
