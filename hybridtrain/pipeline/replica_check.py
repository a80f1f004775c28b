"""Checks that the replicas still have the same weights, and train the same of them.

They begin equal, and averaged gradients keep them equal, to the last bit. A replica that leaves out
an optimizer step, or changes a weight by itself, would go on unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, UserError
from hybridtrain.world import World

# A process whose parameters have not changed is in the step already, and never comes.
_AGREEMENT_S = 30.0

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
    mine = {name: int(checksum(p)) for name, p in net.named_parameters() if not p.is_meta}
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


def check_frozen_alike(names: Sequence[str], world: World) -> None:
    """Makes sure that all processes have frozen or freed the same parameters before this step.

    Raises:
        ConfigError: they have not.
    """
    if world.size == 1:
        return
    text = f"requires_grad of {', '.join(names)} has changed"
    if not world.all_arrive(min(_AGREEMENT_S, world.timeout_s / 2)):
        raise ConfigError(
            f"{text} on rank {world.rank}, but not on all ranks: change it on all of them before "
            f"the same step"
        )
    texts = world.gather(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ConfigError(
                f"on rank 0 {texts[0]}, on rank {rank} {other}: freeze the same on all of them"
            )


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of each number in `tensor`, a 0-dim int64 tensor, which wraps."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return values.contiguous().view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
