"""Losses: a sum and a number. A mean over samples is one whose number is its samples.

`by_name` has the losses that a config names, `counted` what any loss is resolved to, `weights` how
its values are weighed in a step, `transformers_counts` what the models of transformers average
over, and `proof` compares a loss with its count in its first step.
"""

from hybridtrain.losses.by_name import (
    LOSSES,
    METRICS,
    LossFn,
    accuracy,
    cross_entropy,
    model_output,
    mse,
    nll,
)
from hybridtrain.losses.counted import CountedLoss, MeanLoss, SumLoss, resolve
from hybridtrain.losses.weights import StepWeights
from hybridtrain.metrics import IGNORED

__all__ = [
    "IGNORED",
    "LOSSES",
    "METRICS",
    "CountedLoss",
    "LossFn",
    "MeanLoss",
    "StepWeights",
    "SumLoss",
    "accuracy",
    "cross_entropy",
    "model_output",
    "mse",
    "nll",
    "resolve",
]
