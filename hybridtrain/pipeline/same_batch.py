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

_LOOKED_AT = 64  # numbers of each tensor


class BatchCheck:
    """Compares the batches of the processes of a pipeline, which all call it together.

    Shapes and some numbers of each tensor are compared, while the step runs. Of tensors on a GPU
    only the shapes are, since the host would wait for them.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: Tensor | None = None
        self._work: Any = None
        self._is_first = True

    def begin(self, inputs: Any, targets: Any) -> None:
        """Begins to compare a batch; waits for the result of the first, before it is run.

        Raises:
            BatchError: as of `finish`.
        """
        if self._world.pipeline_group is None:
            return
        digest = _digest((inputs, targets))
        self._found = torch.tensor([digest, -digest])
        group = self._world.pipeline_group
        self._work = dist.all_reduce(self._found, dist.ReduceOp.MAX, group=group, async_op=True)
        if self._is_first:
            self.finish()
            self._is_first = False

    def finish(self) -> None:
        """Waits for the result of `begin`.

        Raises:
            BatchError: the processes were given different batches.
        """
        if self._found is None:
            return
        self._work.wait()
        largest, smallest = self._found.tolist()
        self._found = None
        if largest != -smallest:
            world = self._world
            places = range(world.processes_per_replica)
            ranks = [str(world.rank_of(world.replica, place)) for place in places]
            raise BatchError(
                f"ranks {', '.join(ranks)} are one pipeline, and were given different batches: "
                f"with engine=distributed samples are divided over the replicas (world.replica of "
                f"world.replicas; in smp, dp_rank() of dp_size()), not over the processes, and "
                f"each process needs the same order"
            )


def _digest(batch: Any) -> int:
    """Returns a number of 62 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            digest.update(type(leaf).__name__.encode())
            continue
        digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
        if leaf.device.type == "cpu" and leaf.numel() and leaf.layout == torch.strided:
            plain = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // _LOOKED_AT)]
            plain = plain.resolve_conj().resolve_neg().contiguous()
            digest.update(plain.view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 2
