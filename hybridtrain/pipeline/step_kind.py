"""The kind of a step: what decides which code its forwards run, told without running them.

    facts of batch and model ── StepKinds.of ──> StepKind ── its number ──> which checks are due

The checks of first steps look more closely at some steps of each kind: the first ones and later
powers of two, because state may change with the steps. All of them count the same steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from hybridtrain._base.precision import ThreadState
from hybridtrain._base.values import is_flat
from hybridtrain.pipeline.model_watch import ModelWatch

_AT_MOST = 10_000  # exact shapes that are remembered, for a fast lookup


class StepKind:
    """A kind of step.

    Attributes:
        number: how many steps of this kind have begun.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def begun(kind: StepKind | None) -> int:
    """Begins a step; returns its number within its kind, 1 for a step without a kind."""
    if kind is None:
        return 1
    kind.number += 1
    return kind.number


class StepKinds:
    """The kinds of steps that a pipeline has seen.

    Args:
        watch: knows the modules and parameters of the model.
        stages: the number of stages: as many micro-batches and one more can differ in what they
            find in one another's state.
    """

    def __init__(self, watch: ModelWatch, stages: int) -> None:
        self._watch = watch
        self._stages = stages
        self._kinds: dict[Hashable, StepKind] = {}
        self._of_shapes: dict[Hashable, StepKind] = {}

    def of(
        self, inputs: Any, sizes: Sequence[int], trains: bool, microbatches: int | None = None
    ) -> StepKind:
        """Returns the kind of a step.

        Args:
            inputs: the inputs of the batch, or of the first logical replica's share of it.
            sizes: the number of samples of each micro-batch of `inputs`.
            trains: whether a backward follows.
            microbatches: the number of micro-batches of all shares; None: `inputs` are all.
        """
        # Everything outside of the batch: modes of the thread and of the model.
        around = trains, microbatches or len(sizes), ThreadState.capture(), self._watch.facts
        exact: Hashable
        if type(inputs) is Tensor:  # most often
            exact = inputs.shape, inputs.dtype, inputs.requires_grad, around
        else:
            structure: Hashable
            if is_flat(inputs):
                leaves, structure = list(inputs.values()), tuple(inputs)
            else:
                leaves, structure = tree_flatten(inputs)
            shapes = [
                (v.shape, v.dtype, v.requires_grad) if isinstance(v, Tensor) else _fact_of(v)
                for v in leaves
            ]
            exact = *shapes, structure, around
        kind = self._of_shapes.get(exact)
        if kind is None:
            leaves, spec = tree_flatten(inputs)
            count = min(len(sizes), self._stages + 1)
            facts = *(_facts(leaves, size) for size in sizes[:count]), spec, *around
            kind = self._kinds.setdefault(facts, StepKind())
            if len(self._of_shapes) >= _AT_MOST:
                # Only a cache: the kinds and their numbers stay in `_kinds`.
                self._of_shapes.clear()
            self._of_shapes[exact] = kind
        return kind

    def of_parts(self, parts: Sequence[Any], trains: bool) -> StepKind:
        """Returns the kind of a step over micro-batches that the caller has cut."""
        around = trains, len(parts), ThreadState.capture(), self._watch.facts
        flat = [tree_flatten(part) for part in parts[: self._stages + 1]]
        facts = *(_facts(leaves, None) for leaves, _ in flat), flat[0][1], *around
        return self._kinds.setdefault(facts, StepKind())


def _facts(leaves: Sequence[Any], size: int | None) -> Hashable:
    """Returns what decides which code a micro-batch runs: no length but 0 and 1 does.

    Args:
        leaves: the inputs, of the batch or of the micro-batch.
        size: the number of samples of the micro-batch; None: `leaves` are those of a micro-batch.
    """
    return tuple(
        (leaf.dtype, leaf.requires_grad, tuple(min(n, 2) for n in _shape(leaf, size)))
        if isinstance(leaf, Tensor)
        else _fact_of(leaf)
        for leaf in leaves
    )


def _fact_of(value: Any) -> Any:
    """Returns what decides about code: a flag itself, of any other value the type."""
    return value if isinstance(value, bool) else type(value)


def _shape(tensor: Tensor, size: int | None) -> Sequence[int]:
    return tensor.shape if size is None or not tensor.dim() else (size, *tensor.shape[1:])
