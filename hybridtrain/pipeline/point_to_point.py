"""Sends and receives of tensors between two processes of a pipeline.

Tensors on GPUs are sent through NCCL, which runs the operations of a communicator one after
another: a send waits for its receive, and everything behind it waits too. So each direction of an
edge has its own communicator (`World.edge_groups`), and a late process delays only its own
messages. Processes that are not neighbors, such as some with tied parameters, use the
pipeline's group. Any division over communicators is safe, because all processes issue their
messages in one order. All of them exist from the start of a run, and messages are batches: for a
single send or receive, NCCL could create another communicator in the middle of the first step.

    process 0          process 1          process 2
        | ---- (0, 1) ---> | ---- (1, 2) ---> |        forwards
        | <--- (1, 0) ---- | <--- (2, 1) ---- |        backwards

Gloo, which has separate queues for each pair and direction anyway, sends tensors in CPU memory
through the pipeline's group. Each large tensor is a message; the small tensors of a call are one
message together, because a message takes longer than copying them. These messages call the group
directly: the checks and lookups of `dist.isend` take up to half as long as the send itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtrain._base.accelerator import accelerator_of
from hybridtrain._base.tensors import byte_size
from hybridtrain.world import World

SMALL_BYTES = 1 << 16
"""The largest tensor in CPU memory that is sent together with others."""


class Pending(Protocol):
    """A send or receive that has started."""

    def wait(self) -> object:
        """Waits until it is done; with NCCL, only the current stream waits."""


def begin_send(tensors: Sequence[Tensor], world: World, peer: int, tag: int = 0) -> list[Pending]:
    """Starts sending `tensors`; their memory must stay unchanged until the works are done.

    Args:
        tensors: on the world's `wire_device` or in CPU memory; empty tensors are skipped. The
            receiver passes tensors of the same sizes to one `begin_receive`. Those in CPU memory
            are contiguous.
        world: the processes.
        peer: the receiver's index in the pipeline.
        tag: messages with different tags are matched independently; for tensors in CPU memory only.
    """
    on_gpu, large, small = _divided(tensors)
    group = _group(world)
    pending = _batch(dist.isend, on_gpu, world, peer)
    # Gloo matches the messages of a pair and tag in order of their start, so both ends divide their
    # tensors alike: by device and size, which both know.
    pending += [group.send([tensor], peer, tag) for tensor in large]
    if small:
        joined = torch.cat(list(map(_bytes_of, small)))
        pending.append(_Joined(group.send([joined], peer, tag), joined))
    return pending


def begin_receive(
    tensors: Sequence[Tensor], world: World, peer: int, tag: int = 0
) -> list[Pending]:
    """Starts receiving into `tensors`; see `begin_send`."""
    on_gpu, large, small = _divided(tensors)
    group = _group(world)
    pending = _batch(dist.irecv, on_gpu, world, peer)
    pending += [group.recv([tensor], peer, tag) for tensor in large]
    if small:
        joined = torch.empty(sum(map(byte_size, small)), dtype=torch.uint8)
        pending.append(_Joined(group.recv([joined], peer, tag), joined, small))
    return pending


def wait(pending: Sequence[Pending]) -> None:
    """Waits until all sends or receives are done; with NCCL, only the current stream waits."""
    for operation in pending:
        operation.wait()


class _Joined(NamedTuple):
    """A send or receive of small tensors, joined.

    Attributes:
        work: the send or receive.
        memory: of the joined tensors; it must live until the work is done.
        tensors: the tensors to receive into.
    """

    work: dist.Work
    memory: Tensor
    tensors: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Waits until it is done."""
        self.work.wait()
        start = 0
        for tensor in self.tensors:
            end = start + byte_size(tensor)
            _bytes_of(tensor).copy_(self.memory[start:end])
            start = end


def _bytes_of(tensor: Tensor) -> Tensor:
    # not `view(-1)`: a contiguous tensor of one number may have any stride
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _group(world: World) -> dist.ProcessGroup:
    assert world.pipeline_group is not None
    return world.pipeline_group


def _divided(
    tensors: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Returns the tensors on GPUs, those in CPU memory to send one by one, and those to join.

    Skips empty tensors.
    """
    on_gpu: list[Tensor] = []
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        if accelerator_of(tensor.device) is not None:
            on_gpu.append(tensor)
        else:
            (small if byte_size(tensor) <= SMALL_BYTES else large).append(tensor)
    # A single small tensor needs no copy to be one message.
    return (on_gpu, large, small) if len(small) > 1 else (on_gpu, large + small, [])


def _batch(operation: Any, tensors: Sequence[Tensor], world: World, peer: int) -> list[Any]:
    if not tensors:
        return []
    here = world.pipeline_rank
    group = world.edge_groups.get((here, peer) if operation is dist.isend else (peer, here))
    if group is None:
        group = _group(world)
    else:
        peer = int(peer > here)  # the index in a group of two
    return dist.batch_isend_irecv(
        [dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor in tensors]
    )
