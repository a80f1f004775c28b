"""Checks that the merged outputs of micro-batches are the output of the batch.

Shapes alone are not sufficient. With micro-batches of 2 samples, (2, 2) may be two classes or
pairwise similarities, a number 2 may be a constant or the number of samples, and (2, 8) may be a
table or the samples. Therefore, for each kind of output, the model runs once more on a different
number of samples, and only dim 0 of tensors may change with the number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from hybridtrain._base.microbatch import ADVICE, output_place
from hybridtrain._base.values import leaves_of, same_constant
from hybridtrain.errors import BatchError


class JoinProof:
    """Tracks for which kinds of outputs merging has been checked."""

    def __init__(self) -> None:
        self._proven = set[str]()

    def asks(self, outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Returns whether a forward on fewer or more samples is needed; once per output kind.

        Args:
            outputs: the outputs of the micro-batches.
            sizes: the number of samples of each micro-batch; if they differ, `merge` alone detects
                dependencies.
        """
        if len(set(sizes)) > 1 or not outputs:
            return False
        leaves, spec = _flat(outputs[0])
        dims = [leaf.dim() if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves]
        key = f"{spec} {dims}"
        if key in self._proven:
            return False
        self._proven.add(key)
        return True


def _flat(output: Any) -> tuple[list[Any], TreeSpec]:
    leaves_of(output)
    return tree_flatten(output)


def check_same_but_samples(
    output: Any, samples: int, other_output: Any, other_samples: int
) -> None:
    """Checks that two outputs of a model differ only in the size of dim 0.

    Args:
        output: the output for `samples` samples.
        samples: a number of samples.
        other_output: the output for `other_samples` samples.
        other_samples: a different number of samples.

    Raises:
        BatchError: something else depends on the number of samples; the message names it.
    """
    (leaves, spec), (other_leaves, other_spec) = _flat(output), _flat(other_output)
    if spec != other_spec:
        raise BatchError(
            "the structure of the model's output depends on the number of samples, for example a "
            f"list with one entry per sample, but only tensors are joined, along dim 0. {ADVICE}"
        )
    for number, (leaf, other_leaf) in enumerate(zip(leaves, other_leaves, strict=True)):
        if isinstance(leaf, Tensor) and isinstance(other_leaf, Tensor):
            if (
                leaf.is_nested
                or other_leaf.is_nested
                or not leaf.dim()
                or leaf.dim() != other_leaf.dim()
            ):
                continue
            shape, other_shape = tuple(leaf.shape), tuple(other_leaf.shape)
            if shape[0] * other_samples == other_shape[0] * samples and all(
                m == n or m * other_samples != n * samples
                for m, n in zip(shape[1:], other_shape[1:], strict=True)
            ):
                continue
            values = (
                f"has the shape {shape} for {samples} samples and {other_shape} for {other_samples}"
            )
        elif same_constant(leaf, other_leaf):
            continue
        else:
            values = f"is {leaf!r} for {samples} samples and {other_leaf!r} for {other_samples}"[
                :200
            ]
        raise BatchError(
            f"{output_place(output, number)} {values}, but micro-batches are joined along dim 0, "
            f"which must be the sample dimension. {ADVICE}"
        )
