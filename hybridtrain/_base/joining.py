"""The proof that outputs of micro-batches, joined along dim 0, are the output of the batch.

Shapes do not tell. With micro-batches of 2 samples, is (2, 2) two classes or a similarity of every
pair, a number 2 a constant or the number of samples, and (2, 8) a table or the samples? So the
model runs once more for each kind of output, on another number of samples, and what changes with
the samples must be dim 0 of tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from hybridtrain._base.microbatch import WAY_OUT, output_place
from hybridtrain._base.values import leaves_of, same_constant
from hybridtrain.errors import BatchError


class JoinProof:
    """Knows for which kinds of outputs it is proven that they may be joined."""

    def __init__(self) -> None:
        self._proven = set[str]()

    def asks(self, outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Returns whether a forward of another number of samples must tell; it does so once.

        Args:
            outputs: of the micro-batches.
            sizes: the number of samples of each; if they differ, `merge` finds what depends on it.
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


def check_same_but_samples(output: Any, samples: int, other: Any, others: int) -> None:
    """Makes sure that two outputs of a model differ in the size of dim 0 alone.

    Args:
        output: of `samples` samples.
        samples: how many.
        other: the output of `others` samples.
        others: another number.

    Raises:
        BatchError: something else depends on the number of samples; names it.
    """
    (leaves, spec), (other_leaves, other_spec) = _flat(output), _flat(other)
    if spec != other_spec:
        raise BatchError(
            f"the structure of the model's output depends on the number of samples, as a list of "
            f"an entry for each does, and only tensors are joined, along dim 0. {WAY_OUT}"
        )
    for number, (one, two) in enumerate(zip(leaves, other_leaves, strict=True)):
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if one.is_nested or two.is_nested or not one.dim() or one.dim() != two.dim():
                continue
            a, b = tuple(one.shape), tuple(two.shape)
            if a[0] * others == b[0] * samples and all(
                m == n or m * others != n * samples for m, n in zip(a[1:], b[1:], strict=True)
            ):
                continue
            values = f"has the shape {a} for {samples} samples and {b} for {others}"
        elif same_constant(one, two):
            continue
        else:
            values = f"is {one!r} for {samples} samples and {two!r} for {others}"[:200]
        raise BatchError(
            f"{output_place(output, number)} {values}, and micro-batches are joined along dim 0, "
            f"where the samples must be. {WAY_OUT}"
        )
