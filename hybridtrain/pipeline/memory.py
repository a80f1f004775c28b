"""How much memory a stage needs, counted where the device itself cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class Saved:
    """Bytes that autograd keeps for the backward, each storage counted once."""

    bytes: int = 0


@contextmanager
def count_saved(module: nn.Module) -> Iterator[Saved]:
    """Counts what the forwards inside keep for their backward, parameters and buffers apart."""
    saved = Saved()
    seen = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved.bytes += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


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
