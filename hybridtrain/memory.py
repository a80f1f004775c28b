"""How much memory a stage needs, counted where the device itself cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Saved:
    """What autograd keeps for the backward.

    TraceGuards:
        storages: the bytes of each storage that it keeps, by its address.
    """

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return sum(self.storages.values())


@contextmanager
def count_saved(module: nn.Module, given: Sequence[Tensor] = ()) -> Iterator[Saved]:
    """Counts what the forwards inside keep for their backward.

    Parameters and buffers are left out, and what is `given`, which whoever gives it counts.
    """
    saved = Saved()
    apart = {address(t) for t in [*module.parameters(), *module.buffers(), *given]}

    def pack(tensor: Tensor) -> Tensor:
        if address(tensor) not in apart:
            saved.storages[address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def address(tensor: Tensor) -> int:
    """Where the memory of `tensor` begins."""
    return tensor.untyped_storage().data_ptr()


def resident_bytes(module: nn.Module) -> int:
    """Bytes of the parameters, their gradients and the buffers of `module`."""
    total = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    return total + sum(p.nbytes for p in module.parameters() if p.requires_grad)


def optimizer_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what `optimizer` keeps for the parameters of `module`."""
    return sum(
        value.nbytes
        for parameter in module.parameters()
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    )
