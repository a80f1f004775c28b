"""Does a pipeline compute what the module computes that it was made of?

report        the comparison that a user asks for: steps and evaluations of the run's own stages
self_check    the comparison before the first step of each kind of input, on copies of the model
comparison    how far two results are apart
expressions   a run without data: which expression each tensor would hold
module_copy   copies of a module that behave as the module does
python_state  what the code of a module can reach, put back after a run
"""

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
    "verify",
]
