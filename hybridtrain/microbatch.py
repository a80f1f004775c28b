"""A batch in micro-batches, and back.

A batch is any pytree (tuples, lists, dicts, dataclasses registered with torch's pytree). Its
tensors are cut along dim 0; 0-dim tensors and everything that is not a tensor go to every
micro-batch as they are.
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
    """The number of rows that all tensors of `batches` share in dim 0.

    Raises:
        BatchError: they do not share it, there is no tensor, or there are no rows.
    """
    rows: int | None = None
    for batch in batches:
        if isinstance(batch, Tensor) and batch.dim() and rows in (None, batch.shape[0]):
            rows = batch.shape[0]
            continue
        for path, leaf in tree_flatten_with_path(batch)[0]:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if rows is not None and leaf.shape[0] != rows:
                raise BatchError(
                    f"the tensors of a batch must have the same number of rows: "
                    f"batch{keystr(path)} has shape {tuple(leaf.shape)}, others have {rows} rows"
                )
            rows = leaf.shape[0]
    if not rows:
        raise BatchError("a batch needs at least one tensor with at least one row")
    return rows


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """The rows of each micro-batch: as even as they can be, none empty, at most `chunks` of them.

    >>> chunk_sizes(10, 4), chunk_sizes(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    chunks = min(chunks, rows)
    small, larger = divmod(rows, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts `batch` into micro-batches of `sizes` rows; views, no copies."""
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
    """Joins the outputs of the micro-batches: tensors along dim 0, 0-dim tensors stacked.

    Raises:
        BatchError: the outputs differ in structure.
    """
    leaves_of(outputs[0])
    first, spec = tree_flatten(outputs[0])
    rows = [first]
    for output in outputs[1:]:
        leaves, other = tree_flatten(output)
        if other != spec:
            raise BatchError(f"micro-batches gave outputs of different structure: {spec}, {other}")
        rows.append(leaves)
    return tree_unflatten([_join(column) for column in zip(*rows, strict=True)], spec)


def _join(column: tuple[Any, ...]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(column) if column[0].dim() else torch.stack(column)
