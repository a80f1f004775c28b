"""Checks that the processes of a pipeline are given the same batch.

The first stage takes the inputs and the last one the targets. Batches that differ, as those of a
sampler that divides the samples over all processes, would train on wrong pairs without a word.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridtrain.errors import BatchError
from hybridtrain.world import World


def check_same_batch(inputs: Any, targets: Any, world: World) -> None:
    """Compares a digest of the batch over the processes of a pipeline, which all call it together.

    Raises:
        BatchError: they were given different batches.
    """
    if world.pipeline_group is None:
        return
    digests: list[Any] = [None] * world.processes_per_replica
    dist.all_gather_object(digests, _digest((inputs, targets)), group=world.pipeline_group)
    if len(set(digests)) > 1:
        ranks = [world.rank_of(world.replica, place) for place in range(len(digests))]
        raise BatchError(
            f"ranks {', '.join(map(str, ranks))} are one pipeline, and were given different "
            f"batches: with engine=distributed samples are divided over the replicas "
            f"(world.replica of world.replicas), not over the processes"
        )


def _digest(batch: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
