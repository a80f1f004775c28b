"""Batches as pytrees: cutting into micro-batches, joining what comes out, mapping.

A batch is any pytree (tuples, lists, dicts, dataclasses, and mappings such as a `BatchEncoding` of
transformers, which are taken as dicts). Per-sample values are cut along dim 0: tensors, arrays of
numpy, and lists without tensors that are as long as the batch, such as one of names. Every
micro-batch gets the same 0-dim tensors and constants, and what `shared` marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

from hybridtrain._base.values import (
    as_base,
    find_unknown,
    is_array,
    is_constant,
    leaves_of,
    named_leaves,
    same_constant,
)
from hybridtrain.errors import BatchError


@dataclass(frozen=True)
class Microbatch:
    """Inputs of one micro-batch, in place of a batch's: they are not cut any more."""

    inputs: Any


class Shared:
    """A value of a batch that every micro-batch gets whole; made by `shared`.

    Attributes:
        value: any pytree.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"shared({self.value!r})"


# entered by pytree functions, which move and compare batches
register_pytree_node(
    Shared, lambda mark: ([mark.value], None), lambda values, _: Shared(next(iter(values)))
)


def shared(value: Any) -> Any:
    """Marks a value of a batch that is the same for all samples: every micro-batch gets all of it.

    The tensors of a batch are cut along dim 0, where the samples are. A mask of (time, time), a
    table of positions or a configuration object has none:

        model.train_step({"x": x, "mask": shared(mask)}, targets, loss_fn)

    The model and the loss are given the value itself. Works for inputs and targets, in tuples,
    lists and dicts.

    Args:
        value: any pytree, or any object.
    """
    return value if isinstance(value, Shared) else Shared(value)


def _is_shared(value: Any) -> bool:
    return type(value) is Shared


def _is_uncut(value: Any) -> bool:
    """Returns whether `split` takes `value` as one: it is shared, or a list without tensors."""
    kind = type(value)
    if kind is Shared:
        return True
    if (kind is not list and kind is not tuple) or not value:
        return False
    return not any(
        isinstance(leaf, Tensor | Shared | Mapping) or is_array(leaf) for leaf in tree_leaves(value)
    )


def as_containers(batch: Any) -> Any:
    """Returns `batch` with mappings that pytree functions do not enter as dicts."""
    if batch is None or type(batch) is Tensor:
        return batch
    leaves_of(batch)
    leaves, spec = tree_flatten(batch, _is_shared)
    if not any(isinstance(leaf, Mapping) for leaf in leaves):
        return batch
    return tree_unflatten(
        [as_containers(dict(leaf)) if isinstance(leaf, Mapping) else leaf for leaf in leaves], spec
    )


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
        for number, leaf in enumerate(tree_flatten(as_containers(batch), _is_shared)[0]):
            if not (isinstance(leaf, Tensor) and leaf.dim()) and not is_array(leaf):
                continue
            if samples is not None and leaf.shape[0] != samples:
                raise BatchError(
                    f"the tensors of a batch must have the same size in dim 0: "
                    f"{_place(batch, number)} has shape {tuple(leaf.shape)}, others have {samples} "
                    f"samples. If all samples have it in common, as a mask of (time, time), pass "
                    f"hybridtrain.shared(...) of it, so that every micro-batch gets it whole"
                )
            samples = leaf.shape[0]
    if not samples:
        raise BatchError("a batch needs at least one tensor with at least one sample")
    return samples


def _place(batch: Any, number: int) -> str:
    """Returns the place of a leaf of `batch` for a message; what is shared is one leaf."""
    leaves, spec = tree_flatten(as_containers(batch), _is_shared)
    return named_leaves(tree_unflatten(range(len(leaves)), spec), "batch")[number][0]


def chunk_sizes(samples: int, chunks: int) -> list[int]:
    """Returns the sizes of at most `chunks` micro-batches, as even as possible, none empty.

    >>> chunk_sizes(10, 4), chunk_sizes(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    chunks = min(chunks, samples)
    small, larger = divmod(samples, chunks)
    return [small + 1] * larger + [small] * (chunks - larger)


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts `batch` into micro-batches of the given sizes; no copies, see `cut`.

    Raises:
        BatchError: a value can be neither cut nor given to all.
    """
    if isinstance(batch, Tensor) and batch.dim():
        return [batch] if len(sizes) == 1 else cut(batch, sizes)
    batch = as_containers(batch)
    if len(sizes) == 1:
        return [uncut(batch)]
    leaves, spec = tree_flatten(batch, _is_uncut)
    columns = [_parts(spec, number, leaf, sizes) for number, leaf in enumerate(leaves)]
    return [tree_unflatten(part, spec) for part in zip(*columns, strict=True)] or [batch] * len(
        sizes
    )


def uncut(batch: Any) -> Any:
    """Returns a batch as one micro-batch: what is marked as shared without its mark."""
    leaves, spec = tree_flatten(batch, _is_shared)
    if not any(map(_is_shared, leaves)):
        return batch
    return tree_unflatten([leaf.value if _is_shared(leaf) else leaf for leaf in leaves], spec)


def _parts(spec: TreeSpec, number: int, leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Returns what each micro-batch gets of a leaf, the one of this number in a batch of `spec`."""
    if isinstance(leaf, Tensor):
        return cut(leaf, sizes) if leaf.dim() else [leaf] * len(sizes)
    if _is_shared(leaf):
        return [leaf.value] * len(sizes)
    if is_array(leaf) or (type(leaf) in (list, tuple) and len(leaf) == sum(sizes)):
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        return [leaf[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for value in leaves_of(leaf):
        if not is_constant(value):
            place = named_leaves(tree_unflatten(range(spec.num_leaves), spec), "batch")[number][0]
            raise BatchError(
                f"{place} holds a {type(value).__name__}, which cannot be cut into "
                f"micro-batches: {as_base(type(value))}, or pass hybridtrain.shared(...) of it, so "
                f"that every micro-batch gets it whole"
            )
    return [leaf] * len(sizes)


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
        BatchError: the outputs differ in structure, in a constant, or in another dim than 0, or one
            of several is neither a tensor nor a constant.
    """
    leaves_of(outputs[0])
    first, spec = tree_flatten(outputs[0])
    columns = [first]
    for output in outputs[1:]:
        leaves_of(output)
        leaves, other = tree_flatten(output)
        if other != spec:
            raise BatchError(
                f"micro-batches gave outputs of different structure: {spec}, {other}. {WAY_OUT}"
            )
        columns.append(leaves)
    joined = [
        _join(outputs[0], number, column)
        for number, column in enumerate(zip(*columns, strict=True))
    ]
    return tree_unflatten(joined, spec)


WAY_OUT = (
    "Take the output of each micro-batch with map_outputs(inputs, None, lambda output, _: output)"
)


def check_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> None:
    """Makes sure that the tensors of the outputs of micro-batches have the samples in dim 0.

    Several for each sample are fine, such as the tokens of all samples one after the other.

    Args:
        outputs: pytrees of one structure; their 0-dim tensors are of a whole micro-batch.
        sizes: the number of samples of each.

    Raises:
        BatchError: a tensor has not, or there is something else than tensors and constants.
    """
    for output in outputs:
        if found := find_unknown(output, "output"):
            place, leaf = found
            raise BatchError(
                f"{place} is a {type(leaf).__name__}, and the outputs of micro-batches are joined "
                f"where they are tensors, constants, and tuples, lists, dicts or dataclasses of "
                f"them: {as_base(type(leaf))} in the model. {WAY_OUT}"
            )
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
            if second or shape[0] % samples or shape[0] * sizes[0] != shapes[0][0] * samples:
                raise BatchError(
                    f"{output_place(outputs[0], number)} of a micro-batch with {samples} samples "
                    f"has shape {shape}, and outputs are joined along dim 0, where the samples "
                    f"must be: return it with the samples first (.transpose(0, 1)), or take the "
                    f"outputs of each micro-batch with map_outputs()"
                )


def _join(output: Any, number: int, column: tuple[Any, ...]) -> Any:
    """Returns one value for the leaf of `output` of this number, from those of micro-batches."""
    first = column[0]
    if isinstance(first, Tensor) and all(isinstance(leaf, Tensor) for leaf in column):
        if len({(leaf.dim(), str(leaf.shape[1:])) for leaf in column if not leaf.is_nested}) > 1:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in column)
            raise BatchError(
                f"{output_place(output, number)} has the shapes {shapes} in the micro-batches, and "
                f"outputs are joined along dim 0. {WAY_OUT}"
            )
        try:
            return torch.cat(column) if first.dim() else torch.stack(column)
        except (RuntimeError, NotImplementedError) as error:  # of sparse and nested tensors
            raise BatchError(
                f"{output_place(output, number)} cannot be joined along dim 0. {WAY_OUT}"
            ) from error
    if len(column) == 1 or all(same_constant(leaf, first) for leaf in column[1:]):
        return first
    other = next(leaf for leaf in column[1:] if not same_constant(leaf, first))
    if is_constant(first) and is_constant(other):
        what = f"{first!r} in one micro-batch and {other!r} in another"[:200]
    else:
        what = f"a {type(other if is_constant(first) else first).__name__}"
    raise BatchError(
        f"{output_place(output, number)} is {what}: only tensors are joined, along dim 0, and "
        f"constants that are equal. {WAY_OUT}"
    )


def output_place(output: Any, number: int) -> str:
    """Returns the place of the leaf of `output` of this number, for a message."""
    return named_leaves(output, "output")[number][0]


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
