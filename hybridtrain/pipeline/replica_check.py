"""Checks that the replicas still have the same weights.

They begin equal, and averaged gradients keep them equal, to the last bit. A replica that leaves out
an optimizer step, or changes a weight by itself, would go on unnoticed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtrain.errors import UserError
from hybridtrain.sharded_tensors import is_cut, own_part
from hybridtrain.world import World

# Whole numbers of as many bytes.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(net: nn.Module, world: World) -> None:
    """Compares a checksum of each parameter over the replicas; all processes call it together.

    Reads the weights once, and waits for the devices.

    Raises:
        UserError: a parameter differs; names the first one, and the ranks.
    """
    if world.replicas == 1:
        return
    # of one that is cut each replica has its own part, which nobody else can differ from
    named = {n: p for n, p in net.named_parameters() if not (p.is_meta or is_cut(p))}
    mine = {name: int(checksum(own_part(parameter))) for name, parameter in named.items()}
    everyones = world.gather((world.replica, mine))
    first: dict[str, int] = {}
    for replica, sums in everyones:
        if replica == 0:
            first |= sums
    for name, expected in first.items():
        ranks = [
            rank for rank, (_, sums) in enumerate(everyones) if sums.get(name, expected) != expected
        ]
        if ranks:
            raise UserError(
                f"the replicas are apart: {name} of rank{'s' * (len(ranks) > 1)} "
                f"{', '.join(map(str, ranks))} differs from replica 0's. Each rank must take the "
                f"same optimizer steps, and change no weight by itself"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of each number in `tensor`, a 0-dim int64 tensor, which wraps."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
