"""One optimizer step, from the weights of its batches to the update; see `OptimizerStep`."""

from hybridtrain.step.finite_check import FiniteCheck
from hybridtrain.step.optimizer_check import check_lr_schedule
from hybridtrain.step.optimizer_step import OptimizerStep, StepResult, find_checkpoint, replay

__all__ = [
    "FiniteCheck",
    "OptimizerStep",
    "StepResult",
    "check_lr_schedule",
    "find_checkpoint",
    "replay",
]
