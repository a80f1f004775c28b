"""Losses: a sum and a number. A mean over samples is one whose number is its samples.

`by_name` has the losses that a config names, `counted` what any loss is resolved to, `weights` how
its values are weighed in a step, `transformers_counts` what the models of transformers average
over, and `proof` compares a loss with its count in its first step: by calls of a copy (`captures`)
with equal random numbers (`replayed_draws`). `metrics` are what an evaluation adds up.
"""

from hybridtrain.loss.by_name import (
    LOSSES,
    METRICS,
    LossFn,
    accuracy,
    cross_entropy,
    model_output,
    mse,
    nll,
)
from hybridtrain.loss.captures import SeenLosses
from hybridtrain.loss.counted import CountedLoss, MeanLoss, SumLoss, resolve, zero_of
from hybridtrain.loss.metrics import (
    IGNORED,
    Accuracy,
    Metric,
    check_reported,
    direction,
    main_output,
    metric_of,
    named_values,
)
from hybridtrain.loss.proof import (
    LogProbabilityCheck,
    ModelLossProof,
    OutputProof,
    is_of_model,
    prove_in_training,
)
from hybridtrain.loss.transformers_counts import count_of_output
from hybridtrain.loss.weights import BatchWeight, StepWeights

__all__ = [
    "IGNORED",
    "LOSSES",
    "METRICS",
    "Accuracy",
    "BatchWeight",
    "CountedLoss",
    "LogProbabilityCheck",
    "LossFn",
    "MeanLoss",
    "Metric",
    "ModelLossProof",
    "OutputProof",
    "SeenLosses",
    "StepWeights",
    "SumLoss",
    "accuracy",
    "check_reported",
    "count_of_output",
    "cross_entropy",
    "direction",
    "is_of_model",
    "main_output",
    "metric_of",
    "model_output",
    "mse",
    "named_values",
    "nll",
    "prove_in_training",
    "resolve",
    "zero_of",
]
