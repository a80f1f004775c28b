"""Batches and values between layers as pytrees: cutting into micro-batches, joining, mapping.

A batch is any pytree (tuples, lists, dicts, dataclasses registered with torch's pytree). Its
tensors are cut along dim 0; every micro-batch gets the same 0-dim tensors and other values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    SUPPORTED_NODES,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from hybridtrain.errors import BatchError


@dataclass(frozen=True)
class Microbatch:
    """Inputs of one micro-batch, in place of a batch's: they are not cut any more."""

    inputs: Any


def batch_size(*batches: Any) -> int:
    """Returns the number of samples, the size that all tensors of `batches` have in dim 0.

    Raises:
        BatchError: they differ in it, there is no tensor, or there are no samples.
    """
    samples: int | None = None
    for batch in batches:
        if isinstance(batch, Tensor) and batch.dim() and samples in (None, batch.shape[0]):
            samples = batch.shape[0]
            continue
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if samples is not None and leaf.shape[0] != samples:
                raise BatchError(
                    f"the tensors of a batch must have the same size in dim 0: "
                    f"batch{keystr(path)} has shape {tuple(leaf.shape)}, others have {samples} "
                    f"samples"
                )
            samples = leaf.shape[0]
    if not samples:
        raise BatchError("a batch needs at least one tensor with at least one sample")
    return samples


def chunk_sizes(samples: int, chunks: int) -> list[int]:
    """Returns the sizes of at most `chunks` micro-batches, as even as possible, none empty.

    >>> chunk_sizes(10, 4), chunk_sizes(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    chunks = min(chunks, samples)
    small, larger = divmod(samples, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts `batch` into micro-batches of the given sizes; no copies, see `cut`."""
    if len(sizes) == 1:
        return [batch]
    if isinstance(batch, Tensor) and batch.dim():
        return cut(batch, sizes)
    leaves, spec = tree_flatten(batch)
    columns = [
        cut(leaf, sizes) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten(part, spec) for part in zip(*columns, strict=True)] or [batch] * len(
        sizes
    )


def cut(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Returns the parts of a tensor, which share its memory.

    Autograd counts the changes in place of a tensor and of its views together: a layer that changes
    one micro-batch would make what is saved of another one invalid, though their memory is apart.
    So each part of a tensor without a graph has its own count.
    """
    parts = tensor.split(list(sizes), dim=dim)
    return list(parts) if tensor.requires_grad else [part.data for part in parts]


def merge(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of micro-batches: tensors along dim 0, 0-dim tensors stacked.

    Raises:
        BatchError: the outputs differ in structure.
    """
    leaves_of(outputs[0])
    first, spec = tree_flatten(outputs[0])
    columns = [first]
    for output in outputs[1:]:
        leaves, other = tree_flatten(output)
        if other != spec:
            raise BatchError(f"micro-batches gave outputs of different structure: {spec}, {other}")
        columns.append(leaves)
    return tree_unflatten([_join(column) for column in zip(*columns, strict=True)], spec)


def check_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> None:
    """Makes sure that the tensors of the outputs of micro-batches have the samples in dim 0.

    Several for each sample are fine, such as the tokens of all samples one after the other.

    Args:
        outputs: pytrees of one structure; their 0-dim tensors are of a whole micro-batch.
        sizes: the number of samples of each.

    Raises:
        BatchError: a tensor has not; names it.
    """
    # `merge` refuses other structures
    for number, column in enumerate(zip(*map(leaves_of, outputs), strict=False)):
        shapes = [tuple(leaf.shape) for leaf in column if isinstance(leaf, Tensor) and leaf.dim()]
        if len(shapes) < len(column):
            continue
        # the states of an RNN, (layers, samples, width), may have a multiple in dim 0 by chance
        second = all(
            len(shape) > 2 and shape[1] == samples and shape[0] != samples
            for shape, samples in zip(shapes, sizes, strict=True)
        )
        for shape, samples in zip(shapes, sizes, strict=True):
            if second or shape[0] % samples:
                path, _ = tree_flatten_with_path(outputs[0])[0][number]
                raise BatchError(
                    f"output{keystr(path)} of a micro-batch with {samples} samples has shape "
                    f"{shape}, and outputs are joined along dim 0, where the samples must be: "
                    f"return it with the samples first (.transpose(0, 1)), or take the outputs of "
                    f"each micro-batch with map_outputs()"
                )


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(column) if column[0].dim() else torch.stack(column)


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves of `tree`, and registers its dataclasses for all pytree functions.

    Types that are registered already, such as the outputs of `transformers`, are left alone.
    """
    while True:
        leaves = tree_leaves(tree)
        unknown = {type(leaf) for leaf in leaves if is_dataclass(leaf)} - set(SUPPORTED_NODES)
        if not unknown:
            return leaves
        for kind in unknown:
            register_dataclass(kind)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns `tree` with `function` of its tensors; one that occurs twice stays one tensor."""
    if type(tree) is Tensor:
        return function(tree)
    if type(tree) is tuple and len(tree) == 1 and type(tree[0]) is Tensor:
        return (function(tree[0]),)  # by far the most frequent, and pytree functions take longer
    done: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = function(tensor)
        return done[id(tensor)]

    return tree_map_only(Tensor, once, tree)


def hides_tensors(leaf: Any, depth: int = 3) -> bool:
    """Returns whether `leaf`, an object that pytree functions do not enter, contains tensors."""
    if isinstance(leaf, Tensor):
        return True
    if depth == 0 or not hasattr(leaf, "__dict__") or isinstance(leaf, type):
        return False
    return any(hides_tensors(inner, depth - 1) for inner in tree_leaves(vars(leaf)))
