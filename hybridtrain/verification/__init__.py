"""Compares a pipeline with the module it was made from.

report        on request: training steps and evaluations of the stages, in full
self_check    automatically, before the first step of each kind of input, on copies of the model
forward_check the same for pipelines that run the model's own forward: with several micro-batches
cut_model     what both of them compare, and up to which size
comparison    the difference between two results
expressions   a run without data, in which each tensor has an expression instead of numbers
module_copy   copies of a module that keep its hooks and its shared parts
python_state  a snapshot of all mutable state that a module's code can reach
"""

from hybridtrain.verification.cut_model import CutModel
from hybridtrain.verification.forward_check import ForwardCheck
from hybridtrain.verification.python_state import undone
from hybridtrain.verification.report import (
    STATE,
    TOLERANCES,
    WHOLE_BATCH,
    Compared,
    Verification,
    verify,
)
from hybridtrain.verification.self_check import SelfCheck

__all__ = [
    "STATE",
    "TOLERANCES",
    "WHOLE_BATCH",
    "Compared",
    "CutModel",
    "ForwardCheck",
    "SelfCheck",
    "Verification",
    "undone",
    "verify",
]
