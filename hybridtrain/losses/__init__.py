"""Losses: a sum and a number. A mean over samples is one whose number is its samples.

`by_name` has the losses that a config names, `counted` what any loss is resolved to, `weights` how
its values are weighed in a step, `transformers_counts` what the models of transformers average
over, and `proof` compares a loss with its count in its first step: by calls of a copy (`captures`)
with equal random numbers (`replayed_draws`).
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
from hybridtrain.losses.captures import SeenLosses
from hybridtrain.losses.counted import CountedLoss, MeanLoss, SumLoss, resolve, zero_of
from hybridtrain.losses.proof import (
    LogProbabilityCheck,
    ModelLossProof,
    OutputProof,
    is_of_model,
    prove_in_training,
)
from hybridtrain.losses.transformers_counts import count_of_output
from hybridtrain.losses.weights import BatchWeight, StepWeights
from hybridtrain.metrics import IGNORED

__all__ = [
    "IGNORED",
    "LOSSES",
    "METRICS",
    "BatchWeight",
    "CountedLoss",
    "LogProbabilityCheck",
    "LossFn",
    "MeanLoss",
    "ModelLossProof",
    "OutputProof",
    "SeenLosses",
    "StepWeights",
    "SumLoss",
    "accuracy",
    "count_of_output",
    "cross_entropy",
    "is_of_model",
    "model_output",
    "mse",
    "nll",
    "prove_in_training",
    "resolve",
    "zero_of",
]
