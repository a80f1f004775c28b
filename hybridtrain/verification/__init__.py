"""Does a pipeline compute what the module computes that it was made of?

report        the comparison that a user asks for: steps and evaluations of the run's own stages
self_check    the comparison before the first step of each kind of input, on copies of the model
comparison    the difference of two results
expressions   a run without data: which expression each tensor would hold
module_copy   copies of a module that behave as the module does
python_state  a snapshot of everything mutable that a module's code can reach
"""

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
    "SelfCheck",
    "Verification",
    "undone",
    "verify",
]
