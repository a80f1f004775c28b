"""One optimizer step, from the weights of its batches to the update; see `OptimizerStep`.

optimizer_step     the step, which Trainer, Session, smp and own loops are made of
finite_check       may the optimizer step?
non_finite         the buffers to put back if not, and where a value that is not finite began
loss_mean          the mean loss over steps and replicas
"""

from hybridtrain.step.finite_check import FiniteCheck
from hybridtrain.step.optimizer_step import (
    OptimizerStep,
    StepResult,
    check_lr_schedule,
)

__all__ = [
    "FiniteCheck",
    "OptimizerStep",
    "StepResult",
    "check_lr_schedule",
]
