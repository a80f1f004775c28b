"""Gradient scaling for fp16 where stages or parts of the gradients are in several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from hybridtrain._torch_private import move_scaler_state, scaler_found_inf
from hybridtrain.sharded_tensors import own_parameters
from hybridtrain.world import World


def unscale_(
    scaler: GradScaler, optimizer: Optimizer, world: World, shards_weights: bool = False
) -> None:
    """Unscales the gradients; an overflow in any stage or part is one in all of them.

    A plain GradScaler would leave out the step of that process alone, and the scales would go
    apart. A collective call of the pipeline, and with sharded weights of all processes.
    """
    if not scaler.is_enabled() or (world.pipeline_group is None and not shards_weights):
        scaler.unscale_(optimizer)
        return
    scaler.scale(torch.zeros((), device=world.devices[0]))  # made where no loss was scaled
    if shards_weights:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parts = SGD(own_parameters(held))  # the scaler asks an optimizer for gradients
        scaler.unscale_(parts)
        move_scaler_state(scaler, parts, optimizer)
    else:
        scaler.unscale_(optimizer)
    found = scaler_found_inf(scaler, optimizer)
    if not found:  # no parameter here had a gradient
        found[world.devices[0]] = torch.zeros((), device=world.devices[0])
    for device, value in found.items():
        agreed = value.to(world.wire_device)
        group = None if shards_weights else world.pipeline_group
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
        found[device] = agreed.to(device)
