"""Callbacks of a `Trainer`, and the names that a config has for them.

The monitors of `hybridtrain.monitor` (progress bar, TensorBoard, metrics file, timeline) are
callbacks too.
"""

from hybridtrain.callbacks.base import Callback, CallbackStates
from hybridtrain.callbacks.best_weights import BestWeights
from hybridtrain.callbacks.early_stopping import EarlyStopping, GradientNorms, LearningRates
from hybridtrain.callbacks.ema import EMA
from hybridtrain.callbacks.freeze import Freeze

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
]

CALLBACKS: dict[str, type[Callback]] = {
    "best_weights": BestWeights,
    "early_stopping": EarlyStopping,
    "ema": EMA,
    "freeze": Freeze,
    "gradient_norms": GradientNorms,
    "learning_rates": LearningRates,
}
