"""Messages between processes: a pytree as dense tensors, and the format that both sides know.

A format describes everything except the numbers: the structure, values other than tensors, and for
each tensor its shape, strides, dtype, `requires_grad`, and whether it is in CPU memory, where it
stays even if the receiver has a GPU. The sender transmits a format once, before the first message
that uses it, in the restricted encoding of `_base/codec`, which cannot execute code. From then on,
the receiver can post a receive before the sender sends.

    message -> pack -> format, tensors -> dense  ...  dense tensors, format -> unpack -> message

Most messages are a list with a tuple or list of tensors for each link. `MessageFormat.parts`
describes these, so that `pack` and `unpack` need not traverse a pytree for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)

from hybridtrain._base import codec
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import SplitError, setting

_CPU = torch.device("cpu")
_MOST_DIMENSIONS = 64  # the limit of PyTorch tensors

MOST_BYTES = 1 << 24
"""The largest format of a message, in bytes."""

MOST_TENSOR_BYTES = 1 << 40
"""The largest tensor of a message, in bytes."""


class TensorFormat(NamedTuple):
    """The layout of a tensor, with the strides of dense memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_cpu: bool


@dataclass(frozen=True)
class MessageFormat:
    """Everything in a message except the numbers in its tensors.

    Attributes:
        structure: the structure of the pytree.
        leaves: its leaves, with a `_Place` for each tensor.
        tensors: the formats of the tensors to send.
    """

    structure: TreeSpec
    leaves: list[Any]
    tensors: list[TensorFormat]

    @cached_property
    def parts(self) -> list[tuple[type[Any], int]] | None:
        """The type and length of each part of a list of tuples and lists of distinct tensors.

        None for any other message.
        """
        if self.structure.type is not list:
            return None
        for number, leaf in enumerate(self.leaves):  # a place may equal another leaf
            if type(leaf) is not _Place or leaf.number != number:
                return None
        parts = self.structure.children()
        if any(part.type not in (tuple, list) for part in parts):
            return None
        if not all(leaf.is_leaf() for part in parts for leaf in part.children()):
            return None
        return [(part.type, part.num_children) for part in parts]

    def tensors_in(self, message: Any) -> list[Tensor] | None:
        """Returns the tensors of a message that has these `parts`; None for any other message.

        The tensors themselves may differ from their formats.
        """
        if self.parts is None or type(message) is not list or len(message) != len(self.parts):
            return None
        tensors: list[Tensor] = []
        for part, (kind, length) in zip(message, self.parts, strict=True):
            if type(part) is not kind or len(part) != length:
                return None
            tensors += part
        return tensors if all(map(_is_plain, tensors)) else None


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is Tensor


class _Place(NamedTuple):
    """Placeholder for a tensor among the leaves: its index in the tensors to send."""

    number: int


def pack(
    message: Any, unique: bool, expected: MessageFormat | None = None
) -> tuple[MessageFormat, list[Tensor]]:
    """Returns the format of `message`, and its tensors.

    Args:
        message: any pytree.
        unique: send a tensor that occurs twice only once, as one tensor at the receiver. False for
            gradients, because autograd may or may not give two inputs the same tensor.
        expected: the format to expect; returned itself if `message` has it.

    Raises:
        SplitError: a tensor is sparse, nested or wraps other tensors.
    """
    if expected is None:
        leaves_of(message)  # registers dataclasses
    elif (
        (plain := expected.tensors_in(message)) is not None
        # The format has distinct tensors, so a message with one of them twice has another format.
        and not (unique and len(set(map(id, plain))) < len(plain))
        and all(map(_has_format, plain, expected.tensors))
    ):
        return expected, plain
    leaves, structure = tree_flatten(message)
    tensors: list[Tensor] = []
    number_of: dict[int, int] = {}
    leaf_values: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            leaf_values.append(leaf)
            continue
        if not unique or id(leaf) not in number_of:
            number_of[id(leaf)] = len(tensors)
            tensors.append(leaf)
        leaf_values.append(_Place(number_of[id(leaf)]))
    if (
        expected is not None
        and len(tensors) == len(expected.tensors)
        and all(map(_has_format, tensors, expected.tensors))
        and _same(leaf_values, expected.leaves)
        and structure == expected.structure
    ):
        return expected, tensors
    for tensor in tensors:
        if not _is_dense(tensor):
            kind = type(tensor).__name__ if tensor.layout == torch.strided else tensor.layout
            raise SplitError(
                f"cannot send a tensor of {kind} and shape {tuple(tensor.shape)} to another "
                f"process, only dense tensors: pass on its parts or its to_dense(), cut elsewhere, "
                f"or set {setting('engine', 'local')}"
            )
    # `requires_grad` travels too: the receiver computes gradients for these values alone, and this
    # process waits for as many.
    formats = [
        # Strides too, because the order in which kernels add depends on them.
        TensorFormat(tuple(t.shape), _dense_strides(t), t.dtype, t.requires_grad, t.device == _CPU)
        for t in tensors
    ]
    return MessageFormat(structure, leaf_values, formats), tensors


def unpack(form: MessageFormat, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """Returns the message of this format with these tensors, on `device` or in CPU memory."""
    tensors = [
        t if expected.on_cpu or t.device == device else t.to(device)
        for t, expected in zip(tensors, form.tensors, strict=True)
    ]
    for tensor, expected in zip(tensors, form.tensors, strict=True):
        if expected.requires_grad:
            tensor.requires_grad_()
    if form.parts is not None:
        rest = iter(tensors)
        # `kind` is tuple or list itself, never a subclass of the sender's choice: see `parts`.
        return [kind(islice(rest, length)) for kind, length in form.parts]
    leaves = [tensors[leaf.number] if type(leaf) is _Place else leaf for leaf in form.leaves]
    return tree_unflatten(leaves, form.structure)


def dense(tensor: Tensor, form: TensorFormat) -> Tensor:
    """Returns the values of `tensor` in dense memory, without autograd.

    A contiguous tensor keeps its shape; any other layout becomes one dimension, in memory order.
    """
    # The send must not become a node of the graph, and `copy_` below must not be recorded.
    tensor = tensor.detach()
    # Conjugate and negative bits are lazy: the memory itself holds other numbers than the tensor.
    if tensor.stride() != form.stride or tensor.is_conj() or tensor.is_neg():
        copy = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=tensor.device)
        tensor = copy.copy_(tensor)
    # gloo sends contiguous tensors only.
    return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def wire_device(form: TensorFormat, device: torch.device) -> torch.device:
    """Returns the device that transmits a tensor of this format: the CPU, or `device`."""
    return _CPU if form.on_cpu else device


def empty(form: TensorFormat, device: torch.device) -> Tensor:
    """Returns an empty tensor of this format to receive into, on its `wire_device`."""
    at = wire_device(form, device)
    # Every element arrives: a format is dense, which `_is_tensor_format` checks.
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=at)


def as_received(message: Any, unique: bool, device: torch.device) -> Any:
    """Returns a message as another process gets it, without sending it.

    Args:
        message: any pytree.
        unique: see `pack`.
        device: the device of the receiver.

    Raises:
        SplitError: the message cannot be sent.
    """
    sent, tensors = pack(message, unique)
    form = from_bytes(to_bytes(sent))
    received = []
    for tensor, tensor_format in zip(tensors, form.tensors, strict=True):
        received.append(empty(tensor_format, device))
        dense(received[-1], tensor_format).copy_(dense(tensor, tensor_format))
    return unpack(form, received, device)


def to_bytes(form: MessageFormat) -> Tensor:
    """Returns a format as bytes, a 1-dim uint8 tensor on the CPU.

    Raises:
        SplitError: a value in the message cannot be sent.
    """
    try:
        data = codec.encode(form)
    except codec.CodecError as error:
        raise SplitError(
            f"cannot send a value to another process ({error}). Processes can send "
            f"tensors, plain values, and dataclasses, named tuples and enums that the modules of "
            f"the model define or import: use one of these, cut elsewhere, or set "
            f"{setting('engine', 'local')}"
        ) from error
    if len(data) > MOST_BYTES:
        raise SplitError(
            f"{len(data)} bytes of non-tensor values exceed the limit for a message to another "
            f"process, {MOST_BYTES}: cut elsewhere, or set {setting('engine', 'local')}"
        )
    # A bytearray, because PyTorch warns about memory that is read-only.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def format_buffer(size: int) -> Tensor:
    """Returns memory for a format of `size` bytes that another process announces.

    Raises:
        CodecError: no format has that size.
    """
    # Before the allocation: the size comes from another process.
    if not 0 < size <= MOST_BYTES:
        raise codec.CodecError(f"another process announces a format of {size} bytes")
    return torch.empty(size, dtype=torch.uint8)


def from_bytes(data: Tensor) -> MessageFormat:
    """Returns the format that another process encoded with `to_bytes`.

    Raises:
        CodecError: the bytes are not a format. Decoding never executes code.
    """
    try:
        form = codec.decode(data.numpy().data)
    except codec.CodecError as error:
        raise codec.CodecError(f"the format of a message between stages: {error}") from error
    if not _is_format(form):
        raise codec.CodecError("the bytes are not the format of a message between stages")
    return form  # type: ignore[no-any-return]


def _is_format(form: Any) -> bool:
    if not isinstance(form, MessageFormat):
        return False
    # `parts` is cached in the same dictionary: a sender could give a value for it that does not
    # belong to the rest.
    if vars(form).keys() != {field.name for field in fields(form)}:
        return False
    structure, leaves, tensors = form.structure, form.leaves, form.tensors
    return (
        isinstance(structure, TreeSpec)
        and isinstance(leaves, list)
        and isinstance(tensors, list)
        # `tree_unflatten` would raise for another number only after the values have arrived.
        and structure.num_leaves == len(leaves)
        and all(map(_is_tensor_format, tensors))
        and all(
            type(leaf.number) is int and 0 <= leaf.number < len(tensors)
            for leaf in leaves
            if isinstance(leaf, _Place)
        )
    )


def _is_tensor_format(form: Any) -> bool:
    """Returns whether `form` is the format of a dense tensor of a possible size."""
    if not isinstance(form, TensorFormat):
        return False
    shape, stride, dtype, *flags = form
    if not (
        isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and all(type(number) is int and number >= 0 for number in (*shape, *stride))
        and len(shape) == len(stride) <= _MOST_DIMENSIONS
        and isinstance(dtype, torch.dtype)
        and all(type(flag) is bool for flag in flags)
        and (not form.requires_grad or dtype.is_floating_point or dtype.is_complex)
    ):
        return False
    elements = math.prod(shape)
    if elements == 0:
        return True
    # Dense: the last element is at the end of the memory. Overlaps and gaps would need another
    # size.
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return span == elements and elements * dtype.itemsize <= MOST_TENSOR_BYTES


def _same(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Returns whether values are equal and of the same types; True is not 1, and NaN is NaN."""
    return len(leaves) == len(others) and all(map(_is_same, leaves, others))


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    # Types for which equality is identity of the encoding, without the time to encode them.
    if type(value) in (int, str, bytes, _Place):
        return bool(value == other)
    try:
        return codec.encode(value) == codec.encode(other)
    except codec.CodecError:
        return False


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides that `empty_like` uses, for dense layouts such as channels_last.

    The stride of a dimension of size 1 is arbitrary; here it is always the same.
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
        and (tensor.stride() == form.stride or _dense_strides(tensor) == form.stride)
    )
