"""The components of tensors, and the bytes that tensors, modules and optimizers take.

A sparse, nested or wrapped tensor has several components; two tensors may share one storage. Where
a device cannot tell how much memory is in use, the tensors of a stage are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybridtrain._base.torch_private import allowing_torch_func


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
    others = [*module.parameters(), *module.buffers(), *given]
    apart = {number for tensor in others for number in storages(tensor)}

    def pack(tensor: Tensor) -> Tensor:
        for number, nbytes in storages(tensor).items():
            if number not in apart:
                saved.storages[number] = nbytes
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, allowing_torch_func():
        yield saved


def storages(tensor: Tensor) -> dict[int, int]:
    """Returns the bytes of each storage that holds values of `tensor`, by a number of the storage.

    A sparse tensor has several, and the wrappers of torch.func have none that can be asked for.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        parts = components(tensor)
        return {number: nbytes for part in parts for number, nbytes in storages(part).items()}
    return {int(storage._cdata): storage.nbytes()}


def storage_id(tensor: Tensor) -> int:
    """Returns a number that tensors with the same storage share; fake tensors have one too.

    For a tensor that has no storage it is the number of its first component's, or its own `id`.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return next(iter(storages(tensor)), id(tensor))


def components(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that a sparse tensor consists of; none for a tensor of another layout."""
    names = _COMPONENTS[tensor.layout]
    with torch.no_grad():
        return [getattr(tensor.detach(), name)() for name in names]


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_COMPONENTS = defaultdict(
    tuple,
    {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: _COMPRESSED_ROWS,
        torch.sparse_bsr: _COMPRESSED_ROWS,
        torch.sparse_csc: _COMPRESSED_COLUMNS,
        torch.sparse_bsc: _COMPRESSED_COLUMNS,
    },
)


def byte_size(tensor: Tensor) -> int:
    """Returns the bytes of the values of a tensor of any kind; of a sparse one, of its parts."""
    if parts := components(tensor):
        return sum(part.nbytes for part in parts)
    return tensor.nbytes


def have_same_layout(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of one shape have their values in the same order in memory."""
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    return one.layout != torch.strided or one.is_nested or one.stride() == other.stride()


def have_same_values(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors of any kind are equal; NaN is NaN. Meta tensors are."""
    if one.is_meta or other.is_meta:  # another process has it
        return one.is_meta and other.is_meta
    if one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if one.is_nested:
        mine, theirs = one.unbind(), other.unbind()
        return len(mine) == len(theirs) and all(map(have_same_values, mine, theirs))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if parts := components(one):
        return all(map(have_same_values, parts, components(other)))
    if one.layout != torch.strided:  # of mkldnn
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(one, other):
        return True
    if one.is_quantized:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


def resident_bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters of `module`, their gradients and the buffers."""
    total = sum(map(byte_size, [*module.parameters(), *module.buffers()]))
    return total + sum(byte_size(p) for p in module.parameters() if p.requires_grad)


def optimizer_bytes(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of what `optimizer` keeps for the parameters of `module`."""
    return sum(
        byte_size(value)
        for parameter in module.parameters()
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    )
