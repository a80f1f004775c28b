"""The storages and components of tensors, and the bytes of tensors, modules and optimizers.

A sparse, nested or wrapped tensor has several components, and two tensors may share a storage. For
a device that does not report its memory in use, the tensors of a stage are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain._base.torch_private import allowing_torch_func, saved_hooks


@dataclass
class Saved:
    """The storages that autograd keeps for the backward.

    Attributes:
        storages: the bytes of each storage, by `storage_id`.
    """

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of all storages."""
        return sum(self.storages.values())

    def note(self, storage: int, nbytes: int) -> None:
        """Notes that a storage is saved, once more if several operations save it."""
        self.storages[storage] = nbytes


@contextmanager
def count_saved(
    module: nn.Module, inputs: Sequence[Tensor] = (), saved: Saved | None = None
) -> Iterator[Saved]:
    """Counts the tensors that forwards in the block save for backward.

    Parameters, buffers and `inputs` are not counted, nor are tensors saved inside `torch.func.grad`
    and similar functions. The caller's saved-tensor hooks still run.

    Args:
        module: the module; its parameters and buffers are not counted.
        inputs: further tensors to exclude, which the caller counts.
        saved: where to count; None: in a new one.
    """
    saved = Saved() if saved is None else saved
    left_out = [*module.parameters(), *module.buffers(), *inputs]
    left_out_ids = {number for tensor in left_out for number in storages(tensor)}

    pack_next, unpack = saved_hooks() or (_unchanged, _unchanged)

    def pack(tensor: Tensor) -> Any:
        for number, nbytes in storages(tensor).items():
            if number not in left_out_ids:
                saved.note(number, nbytes)
        return pack_next(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with hooks, allowing_torch_func():
        yield saved


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def storages(tensor: Tensor) -> dict[int, int]:
    """Returns the bytes of each storage of `tensor`, by an id of the storage.

    A sparse tensor has several storages, and the wrappers of torch.func have no accessible one.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        parts = components(tensor)
        return {number: nbytes for part in parts for number, nbytes in storages(part).items()}
    # The C++ storage: Python makes a new object for it at each call.
    return {int(storage._cdata): storage.nbytes()}


def storage_id(tensor: Tensor) -> int:
    """Returns an id that tensors with the same storage share, also for fake tensors.

    For a tensor without a storage it is the id of its first component, or its `id`.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return next(iter(storages(tensor)), id(tensor))


def components(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that a sparse tensor consists of; none for other layouts."""
    names = _COMPONENTS.get(tensor.layout, ())
    if not names:
        return []
    with torch.no_grad():
        return [getattr(tensor.detach(), name)() for name in names]


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def byte_size(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values; for a sparse tensor, the bytes of its parts."""
    if tensor.layout is not torch.strided and (parts := components(tensor)):
        return sum(part.nbytes for part in parts)
    return tensor.nbytes


def bytes_of_module(module: nn.Module) -> int:
    """Returns the number of bytes of the parameters and buffers of a module."""
    return sum(map(byte_size, (*module.parameters(), *module.buffers())))


def have_same_values(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors are equal, where NaN equals NaN; meta tensors are equal."""
    if first.is_meta or second.is_meta:  # held by another process
        return first.is_meta and second.is_meta
    if first.layout != second.layout or first.is_nested != second.is_nested:
        return False
    if first.is_nested:
        parts_of_first, parts_of_second = first.unbind(), second.unbind()
        return len(parts_of_first) == len(parts_of_second) and all(
            map(have_same_values, parts_of_first, parts_of_second)
        )
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if parts := components(first):
        return all(map(have_same_values, parts, components(second)))
    if first.layout != torch.strided:  # mkldnn tensors
        first, second = first.to_dense(), second.to_dense()
    if torch.equal(first, second):
        return True
    if first.is_quantized:
        return False
    return bool(((first == second) | (first != first) & (second != second)).all())


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Copies `values` into a tensor of their shape in place, without a new version of the tensor.

    The entries of an expanded tensor share memory, which PyTorch refuses to write twice.
    """
    # Shares the memory but not the version counter: autograd must not take this for a change.
    target = tensor.data
    if target.layout == torch.strided and not target.is_nested:
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                # One entry stands for all of the dimension.
                target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def resident_bytes(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Returns the bytes of the parameters, gradients and buffers of `module`.

    With an `optimizer`, also counts its state for these parameters.
    """
    # one walk over the modules, because the walk takes longer than the sums
    modules = list(module.modules())
    parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    buffers = {id(b): b for m in modules for b in m._buffers.values() if b is not None}
    total = sum(map(byte_size, buffers.values()))
    for parameter in parameters.values():
        total += byte_size(parameter) * (1 + parameter.requires_grad)
        for value in optimizer.state.get(parameter, {}).values() if optimizer is not None else ():
            if isinstance(value, Tensor):
                total += byte_size(value)
    return total


def is_quantized_parameter(tensor: Tensor) -> bool:
    """Returns whether a parameter is of a class of its own, such as bitsandbytes' quantized ones.

    Its attributes, such as the scales, are a part of its value, and only its class can copy them.
    """
    return type(tensor) is not nn.Parameter and nn.Parameter in type(tensor).__mro__


def packed_weight(layer: nn.Module) -> tuple[str, Tensor] | None:
    """Returns the name and the tensor of a weight that a layer holds as packed integers.

    Layers of GPTQ, AWQ and HQQ have such weights. Their kernels keep further tensors and pointers
    outside of parameters and buffers. None: `layer` itself has no such weight, or says by
    `is_all_in_parameters` that it runs on any device and may be moved.
    """
    if getattr(layer, "is_all_in_parameters", False):
        return None
    buffers = layer._buffers
    packed = dict(buffers.items()).get("qweight")  # TorchScript's wrapper has no `get`
    for name, tensor in (*layer._parameters.items(), ("qweight", packed)):
        if tensor is None or is_quantized_parameter(tensor):
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return name, tensor
    return None


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor has been changed in place; 0 if that is not counted."""
    return 0 if tensor.is_inference() else tensor._version
