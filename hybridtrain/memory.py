"""The memory of a stage, counted where the device itself cannot tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybridtrain._torch_private import allowing_torch_func


@dataclass
class Saved:
    """The storages that autograd keeps for the backward.

    Attributes:
        storages: the bytes of each storage that it keeps, by `storage_id`.
    """

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.storages.values())


@contextmanager
def count_saved(module: nn.Module, given: Sequence[Tensor] = ()) -> Iterator[Saved]:
    """Counts what the forwards inside keep for their backward.

    Parameters and buffers are left out, and so are the tensors `given`, which the caller counts.
    What is kept inside `torch.func.grad` and its kin is not counted.
    """
    saved = Saved()
    apart = {storage_id(t) for t in [*module.parameters(), *module.buffers(), *given]}

    def pack(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in apart:
            saved.storages[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, allowing_torch_func():
        yield saved


def storage_id(tensor: Tensor) -> int:
    """Returns a number that tensors with the same storage share; fake tensors have one too."""
    return int(tensor.untyped_storage()._cdata)


def resident_bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters of `module`, their gradients and the buffers."""
    total = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    return total + sum(p.nbytes for p in module.parameters() if p.requires_grad)


def optimizer_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of what `optimizer` keeps for the parameters of `module`."""
    return sum(
        value.nbytes
        for parameter in module.parameters()
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    )
