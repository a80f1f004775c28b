"""Tensors of which each replica has a part, as FSDP2 makes of parameters: torch's `DTensor`s.

Everything else asks here, so that a plain tensor and one in parts are handled by the same lines.
Nothing else computes with a `DTensor`, but an optimizer: a sum of one, say, talks to the other
replicas without saying so, and waits for ever if they do not compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parameter import Parameter

from hybridtrain.errors import UserError


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether `tensor` is distributed over the replicas."""
    return isinstance(tensor, DTensor)


def is_cut(tensor: Tensor) -> bool:
    """Returns whether each replica has other values of `tensor`, not all of them alike."""
    return isinstance(tensor, DTensor) and not tensor.placements[0].is_replicate()


@torch.no_grad()
def own_part(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` that this process has; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor) -> Tensor:
    """Returns all values of `tensor` as a plain tensor; a collective call of the replicas.

    A plain tensor is returned unchanged.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole_gradient(gradient: Tensor) -> Tensor:
    """Returns a gradient as the unsharded model has it on this replica, a plain tensor.

    A collective call of the replicas, except for a gradient that was not averaged yet.
    """
    if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
        return gradient.to_local()
    return gathered(gradient)


@torch.no_grad()
def own_parameters(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Returns parameters with the parts that this process has, and of the gradients.

    Nothing is copied.

    Raises:
        UserError: a gradient was not averaged over the replicas yet.
    """
    own = []
    for parameter in parameters:
        part = Parameter(own_part(parameter), requires_grad=parameter.requires_grad)
        if parameter.grad is not None:
            parameter.grad = _cut_alike(parameter.grad, parameter)
            part.grad = own_part(parameter.grad)
        own.append(part)
    return own


def _cut_alike(gradient: Tensor, parameter: Tensor) -> Tensor:
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if gradient.placements[0].is_partial():
        raise UserError(
            "these gradients are not averaged over the replicas yet: the last train_step before "
            "clipping or unscaling must have sync=True"
        )
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)  # each takes its part of all


def part_of(whole: Tensor, own: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns `own` as this process's part of a tensor that is like `whole`; no copy."""
    return _distributed(whole, own, mesh, Shard(0))


def copy_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns `whole`, which all replicas have alike, as a distributed tensor; no copy."""
    return _distributed(whole, whole.detach(), mesh, Replicate())


def not_averaged(gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns `gradient`, which each replica has another one of, as a distributed tensor."""
    return _distributed(gradient, gradient, mesh, Partial())


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


def _distributed(
    like: Tensor, own: Tensor, mesh: DeviceMesh, placement: Shard | Replicate | Partial
) -> Tensor:
    return DTensor.from_local(
        own, mesh, [placement], run_check=False, shape=like.shape, stride=like.stride()
    )
