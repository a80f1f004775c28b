"""Losses: every loss is a sum and a count. A mean over samples counts the samples.

by_name              the losses that a config can name
counted              `CountedLoss`, which every loss is resolved to
weights              the weights of the batches and micro-batches of a step
transformers_counts  counts for transformers models that return their own loss
proof                compares a loss with its count in the first step,
captures             by calling a copy of the loss
replayed_draws       with the same random numbers
metrics              the metrics of an evaluation
class_metrics        classification metrics by name, from torchmetrics
text_metrics         metrics of generated texts by name
"""

from hybridtrain.loss.by_name import (
    LOSSES,
    METRICS,
    LossFn,
    accuracy,
    check_metric,
    cross_entropy,
    model_output,
    mse,
    nll,
)
from hybridtrain.loss.captures import SeenLosses
from hybridtrain.loss.counted import (
    CountedLoss,
    MeanLoss,
    SumLoss,
    balanced_weights,
    resolve,
    zero_of,
)
from hybridtrain.loss.metrics import (
    IGNORED,
    Accuracy,
    Metric,
    check_reported,
    direction,
    field_of,
    main_output,
    metric_of,
    named_values,
)
from hybridtrain.loss.proof import (
    LogProbabilityCheck,
    ModelLossProof,
    OutputProof,
    is_of_model,
)
from hybridtrain.loss.text_metrics import OfTexts, check_number_of_tokens
from hybridtrain.loss.transformers_counts import count_of_output
from hybridtrain.loss.weights import (
    BatchWeight,
    MicrobatchCounts,
    ShareLoss,
    StepWeights,
    microbatch_weights,
)

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
    "MicrobatchCounts",
    "ModelLossProof",
    "OfTexts",
    "OutputProof",
    "SeenLosses",
    "ShareLoss",
    "StepWeights",
    "SumLoss",
    "accuracy",
    "balanced_weights",
    "check_metric",
    "check_number_of_tokens",
    "check_reported",
    "count_of_output",
    "cross_entropy",
    "direction",
    "field_of",
    "is_of_model",
    "main_output",
    "metric_of",
    "microbatch_weights",
    "model_output",
    "mse",
    "named_values",
    "nll",
    "resolve",
    "zero_of",
]
