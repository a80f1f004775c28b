"""Gradient scaling for fp16 where stages are in several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hybridtrain._torch_private import scaler_found_inf
from hybridtrain.world import World


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
