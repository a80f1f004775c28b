"""Callbacks of a `Trainer`, and their names in a config.

base               `Callback`, the hooks of a run; callback states in a checkpoint
tracker            `Tracker`, a callback that reports a run and cannot end it

Every other module defines one callback of `CALLBACKS`. The trackers are in `hybridtrain.observe`.
"""

from typing import TYPE_CHECKING

from hybridtrain._base.registry import import_on_first_use
from hybridtrain.loop.callbacks.base import Callback, CallbackStates
from hybridtrain.loop.callbacks.tracker import Run, Tracker

if TYPE_CHECKING:
    from hybridtrain.loop.callbacks.best_weights import BestWeights
    from hybridtrain.loop.callbacks.clip_value import ClipValue
    from hybridtrain.loop.callbacks.early_stopping import EarlyStopping
    from hybridtrain.loop.callbacks.ema import EMA
    from hybridtrain.loop.callbacks.freeze import Freeze
    from hybridtrain.loop.callbacks.gradient_norms import GradientNorms
    from hybridtrain.loop.callbacks.learning_rates import LearningRates
    from hybridtrain.loop.callbacks.mfu import Mfu
    from hybridtrain.loop.callbacks.plateau import Plateau
    from hybridtrain.loop.callbacks.profile import Profile
    from hybridtrain.loop.callbacks.samples import Samples
    from hybridtrain.loop.callbacks.swa import SWA

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
    "Run",
    "Samples",
    "Tracker",
]

CALLBACKS: dict[str, str] = {
    "best_weights": "hybridtrain.loop.callbacks.best_weights:BestWeights",
    "clip_value": "hybridtrain.loop.callbacks.clip_value:ClipValue",
    "early_stopping": "hybridtrain.loop.callbacks.early_stopping:EarlyStopping",
    "ema": "hybridtrain.loop.callbacks.ema:EMA",
    "freeze": "hybridtrain.loop.callbacks.freeze:Freeze",
    "gradient_norms": "hybridtrain.loop.callbacks.gradient_norms:GradientNorms",
    "learning_rates": "hybridtrain.loop.callbacks.learning_rates:LearningRates",
    "mfu": "hybridtrain.loop.callbacks.mfu:Mfu",
    "plateau": "hybridtrain.loop.callbacks.plateau:Plateau",
    "profile": "hybridtrain.loop.callbacks.profile:Profile",
    "samples": "hybridtrain.loop.callbacks.samples:Samples",
    "swa": "hybridtrain.loop.callbacks.swa:SWA",
}
"""The callbacks that a config can name, as `module:class`; imported on first use."""

import_on_first_use(__name__, CALLBACKS.values())
