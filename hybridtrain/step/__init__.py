"""One optimizer step, from the weights of its batches to the update; see `OptimizerStep`.

optimizer_step     the step, used by Trainer, Session, smp and custom loops
in_progress        the current step: its batches, results, norm and decision
finite_check       decides whether the optimizer may step
non_finite         buffers to restore if not, and the origin of a non-finite value
loss_mean          the mean loss over steps and replicas
lr_schedules       learning-rate schedules that PyTorch lacks, for the command line
param_groups       groups of parameters, and several optimizers combined into one
muon               Muon for matrices, and AdamW for the rest
state_bytes        the bytes of optimizer state of each parameter
sharded_optimizer  optimizer state sharded over the replicas
"""

from hybridtrain.step.finite_check import FiniteCheck
from hybridtrain.step.in_progress import StepInProgress
from hybridtrain.step.muon import MuonAdamW, muon_groups
from hybridtrain.step.optimizer_step import (
    OptimizerStep,
    StepResult,
    check_lr_schedule,
    check_not_past,
    steps_taken,
)
from hybridtrain.step.param_groups import (
    UNSUPPORTED_OPTIMIZERS,
    CombinedOptimizer,
    check_optimizer,
    fits,
    inner_optimizers,
    keys_of_state,
    learning_rates,
    matching,
    parameter_groups,
    show_weights,
    take_step,
)
from hybridtrain.step.sharded_optimizer import ReplicaShares, ShardedOptimizer, check_sharded
from hybridtrain.step.state_bytes import state_bytes

__all__ = [
    "UNSUPPORTED_OPTIMIZERS",
    "CombinedOptimizer",
    "FiniteCheck",
    "MuonAdamW",
    "OptimizerStep",
    "ReplicaShares",
    "ShardedOptimizer",
    "StepInProgress",
    "StepResult",
    "check_lr_schedule",
    "check_not_past",
    "check_optimizer",
    "check_sharded",
    "fits",
    "inner_optimizers",
    "keys_of_state",
    "learning_rates",
    "matching",
    "muon_groups",
    "parameter_groups",
    "show_weights",
    "state_bytes",
    "steps_taken",
    "take_step",
]
