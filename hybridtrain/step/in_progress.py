"""A step in progress: what it is trained on, and what was decided of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hybridtrain._base.accelerator import PendingNumbers
from hybridtrain.loss import LossFn, StepWeights
from hybridtrain.model import TrainStepResult


@dataclass(eq=False)
class StepInProgress:
    """One step of an `OptimizerStep`, which makes it in `begin` and has the next one follow.

    Attributes:
        number: of the step, from 1 on.
        batches: the inputs and targets of this replica's batches.
        loss_fn: what computed their losses; None if it is not known.
        rng_step: `LayerRNG.step` before the first of them.
        by_microbatch: `batches` have the inputs of each micro-batch, and no targets.
        weights: of the batches in the step; None where somebody else weighs them.
        results: of the batches that were trained on.
        is_trained: the last batch was trained on, which averages the gradients over the replicas.
        is_unscaled: the gradients were divided by the scale of the loss, which is to be adapted.
        norm: of the unscaled gradients of all stages; None before they are complete.
        may_step: whether the optimizers may step; None before that is decided.
        taken: the optimizers that have stepped, or have left the step out.
        pending: the norm on its way to the host, where a device has decided.
    """

    number: int
    batches: Sequence[tuple[Any, Any]]
    loss_fn: LossFn | None
    rng_step: int
    by_microbatch: bool = False
    weights: StepWeights | None = None
    results: list[TrainStepResult] = field(default_factory=list)
    is_trained: bool = False
    is_unscaled: bool = False
    norm: Tensor | None = None
    may_step: bool | None = None
    taken: list[Optimizer] = field(default_factory=list)
    pending: PendingNumbers | None = None

    @property
    def is_empty(self) -> bool:
        """True if no target of any replica counts."""
        return self.weights is not None and not self.weights.total
