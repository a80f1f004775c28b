"""The norm of the gradients of stages on several devices or in processes, and their fp16 scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from hybridtrain._torch_private import scaler_found_inf
from hybridtrain.accelerator import put
from hybridtrain.world import World


def norm_over_devices(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all `gradients`, with one copy for each device.

    The norms of the gradients are put together in the order of the parameters, so that the last
    operation is the same as on one device. PyTorch's `get_total_norm` copies each by itself.
    """
    places: dict[torch.device, list[int]] = {}
    for place, gradient in enumerate(gradients):
        places.setdefault(gradient.device, []).append(place)
    norms: list[Tensor] = [gradients[0]] * len(gradients)
    for own in places.values():
        found = torch.stack(torch._foreach_norm([gradients[place] for place in own]))
        for place, norm in zip(own, put(found, gradients[0].device).unbind(), strict=True):
            norms[place] = norm
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def norm_over_processes(
    parameters: Sequence[Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
    wire_device: torch.device,
) -> Tensor:
    """Returns the L2 norm of all gradients, as one process with the whole model would compute it.

    The norm of each gradient travels, not a sum of squares, so that the last operation is the same
    one on the same numbers, and the result is bitwise equal. A collective call of the pipeline.

    Args:
        parameters: of the whole model; those of other processes are meta tensors.
        group: the processes of the pipeline.
        device: of the result, a 0-dim tensor.
        wire_device: where tensors are for a collective.
    """
    own = [i for i, p in enumerate(parameters) if p.grad is not None]
    dtype = reduce(torch.promote_types, [p.dtype for p in parameters], parameters[0].dtype)
    # each place is written by one process, and added to zeros; put together from 0-dim tensors, as
    # an index of places would be copied to the GPU, and the host would wait for it
    zero = torch.zeros((), dtype=dtype, device=wire_device)
    places, there = [zero] * len(parameters), torch.zeros(len(parameters))
    if own:
        found = torch._foreach_norm([p.grad for p in parameters if p.grad is not None])
        moved = torch.stack(found).to(dtype).to(wire_device)
        for place, norm in zip(own, moved.unbind(), strict=True):
            places[place] = norm
        there[own] = 1
    norms = torch.stack(places)
    dist.all_reduce(norms, group=group)
    dist.all_reduce(there, group=group)  # on the CPU, so that the host waits for no GPU
    flags = there.tolist()
    chosen = [norm for norm, one in zip(norms.unbind(), flags, strict=True) if one] or [zero]
    return put(torch.linalg.vector_norm(torch.stack(chosen)), device)


def unscale_(scaler: GradScaler, optimizer: Optimizer, world: World) -> None:
    """Unscales the gradients; an overflow in any stage is one in all of them.

    A plain GradScaler would leave out the step of that process alone, and the scales would go
    apart. A collective call of the pipeline.
    """
    if not scaler.is_enabled() or world.pipeline_group is None:
        scaler.unscale_(optimizer)
        return
    scaler.scale(torch.zeros((), device=world.devices[0]))  # made where no loss was scaled
    scaler.unscale_(optimizer)
    found = scaler_found_inf(scaler, optimizer)
    if not found:  # no parameter here had a gradient
        found[world.devices[0]] = torch.zeros((), device=world.devices[0])
    for device, value in found.items():
        agreed = value.to(world.wire_device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=world.pipeline_group)
        found[device] = agreed.to(device)
