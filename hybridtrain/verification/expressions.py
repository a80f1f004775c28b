"""A run without data, in which each tensor has an expression of inputs and parameters.

Only `engine="distributed"` needs this file.

Two programs that evaluate the same expression compute the same number. A model too large to run
twice is therefore compared by its expressions: its forward and backward run on tensors without
data, on which an operator takes microseconds regardless of its size. The expression of a result is
a digest of the operator and of the digests of its arguments:

    x, W        "input 0", "0.weight"
    x @ W       D("mm", "input 0", "0.weight")
    h.add_(1)   the memory of h, and with it every view of h, gets a new digest

The digest of a view combines the digest of its memory with its offset, sizes and strides. A copy
has the digest of its source. The digest of a sum does not depend on the order of its terms,
although the rounding does.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tag, Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain._base.torch_private import FakeTensorMode, TorchDispatchMode

# Tensors from closures or globals are digested up to this many entries, and by identity above.
_LARGE = 1 << 20

# Operators that return their argument if the dtype is unchanged.
_COPIES = {"aten::clone", "aten::_to_copy", "aten::lift_fresh", "aten::lift_fresh_copy"}


class Symbol:
    """Represents a tensor in a comparison by its expression, shape and dtype."""

    def __init__(self, digest: str, tensor: Tensor) -> None:
        self._key = digest, tuple(tensor.shape), tensor.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Symbol) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"{self._key}"


class _Memory:
    """A block of memory, and the expression of its contents.

    Attributes:
        digest: the digest of the expression.
        layout: offset, sizes and strides of the tensor that fills it.
        terms: the sorted digests of the terms of a sum; otherwise only the digest.
        tensor: keeps the block alive, so that its address is not reused.
    """

    def __init__(self, digest: str, tensor: Tensor, terms: tuple[str, ...] = ()) -> None:
        self.digest = digest
        self.layout = _layout(tensor)
        self.terms = terms or (digest,)
        self.tensor = tensor


class Expressions(TorchDispatchMode):
    """Records the expression of every tensor that the block computes.

    Enter `with expressions.fake, expressions:`. All tensors in the block have no data.

    Attributes:
        fake: the mode that creates tensors without data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._memory: dict[int, _Memory] = {}
        self._draws = 0

    def stand_in(self, tensor: Tensor, name: str) -> Tensor:
        """Returns a tensor like `tensor`, on the CPU and without data, with the expression `name`.

        The stand-in of a parameter is a parameter.
        """
        with self.fake:
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                empty.requires_grad_(tensor.requires_grad)
        self._memory[_address(empty)] = _Memory(name, empty)
        return empty

    def values(self, tree: Any) -> Any:
        """Returns a pytree with a `Symbol` for each tensor."""
        return tree_map_only(Tensor, lambda t: Symbol(self._digest(t), t), tree)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping each call would take as long as the call itself

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator without data and records the expressions of its results."""
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name
        if name == "prim::device":
            return func(*args, **kwargs)
        # device and generator are irrelevant; read before the operator changes an argument
        settings = [(k, v) for k, v in kwargs.items() if k not in ("device", "generator")]
        key = f"{name}.{schema.overload_name}{self._text(args)}{self._text(settings)}"
        if Tag.nondeterministic_seeded in func.tags:
            self._draws += 1
            key += f"#{self._draws}"
        written_arguments: list[Tensor] = []
        if schema.is_mutable:
            for value, argument in zip(args, schema.arguments, strict=False):
                written_arguments += _tensors(value) if argument.is_write else ()
            for argument in schema.arguments:
                if argument.is_write and argument.name in kwargs:
                    written_arguments += _tensors(kwargs[argument.name])
        source = self._source(name, args)
        terms = self._terms(name, args, kwargs)
        result = func(*args, **kwargs)
        digest = _hash(key)
        for number, tensor in enumerate(written_arguments):
            memory = self._of(tensor)
            fills = memory.layout == _layout(tensor)
            if name == "aten::copy_" and fills and _same_kind(args[0], args[1]):
                memory.digest = self._digest(args[1])
            elif terms and fills:
                memory.digest = _hash(f"sum{terms!r}")
            else:
                memory.digest = _hash(f"{digest}>{number} {'' if fills else _layout(tensor)}")
            memory.terms = terms if terms and fills else (memory.digest,)
        for number, tensor in enumerate(_tensors(result)):
            address = _address(tensor)
            if address in self._memory:
                continue  # a view, or the written tensor
            if source is not None and _same_kind(tensor, args[0]):
                self._memory[address] = _Memory(source, tensor)
            elif terms:
                self._memory[address] = _Memory(_hash(f"sum{terms!r}"), tensor, terms)
            else:
                self._memory[address] = _Memory(f"{digest}:{number}" if number else digest, tensor)
        return result

    def _source(self, name: str, args: Any) -> str | None:
        """Returns the digest of the argument that equals the result of an operator, if any."""
        if name in _COPIES:
            return self._digest(args[0])
        # eager code skips x[:, 0:]; a graph of torch.export contains it
        if name == "aten::slice_backward" and tuple(args[0].shape) == tuple(args[1]):
            return self._digest(args[0])
        return None

    def _terms(self, name: str, args: Any, kwargs: Any) -> tuple[str, ...]:
        """Returns the terms if the operator adds two tensors of one shape and dtype, else ()."""
        if (
            name not in ("aten::add", "aten::add_")
            or kwargs
            or len(args) != 2
            or len(_tensors(args)) != 2
        ):
            return ()
        if not _same_kind(*args):
            return ()
        return tuple(sorted(term for tensor in args for term in self._terms_of(tensor)))

    def _terms_of(self, tensor: Tensor) -> tuple[str, ...]:
        memory = self._of(tensor)
        return memory.terms if memory.layout == _layout(tensor) else (self._digest(tensor),)

    def _text(self, value: Any) -> str:
        """Formats an argument as part of a digest key."""
        if isinstance(value, Tensor):
            return self._digest(value)
        if isinstance(value, tuple | list):
            return f"({','.join(map(self._text, value))})"
        return "" if isinstance(value, torch.device) else repr(value)

    def _digest(self, tensor: Tensor) -> str:
        memory = self._of(tensor)
        layout = _layout(tensor)
        if memory.layout == layout:
            return memory.digest
        return _hash(f"{memory.digest}@{layout}/{memory.layout} {tensor.dtype}")

    def _of(self, tensor: Tensor) -> _Memory:
        address = _address(tensor)
        if address not in self._memory:  # a real tensor from a closure or a global
            self._memory[address] = _Memory(contents(tensor), tensor)
        return self._memory[address]


def contents(tensor: Tensor) -> str:
    """Returns a digest of the entries of a tensor with data."""
    if tensor.is_meta or tensor.numel() > _LARGE:
        return f"{tensor.dtype} {tuple(tensor.shape)} at {id(tensor)}"
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)  # numpy has no bfloat16
    return _hash(f"{tensor.dtype} {tuple(tensor.shape)} ", data.numpy().tobytes())


def _hash(text: str, data: bytes = b"") -> str:
    return hashlib.blake2b(text.encode() + data, digest_size=12).hexdigest()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _same_kind(first: Any, second: Any) -> bool:
    return bool(first.shape == second.shape and first.dtype == second.dtype)


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a result or an argument of an operator."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
