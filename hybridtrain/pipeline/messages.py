"""Messages between processes: a pytree as flat tensors, and the format that both sides know.

A format says everything but the numbers: the structure, other values than tensors, and of each
tensor the shape, the strides, the dtype, `requires_grad` and whether it is in CPU memory, where it
stays at a receiver with a GPU too. It travels once, ahead of the first message that has it. From
then on both sides know it, and the receiver can post its receive before the sender sends.

    message -> pack -> format, flat tensors  ...  flat tensors, format -> unpack -> message
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)

from hybridtrain._base.values import leaves_of, register
from hybridtrain.errors import SplitError, setting

_CPU = torch.device("cpu")


class TensorFormat(NamedTuple):
    """The layout of a tensor; strides are those of dense memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_cpu: bool


class MessageFormat(NamedTuple):
    """All of a message but the numbers in its tensors.

    Attributes:
        structure: of the pytree.
        leaves: its leaves, with a `_Place` for each tensor.
        tensors: the formats of the tensors that travel.
        dataclasses: types in the structure that pytree functions must know.
    """

    structure: TreeSpec
    leaves: list[Any]
    tensors: list[TensorFormat]
    dataclasses: list[type]


class _Place(NamedTuple):
    """Stands for a tensor among the leaves: its number among those that travel."""

    number: int


def pack(
    message: Any, unique: bool, known: MessageFormat | None = None
) -> tuple[MessageFormat, list[Tensor]]:
    """Returns the format of `message`, and its tensors.

    Args:
        message: any pytree.
        unique: a tensor that occurs twice travels once, and is one tensor at the receiver. Not so
            for gradients: whether autograd gives two inputs the same tensor changes from step to
            step, and means nothing.
        known: the format that is expected, which is returned itself if `message` has it.

    Raises:
        SplitError: a tensor is sparse, nested or a wrapper of others.
    """
    if known is None:
        leaves_of(message)  # registers dataclasses
    leaves, structure = tree_flatten(message)
    tensors: list[Tensor] = []
    number_of: dict[int, int] = {}
    kept: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            kept.append(leaf)
            continue
        if not unique or id(leaf) not in number_of:
            number_of[id(leaf)] = len(tensors)
            tensors.append(leaf)
        kept.append(_Place(number_of[id(leaf)]))
    if (
        known is not None
        and len(tensors) == len(known.tensors)
        and all(map(_has_format, tensors, known.tensors))
        and _same(kept, known.leaves)
        and structure == known.structure
    ):
        return known, tensors
    for tensor in tensors:
        if not _is_dense(tensor):
            kind = type(tensor).__name__ if tensor.layout == torch.strided else tensor.layout
            raise SplitError(
                f"a tensor of {kind} and shape {tuple(tensor.shape)} would go to another process, "
                f"and only dense tensors can: hand on its parts, or its to_dense(), cut elsewhere, "
                f"or set {setting('engine', 'local')}"
            )
    formats = [
        TensorFormat(tuple(t.shape), _dense(t), t.dtype, t.requires_grad, t.device == _CPU)
        for t in tensors
    ]
    return MessageFormat(structure, kept, formats, _dataclasses(structure)), tensors


def unpack(form: MessageFormat, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Returns the message of this format with these tensors, on `device` or in CPU memory."""
    tensors = [
        t if one.on_cpu else t.to(device) for t, one in zip(tensors, form.tensors, strict=True)
    ]
    for tensor, tensor_format in zip(tensors, form.tensors, strict=True):
        if tensor_format.requires_grad:
            tensor.requires_grad_()
    leaves = [tensors[leaf.number] if type(leaf) is _Place else leaf for leaf in form.leaves]
    return tree_unflatten(leaves, form.structure)


def flat(tensor: Tensor, form: TensorFormat) -> Tensor:
    """Returns the numbers of `tensor` as they lie in dense memory, in one dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.stride() != form.stride:
        dense = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def wire_device(form: TensorFormat, device: torch.device) -> torch.device:
    """Returns where a tensor of this format travels, if those of other devices do on `device`."""
    return _CPU if form.on_cpu else device


def empty(form: TensorFormat, device: torch.device) -> Tensor:
    """Returns a tensor of this format for a receive into, on its `wire_device`."""
    at = wire_device(form, device)
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=at)


def to_bytes(form: MessageFormat) -> Tensor:
    """Returns a format as bytes, a 1-dim uint8 tensor on the CPU.

    Raises:
        SplitError: a value in the message cannot be pickled.
    """
    try:
        data = pickle.dumps(form)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise SplitError(
            f"a value that would go to another process cannot be pickled ({error}): define its "
            f"class at the top of a module, cut elsewhere, or set {setting('engine', 'local')}"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def from_bytes(data: Tensor) -> MessageFormat:
    """Returns the format of the result of `to_bytes`, which a process of this run has sent."""
    form: MessageFormat = pickle.loads(data.numpy().tobytes())
    for kind in form.dataclasses:
        register(kind)
    return form


def _same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns whether values are equal and of the same types; True is not 1, and NaN is NaN."""
    return len(leaves) == len(others) and all(map(_is_same, leaves, others))


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return one == other if type(one) is _Place else pickle.dumps(one) == pickle.dumps(other)


def _dense(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides that `empty_like` gives: of dense layouts such as channels_last.

    Those of a dimension of size 1 mean nothing, and are always the same here.
    """
    if not tensor.is_contiguous():
        return torch.empty_like(tensor, device="meta").stride()
    strides, elements = [], 1
    for size in reversed(tensor.shape):
        strides.append(elements)
        elements *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not hasattr(tensor, "__tensor_flatten__")
    )


def _has_format(tensor: Tensor, form: TensorFormat) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.shape == form.shape
        and tensor.dtype is form.dtype
        and tensor.requires_grad is form.requires_grad
        and (tensor.device == _CPU) is form.on_cpu
        and _dense(tensor) == form.stride
    )


def _dataclasses(structure: TreeSpec) -> list[type]:
    kinds = [kind for child in structure.children() for kind in _dataclasses(child)]
    if isinstance(structure.type, type) and is_dataclass(structure.type):
        kinds.append(structure.type)
    return kinds
