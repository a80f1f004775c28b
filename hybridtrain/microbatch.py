"""Cutting a batch into micro-batches, and joining their outputs.

A batch is any pytree (tuples, lists, dicts, dataclasses registered with torch's pytree). Its
tensors are cut along dim 0; every micro-batch gets the same 0-dim tensors and other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

from hybridtrain.errors import BatchError
from hybridtrain.pytree import leaves_of


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
    """Cuts `batch` into micro-batches of the given sizes; views, no copies."""
    if len(sizes) == 1:
        return [batch]
    if isinstance(batch, Tensor) and batch.dim():
        return list(batch.split(list(sizes)))
    leaves, spec = tree_flatten(batch)
    columns = [
        leaf.split(list(sizes)) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [tree_unflatten(row, spec) for row in zip(*columns, strict=True)] or [batch] * len(sizes)


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


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(column) if column[0].dim() else torch.stack(column)
