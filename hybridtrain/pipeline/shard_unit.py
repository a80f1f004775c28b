"""The parameters of one layer, of which each replica keeps a part.

A unit is what is gathered, and what is reduced, in one collective. Each parameter is cut along its
first dimension into as many chunks as there are replicas, as FSDP2 and `torch.chunk` do, and the
chunks of one replica lie one after the other:

    replica 0   | weight[0:2] | bias[0:2]    |
    replica 1   | weight[2:4] | bias[2:3], - |     "-": padding

Outside a step a replica has its chunks only. In a step the layer computes with the parameters that
the user has made, whose memory is there then alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import Parameter

from hybridtrain.errors import UserError
from hybridtrain.sharded_tensors import own_part, part_of

_STAND_IN = "_hybridtrain_stand_in"


@dataclass(frozen=True)
class Shard:
    """A parameter that is cut, and the part of it that this replica has.

    Attributes:
        name: the user's.
        whole: the parameter that the layers compute with, without memory outside a step.
        parameter: stands for it outside a step, a `DTensor`.
        start: where its chunk begins in that of the unit, in elements.
        chunk: the elements of a chunk, with the padding.
        first: where its part begins in the whole parameter.
        own: this replica's part, of the same memory as `parameter`.
    """

    name: str
    whole: Parameter
    parameter: Parameter
    start: int
    chunk: int
    first: int
    own: Tensor

    def chunks_in(self, chunks: Tensor) -> Tensor:
        """Returns the parameter's chunks in those of the unit, of shape (replicas, elements)."""
        return chunks[:, self.start : self.start + self.chunk]

    def is_own_memory(self) -> bool:
        """Returns whether `parameter` still is in the memory of the unit.

        It is not if an optimizer has given it another one, or if an earlier unit has made it.
        """
        return own_part(self.parameter).data_ptr() == self.own.data_ptr()

    def allocate(self, replicas: int) -> None:
        """Gives the whole parameter memory, with space for the padding."""
        elements = replicas * self.chunk
        self.whole.untyped_storage().resize_(elements * self.whole.element_size())

    def memory(self, replicas: int) -> Tensor:
        """Returns the memory of the whole parameter as its chunks, (replicas, elements)."""
        return self.whole.detach().as_strided((replicas, self.chunk), (self.chunk, 1), 0)

    def free(self) -> None:
        """Gives the memory of the whole parameter back."""
        self.whole.untyped_storage().resize_(0)


class ShardUnit:
    """The shards of one layer and one dtype.

    Args:
        named: the parameters by the user's names; contiguous, with at least one dimension.
        group: the replicas of the stage.
        mesh: the same processes.
    """

    def __init__(
        self, named: Sequence[tuple[str, Parameter]], group: dist.ProcessGroup, mesh: DeviceMesh
    ) -> None:
        self._group = group
        self._mesh = mesh
        self._replicas = group.size()
        self._rank = group.rank()
        sizes = [-(-len(p) // self._replicas) * (p.numel() // len(p)) for _, p in named]
        one = named[0][1]
        self._own = torch.zeros(sum(sizes), dtype=one.dtype, device=one.device)
        self.shards: list[Shard] = []
        start = 0
        for (name, parameter), chunk in zip(named, sizes, strict=True):
            each = parameter.numel() // len(parameter)
            first = min(self._rank * (chunk // each), len(parameter))
            length = min(chunk // each, len(parameter) - first)
            own = self._own[start : start + length * each].view(length, *parameter.shape[1:])
            stand_in = stand_in_for(parameter, part_of(parameter, own, mesh))
            self.shards.append(Shard(name, parameter, stand_in, start, chunk, first, own))
            start += chunk
        self._gathering: tuple[Any, Tensor] | None = None
        self._reducing: tuple[Any, Tensor, list[Shard], Tensor | None] | None = None

    # --- weights

    @torch.no_grad()
    def take_own_parts(self) -> None:
        """Copies this replica's part of the whole parameters, whose memory may then go."""
        for shard in self.shards:
            shard.own.copy_(shard.whole[shard.first : shard.first + len(shard.own)])
            if not shard.is_own_memory():
                own_part(shard.parameter).copy_(shard.own)

    @torch.no_grad()
    def put_own_parts(self) -> None:
        """Gives the whole parameters memory with this replica's part alone; the rest is 0."""
        for shard in self.shards:
            shard.allocate(self._replicas)
            chunks = shard.memory(self._replicas)
            chunks.zero_()
            chunks[self._rank, : shard.own.numel()] = shard.own.reshape(-1)

    @torch.no_grad()
    def begin_gather(self) -> None:
        """Begins to bring all chunks to all replicas."""
        for shard in self.shards:
            if not shard.is_own_memory():
                shard.own.copy_(own_part(shard.parameter))
        chunks = self._own.new_empty(self._replicas * self._own.numel())
        work = dist.all_gather_into_tensor(chunks, self._own, self._group, async_op=True)
        self._gathering = work, chunks

    @torch.no_grad()
    def end_gather(self) -> None:
        """Waits for the chunks, and makes the whole parameters of them."""
        assert self._gathering is not None
        (work, chunks), self._gathering = self._gathering, None
        work.wait()
        for shard in self.shards:
            shard.allocate(self._replicas)
            own = shard.chunks_in(chunks.view(self._replicas, -1))
            shard.memory(self._replicas).copy_(own)

    def free(self) -> None:
        """Gives the memory of the whole parameters back."""
        for shard in self.shards:
            shard.free()

    # --- gradients

    @torch.no_grad()
    def begin_reduce(self, trained: Collection[int]) -> None:
        """Begins to average the gradients; each replica gets its part of the mean.

        The whole gradients are given up. As DDP does, they are divided and then added.

        Args:
            trained: the ids of the whole parameters to do this for; another one has no gradient.

        Raises:
            UserError: a gradient is sparse.
        """
        shards = [shard for shard in self.shards if id(shard.whole) in trained]
        if not shards:
            return
        size = sum(shard.chunk for shard in shards)
        chunks = self._own.new_empty(self._replicas, size)
        start = 0
        for shard in shards:
            gradient, shard.whole.grad = shard.whole.grad, None
            own = chunks[:, start : start + shard.chunk]
            start += shard.chunk
            if gradient is None:  # another replica has one
                own.zero_()
                continue
            if gradient.layout != torch.strided:
                raise UserError(
                    f"the gradient of {shard.name} is sparse, which shard=full cannot cut: make "
                    f"the layer with sparse=False, or set shard=optimizer"
                )
            flat = gradient.reshape(-1)
            full, rest = divmod(flat.numel(), shard.chunk)
            own[:full].copy_(flat[: full * shard.chunk].view(full, shard.chunk))
            if full < self._replicas:
                own[full:].zero_()
                own[full, :rest].copy_(flat[full * shard.chunk :])
        chunks.div_(self._replicas)
        mean = self._own.new_empty(size)
        work = dist.reduce_scatter_tensor(mean, chunks.view(-1), group=self._group, async_op=True)
        self._reducing = work, mean, shards, chunks

    def end_reduce(self) -> None:
        """Waits for this replica's parts of the gradients."""
        if self._reducing is not None:
            work, mean, shards, _ = self._reducing
            work.wait()
            self._reducing = work, mean, shards, None  # whole gradients are not needed any more

    @torch.no_grad()
    def put_gradients(self) -> None:
        """Makes what was reduced the gradients of the parameters."""
        if self._reducing is None:
            return
        _, own, shards, _ = self._reducing
        self._reducing = None
        start = 0
        for shard in shards:
            part = own[start : start + shard.own.numel()].view(shard.own.shape)
            shard.parameter.grad = part_of(shard.whole, part, self._mesh)
            start += shard.chunk

    def drop_gradients(self) -> None:
        """Forgets a reduction that has failed."""
        self._reducing = None


def stand_in_for(whole: Parameter, distributed: Tensor) -> Parameter:
    """Returns the parameter that stands for `whole` outside a step; always the same one.

    So an optimizer that has it goes on with it when the stages are made anew.
    """
    known = vars(whole).get(_STAND_IN)
    if known is None or known.dtype != whole.dtype or known.placements != distributed.placements:  # type: ignore[attr-defined]
        known = Parameter(distributed, requires_grad=whole.requires_grad)
        vars(known).update(vars(whole))  # what a user has noted on it
        vars(whole)[_STAND_IN] = known
    known.requires_grad_(whole.requires_grad)
    return known


def units_of(
    layers: Sequence[Sequence[tuple[str, Parameter]]],
    make: Callable[[Sequence[tuple[str, Parameter]]], ShardUnit],
) -> list[ShardUnit]:
    """Returns the units of the parameters of each layer, one for each dtype in it."""
    units = []
    for named in layers:
        by_kind: dict[torch.dtype, list[tuple[str, Parameter]]] = {}
        for name, parameter in named:
            by_kind.setdefault(parameter.dtype, []).append((name, parameter))
        units += [make(group) for group in by_kind.values()]
    return units
