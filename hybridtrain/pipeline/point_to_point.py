"""Sends and receives of tensors between two processes of a pipeline.

Tensors on GPUs are sent through NCCL in batches. A batch uses the communicator of the pipeline's
group, which exists from the start of a run. For a single send or receive, NCCL would create another
communicator for the two processes in the middle of the first step. Tensors in CPU memory are sent
through gloo, one by one. They call the group directly: the checks and lookups of `dist.isend` take
up to half as long as the send itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain.world import World


def begin_send(tensors: Sequence[Tensor], world: World, peer: int, tag: int = 0) -> list[dist.Work]:
    """Starts sending `tensors`; their memory must stay unchanged until the works are done.

    Args:
        tensors: on the world's `wire_device` or in CPU memory; empty tensors are skipped.
        world: the processes.
        peer: the receiver's index in the pipeline.
        tag: messages with different tags are matched independently; for tensors in CPU memory only.
    """
    batch, single = _divided(tensors)
    group = _group(world)
    return _batch(dist.isend, batch, group, peer) + [group.send([t], peer, tag) for t in single]


def begin_receive(
    tensors: Sequence[Tensor], world: World, peer: int, tag: int = 0
) -> list[dist.Work]:
    """Starts receiving into `tensors`; see `begin_send`."""
    batch, single = _divided(tensors)
    group = _group(world)
    return _batch(dist.irecv, batch, group, peer) + [group.recv([t], peer, tag) for t in single]


def wait(works: Sequence[dist.Work]) -> None:
    """Waits until all sends or receives are done; with NCCL, only the current stream waits."""
    for work in works:
        work.wait()


def _group(world: World) -> dist.ProcessGroup:
    assert world.pipeline_group is not None
    return world.pipeline_group


def _divided(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors on GPUs and the tensors in CPU memory, without empty tensors."""
    batch: list[Tensor] = []
    single: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            (single if accelerator_of(tensor.device) is None else batch).append(tensor)
    return batch, single


def _batch(
    operation: Any, tensors: Sequence[Tensor], group: dist.ProcessGroup, peer: int
) -> list[Any]:
    if not tensors:
        return []
    return dist.batch_isend_irecv(
        [dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor in tensors]
    )
