"""Cuts batches, as pytrees, into micro-batches, and merges the outputs.

A batch is any pytree (tuples, lists, dicts, dataclasses, and mappings such as a `BatchEncoding` of
transformers, which are treated as dicts). Per-sample values are cut along dim 0: tensors, NumPy
arrays, and lists without tensors that are as long as the batch, such as lists of names. 0-dim
tensors, constants and values marked by `shared` are passed to every micro-batch unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from hybridtrain._base.shares import MicrobatchPlace, Shares
from hybridtrain._base.values import (
    as_base,
    find_unknown,
    is_array,
    is_constant,
    is_flat,
    leaves_of,
    named_leaves,
    same_constant,
)
from hybridtrain.errors import BatchError


@dataclass(frozen=True)
class Microbatch:
    """The inputs of one micro-batch, passed instead of a batch; not cut further."""

    inputs: Any


class Unread:
    """A placeholder for the inputs or targets of a batch in a process that uses neither.

    With `engine="distributed"`, these are the processes that run neither the first nor the last
    stage.

    Attributes:
        samples: the number of samples of the batch.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __repr__(self) -> str:
        return f"Unread({self.samples} samples)"


class Shared:
    """A value passed to every micro-batch unchanged; created by `shared`.

    Attributes:
        value: any pytree.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"shared({self.value!r})"


# traversed by pytree functions, which move and compare batches
register_pytree_node(
    Shared, lambda mark: ([mark.value], None), lambda values, _: Shared(next(iter(values)))
)


def shared(value: Any) -> Any:
    """Marks a value that all samples of a batch share, so that it is not cut into micro-batches.

    The tensors of a batch are cut along dim 0, the dimension of the samples. A mask of shape (time,
    time), a table of positions or a configuration object must not be cut:

        model.train_step({"x": x, "mask": shared(mask)}, targets, loss_fn)

    The model and the loss receive the value itself. `shared` works for inputs and targets, and in
    tuples, lists and dicts.

    Args:
        value: any pytree, or any object.
    """
    return value if isinstance(value, Shared) else Shared(value)


def _is_shared(value: Any) -> bool:
    return type(value) is Shared


def _is_uncut(value: Any) -> bool:
    """Returns whether `value` is one leaf for `split`: a shared value or a list without tensors."""
    kind = type(value)
    if kind is Shared:
        return True
    if (kind is not list and kind is not tuple) or not value:
        return False
    return not any(
        isinstance(leaf, Tensor | Shared | Mapping) or is_array(leaf) for leaf in tree_leaves(value)
    )


def as_containers(batch: Any) -> Any:
    """Returns `batch` with mappings that are not pytree nodes converted to dicts."""
    if batch is None or type(batch) in (Tensor, Unread):
        return batch
    if isinstance(batch, Shares):
        return Shares([as_containers(part) for part in batch.parts], batch.shares)
    leaves_of(batch)
    leaves, spec = tree_flatten(batch, _is_shared)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return batch
    return tree_unflatten(
        [as_containers(dict(leaf)) if isinstance(leaf, Mapping) else leaf for leaf in leaves], spec
    )


def batch_size(*batches: Any) -> int:
    """Returns the number of samples: the size of all tensors of `batches` in dim 0.

    Raises:
        BatchError: the sizes differ, there is no tensor, or there are no samples.
    """
    samples: int | None = None
    for batch in batches:
        # most batches are tensors
        if isinstance(batch, Tensor) and batch.dim() and samples in (None, size := batch.size(0)):
            samples = size
            continue
        if batch is None:
            continue
        if isinstance(batch, Unread):
            samples = batch.samples
            continue
        if isinstance(batch, Shares):
            return sum(batch_size(*parts) for parts in shares_of(*batches))
        for number, leaf in enumerate(tree_flatten(as_containers(batch), _is_shared)[0]):
            if not (isinstance(leaf, Tensor) and leaf.dim()) and not is_array(leaf):
                continue
            if samples is not None and leaf.shape[0] != samples:
                raise BatchError(
                    "the tensors of a batch must have the same size in dim 0: "
                    f"{_place(batch, number)} has shape {tuple(leaf.shape)}, others have "
                    f"{samples} samples. If all samples share this tensor, such as a mask of "
                    "shape (time, time), wrap it in hybridtrain.shared(...)"
                )
            samples = leaf.shape[0]
    if not samples:
        raise BatchError("a batch needs at least one tensor with at least one sample")
    return samples


def _place(batch: Any, number: int) -> str:
    """Returns the path of a leaf of `batch` for a message; a shared value is one leaf."""
    leaves, spec = tree_flatten(as_containers(batch), _is_shared)
    return named_leaves(tree_unflatten(range(len(leaves)), spec), "batch")[number][0]


def chunk_sizes(samples: int, chunks: int) -> list[int]:
    """Returns the sizes of at most `chunks` micro-batches, as even as possible, none empty.

    >>> chunk_sizes(10, 4), chunk_sizes(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    return list(_chunk_sizes(samples, chunks))


@cache
def _chunk_sizes(samples: int, chunks: int) -> tuple[int, ...]:
    chunks = min(chunks, samples)
    small, larger = divmod(samples, chunks)
    return (small + 1,) * larger + (small,) * (chunks - larger)


class MicrobatchCut:
    """The cut of a batch into micro-batches along dim 0; each share is cut separately.

    Args:
        chunks: the maximum number of micro-batches per share.
        batches: the batches to cut together, such as inputs and targets.

    Attributes:
        sizes: the sizes of all micro-batches.
        places: the origin of each micro-batch; None for a batch without shares.
    """

    def __init__(self, chunks: int, *batches: Any) -> None:
        self.places: list[MicrobatchPlace] | None = None
        if Shares not in map(type, batches):
            self.sizes = list(_chunk_sizes(batch_size(*batches), chunks))
            self._sizes_of_shares = [self.sizes]
            return
        made_of_shares = [batch for batch in batches if isinstance(batch, Shares)]
        self._sizes_of_shares = [
            chunk_sizes(batch_size(*parts), chunks) for parts in shares_of(*batches)
        ]
        self.sizes = [size for sizes in self._sizes_of_shares for size in sizes]
        self.places = [
            MicrobatchPlace(share.replica, share.ahead, number)
            for share, sizes in zip(made_of_shares[0].shares, self._sizes_of_shares, strict=True)
            for number in range(len(sizes))
        ]

    def of(self, batch: Any) -> list[Any]:
        """Returns the micro-batches of a batch; see `split`."""
        # Without a view: a layer that works in place then sees the caller's tensor, as in plain
        # PyTorch.
        if type(batch) is Tensor and len(self.sizes) == 1:
            return [batch]
        if not isinstance(batch, Shares):
            return split(batch, self.sizes)
        shares = zip(batch.parts, self._sizes_of_shares, strict=True)
        return [microbatch for part, sizes in shares for microbatch in split(part, sizes)]

    @property
    def of_first_share(self) -> list[int]:
        """The sizes of the micro-batches of the first share."""
        return self._sizes_of_shares[0]


def joined(batch: Any) -> Any:
    """Returns the samples of all shares of a batch as one batch.

    Raises:
        BatchError: the shares cannot be joined, for example because each is padded to its own
            length.
    """
    return merge(batch.parts) if isinstance(batch, Shares) else batch


def first_share(batch: Any) -> Any:
    """Returns the first share of a batch, or the batch if it has no shares."""
    return batch.parts[0] if isinstance(batch, Shares) else batch


def shares_of(*batches: Any) -> list[tuple[Any, ...]]:
    """Returns the shares of batches that belong together, such as inputs and targets."""
    counts = {len(batch.parts) for batch in batches if isinstance(batch, Shares)}
    if not counts:
        return [batches]
    if len(counts) > 1:
        raise BatchError(
            f"inputs and targets have {' and '.join(map(str, sorted(counts)))} shares: pass "
            "inputs and targets of the same batch of the loader"
        )
    (count,) = counts
    columns = [
        batch.parts if isinstance(batch, Shares) else [batch] * count  # targets that are None
        for batch in batches
    ]
    return list(zip(*columns, strict=True))


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts `batch` into micro-batches of these sizes, without copying.

    Raises:
        BatchError: a value can neither be cut nor passed unchanged.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return [batch] if len(sizes) == 1 else cut(batch, sizes)
    if isinstance(batch, Unread):
        return [Unread(size) for size in sizes]
    if batch is None:
        return [None] * len(sizes)
    if batch and is_flat(batch):
        if len(sizes) == 1:
            return [batch]
        values: list[list[Any]] = [
            cut(value, sizes) if type(value) is Tensor and value.dim() else [value] * len(sizes)
            for value in batch.values()
        ]
        return [dict(zip(batch, part, strict=True)) for part in zip(*values, strict=True)]
    batch = as_containers(batch)
    if len(sizes) == 1:
        return [uncut(batch)]
    leaves, spec = tree_flatten(batch, _is_uncut)
    columns = [_parts(spec, number, leaf, sizes) for number, leaf in enumerate(leaves)]
    return [tree_unflatten(part, spec) for part in zip(*columns, strict=True)] or [batch] * len(
        sizes
    )


def uncut(batch: Any) -> Any:
    """Returns a batch as one micro-batch, with shared values unwrapped."""
    leaves, spec = tree_flatten(batch, _is_shared)
    if not any(map(_is_shared, leaves)):
        return batch
    return tree_unflatten([leaf.value if _is_shared(leaf) else leaf for leaf in leaves], spec)


def cut_without_tensors(batch: Any, samples: int) -> tuple[bool, ...]:
    """Returns which values of a batch are cut although they are no tensors, such as lists of texts.

    A list of another length than the batch is passed on as it is.
    """
    leaves, _ = tree_flatten(batch, _is_uncut)
    return tuple(_is_cut(leaf, samples) for leaf in leaves)


def _is_cut(leaf: Any, samples: int) -> bool:
    return is_array(leaf) or (type(leaf) in (list, tuple) and len(leaf) == samples)


def _parts(spec: TreeSpec, number: int, leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Returns each micro-batch's part of a leaf, which has this index in a batch of `spec`."""
    if isinstance(leaf, Tensor):
        return cut(leaf, sizes) if leaf.dim() else [leaf] * len(sizes)
    if _is_shared(leaf):
        return [leaf.value] * len(sizes)
    if _is_cut(leaf, sum(sizes)):
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        return [leaf[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for value in leaves_of(leaf):
        if not is_constant(value):
            place = named_leaves(tree_unflatten(range(spec.num_leaves), spec), "batch")[number][0]
            raise BatchError(
                f"{place} holds a {type(value).__name__}, which cannot be cut into micro-batches: "
                f"{as_base(type(value))}, or wrap it in hybridtrain.shared(...) to pass it to "
                "every micro-batch unchanged"
            )
    return [leaf] * len(sizes)


def cut(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Returns the parts of a tensor, which share its memory.

    Autograd keeps one version counter for a tensor and its views, so a layer that changes one
    micro-batch in place would invalidate tensors saved from another one, although their memory is
    disjoint. Therefore each part of a tensor without a graph gets a separate counter.
    """
    parts = tensor.split(list(sizes), dim=dim)
    return list(parts) if tensor.requires_grad else [part.data for part in parts]


def merge(outputs: Sequence[Any]) -> Any:
    """Merges the outputs of micro-batches: concatenates tensors along dim 0, stacks 0-dim tensors.

    Raises:
        BatchError: the outputs differ in structure, in a constant, or in a dim other than 0, or a
            leaf of several outputs is neither a tensor nor a constant.
    """
    leaves_of(outputs[0])
    first, spec = tree_flatten(outputs[0])
    columns = [first]
    for output in outputs[1:]:
        leaves_of(output)
        leaves, other_spec = tree_flatten(output)
        if other_spec != spec:
            raise BatchError(
                f"micro-batches returned outputs of different structure: {spec}, {other_spec}. "
                f"{ADVICE}"
            )
        columns.append(leaves)
    joined = [
        _join(outputs[0], number, column)
        for number, column in enumerate(zip(*columns, strict=True))
    ]
    return tree_unflatten(joined, spec)


ADVICE = (
    "To get the output of each micro-batch, use map_outputs(inputs, None, lambda output, _: output)"
)


def check_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> None:
    """Checks that tensors in the outputs of micro-batches have the samples in dim 0.

    Several entries per sample are allowed, such as the concatenated tokens of all samples.

    Args:
        outputs: pytrees of equal structure, one per micro-batch.
        sizes: the number of samples of each micro-batch.

    Raises:
        BatchError: the samples are not in dim 0, or a leaf is neither a tensor nor a constant.
    """
    for output in outputs:
        if unknown := find_unknown(output, "output"):
            place, leaf = unknown
            raise BatchError(
                f"{place} is a {type(leaf).__name__}, but only tensors, constants, and tuples, "
                "lists, dicts or dataclasses of them can be joined over micro-batches: "
                f"{as_base(type(leaf))} in the model. {ADVICE}"
            )
    # `merge` rejects other structures
    for number, column in enumerate(zip(*map(leaves_of, outputs), strict=False)):
        shapes = [tuple(leaf.shape) for leaf in column if isinstance(leaf, Tensor) and leaf.dim()]
        if len(shapes) < len(column):
            continue
        # dim 0 of an RNN's states, (layers, samples, width), may be a multiple by chance
        second = all(
            len(shape) > 2 and shape[1] == samples and shape[0] != samples
            for shape, samples in zip(shapes, sizes, strict=True)
        )
        for shape, samples in zip(shapes, sizes, strict=True):
            if second or shape[0] % samples or shape[0] * sizes[0] != shapes[0][0] * samples:
                raise BatchError(
                    f"{output_place(outputs[0], number)} of a micro-batch with {samples} samples "
                    f"has shape {shape}, but outputs are joined along dim 0, which must be the "
                    "sample dimension: return it with the samples first (.transpose(0, 1)), or "
                    "get the output of each micro-batch with map_outputs()"
                )


def _join(output: Any, number: int, column: tuple[Any, ...]) -> Any:
    """Returns the merged value of the leaf with this index, from each micro-batch's value."""
    first = column[0]
    if isinstance(first, Tensor) and all(isinstance(leaf, Tensor) for leaf in column):
        if len({(leaf.dim(), str(leaf.shape[1:])) for leaf in column if not leaf.is_nested}) > 1:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in column)
            raise BatchError(
                f"{output_place(output, number)} has the shapes {shapes} in the micro-batches, "
                f"which cannot be joined along dim 0. {ADVICE}"
            )
        try:
            return torch.cat(column) if first.dim() else torch.stack(column)
        except (RuntimeError, NotImplementedError) as error:  # raised for sparse and nested tensors
            raise BatchError(
                f"{output_place(output, number)} cannot be joined along dim 0. {ADVICE}"
            ) from error
    if len(column) == 1 or all(same_constant(leaf, first) for leaf in column[1:]):
        return first
    different = next(leaf for leaf in column[1:] if not same_constant(leaf, first))
    if is_constant(first) and is_constant(different):
        description = f"{first!r} in one micro-batch and {different!r} in another"[:200]
    else:
        description = f"a {type(different if is_constant(first) else first).__name__}"
    raise BatchError(
        f"{output_place(output, number)} is {description}: only tensors (along dim 0) and equal "
        f"constants can be joined. {ADVICE}"
    )


def output_place(output: Any, number: int) -> str:
    """Returns the path of the leaf of `output` with this index, for a message."""
    return named_leaves(output, "output")[number][0]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Applies `function` to the tensors of `tree`; a tensor that occurs twice stays one tensor."""
    if type(tree) is Tensor:
        return function(tree)
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:
        return (function(tree[0]),)  # the most frequent case; pytree functions are slower
    results: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in results:
            results[id(tensor)] = function(tensor)
        return results[id(tensor)]

    return tree_map_only(Tensor, once, tree)
