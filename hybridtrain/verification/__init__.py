"""Compares a pipeline with the module it was made from.

report        on request: training steps and evaluations of the stages, in full
forward_check automatically, before the first step of each kind of batch, on copies of the model
cut_model     what it compares, and up to which size
comparison    the difference between two results
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

__all__ = [
    "STATE",
    "TOLERANCES",
    "WHOLE_BATCH",
    "Compared",
    "CutModel",
    "ForwardCheck",
    "Verification",
    "undone",
    "verify",
]
