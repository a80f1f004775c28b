"""Callbacks of a `Trainer`, and the names that a config has for them.

base               `Callback`, the moments of a run; the states of callbacks in a checkpoint
ready_made         averages of the weights, early stopping, freezing, norms, rates and MFU
profile            PyTorch's profiler over some steps

The monitors of `hybridtrain.monitor` (progress bar, TensorBoard, metrics file, timeline) are
callbacks too.
"""

from hybridtrain.callbacks.base import Callback, CallbackStates
from hybridtrain.callbacks.profile import Profile
from hybridtrain.callbacks.ready_made import (
    EMA,
    BestWeights,
    EarlyStopping,
    Freeze,
    GradientNorms,
    LearningRates,
    Mfu,
)

__all__ = [
    "CALLBACKS",
    "EMA",
    "BestWeights",
    "Callback",
    "CallbackStates",
    "EarlyStopping",
    "Freeze",
    "GradientNorms",
    "LearningRates",
    "Mfu",
    "Profile",
]

CALLBACKS: dict[str, type[Callback]] = {
    "best_weights": BestWeights,
    "early_stopping": EarlyStopping,
    "ema": EMA,
    "freeze": Freeze,
    "gradient_norms": GradientNorms,
    "learning_rates": LearningRates,
    "mfu": Mfu,
    "profile": Profile,
}
