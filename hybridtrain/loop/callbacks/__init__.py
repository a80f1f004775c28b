"""Callbacks of a `Trainer`, and the names that a config has for them.

base               `Callback`, the moments of a run; the states of callbacks in a checkpoint
ready_made         averages of weights, early ends, plateaus, clipping, freezing, norms, rates
profile            PyTorch's profiler over some steps

The trackers of `hybridtrain.observe` (progress bar, TensorBoard, metrics file, timeline) are
callbacks too.
"""

from hybridtrain.loop.callbacks.base import Callback, CallbackStates
from hybridtrain.loop.callbacks.profile import Profile
from hybridtrain.loop.callbacks.ready_made import (
    EMA,
    SWA,
    BestWeights,
    ClipValue,
    EarlyStopping,
    Freeze,
    GradientNorms,
    LearningRates,
    Mfu,
    Plateau,
)

__all__ = [
    "CALLBACKS",
    "EMA",
    "SWA",
    "BestWeights",
    "Callback",
    "CallbackStates",
    "ClipValue",
    "EarlyStopping",
    "Freeze",
    "GradientNorms",
    "LearningRates",
    "Mfu",
    "Plateau",
    "Profile",
]

CALLBACKS: dict[str, type[Callback]] = {
    "best_weights": BestWeights,
    "clip_value": ClipValue,
    "early_stopping": EarlyStopping,
    "ema": EMA,
    "freeze": Freeze,
    "gradient_norms": GradientNorms,
    "learning_rates": LearningRates,
    "mfu": Mfu,
    "plateau": Plateau,
    "profile": Profile,
    "swa": SWA,
}
