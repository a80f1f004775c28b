"""Compares a pipeline with the module it was made from.

report         on request: training steps and evaluations of the stages, in full
first_steps    automatically: the checks of a model's first steps, and which of them are due
forward_check    the stages with plain PyTorch, on copies of the model
loss_proof       a loss with its count
joining          outputs for two numbers of samples
cut_model      what a check compares, and up to which size
comparison     the difference between two results
module_copy    copies of a module that keep its hooks and its shared parts
python_state   a snapshot of all mutable state that a module's code can reach
captures       the objects that a loss captures: copied, and compared over the ranks
replayed_draws the random numbers of a loss's call, for parts of its batch
"""

from hybridtrain.verification.captures import loss_facts
from hybridtrain.verification.cut_model import CutModel
from hybridtrain.verification.first_steps import FirstSteps
from hybridtrain.verification.forward_check import ForwardCheck
from hybridtrain.verification.loss_proof import LogProbabilityCheck, is_of_model
from hybridtrain.verification.python_state import undone
from hybridtrain.verification.report import (
    STATE,
    TOLERANCES,
    WHOLE_BATCH,
    Compared,
    Verification,
    verify,
)

__all__ = [
    "STATE",
    "TOLERANCES",
    "WHOLE_BATCH",
    "Compared",
    "CutModel",
    "FirstSteps",
    "ForwardCheck",
    "LogProbabilityCheck",
    "Verification",
    "is_of_model",
    "loss_facts",
    "undone",
    "verify",
]
