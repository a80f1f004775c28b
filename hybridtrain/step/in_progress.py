"""A step in progress: its batches and results, and the decision about it."""

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
    """One step of an `OptimizerStep`, created by `begin` and replaced by the next one.

    Attributes:
        number: the number of the step, from 1.
        batches: the inputs and targets of this replica's batches.
        loss_fn: the function that computed their losses; None if unknown.
        rng_step: `LayerRNG.step` before the first batch.
        by_microbatch: `batches` contains the inputs of each micro-batch, and no targets.
        weights: the weights of the batches in the step; None if the caller weights them.
        results: the results of the trained batches.
        is_trained: the last batch is done, which averages the gradients over the replicas.
        is_unscaled: the gradients were divided by the loss scale, which has yet to be updated.
        norm: the norm of the unscaled gradients of all stages; None until they are complete.
        may_step: whether the optimizers may step; None until that is decided.
        taken: the optimizers that have stepped or skipped the step.
        pending: the norm, while it is copied to the host after a device has decided.
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
