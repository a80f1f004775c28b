"""Losses: every loss is a sum and a count. A mean over samples counts the samples.

by_name              the losses that a config can name
counted              `CountedLoss`, which every loss is resolved to
weights              the weights of the batches and micro-batches of a step
transformers_counts  counts for transformers models that return their own loss
metrics              the metrics of an evaluation
class_metrics        classification metrics by name, from torchmetrics
text_metrics         metrics of generated texts by name
"""

from hybridtrain.loss.by_name import (
    LOSSES,
    METRICS,
    CountFn,
    LossFn,
    accuracy,
    check_metric,
    cross_entropy,
    model_output,
    mse,
    nll,
)
from hybridtrain.loss.counted import (
    CountedLoss,
    MeanLoss,
    SumLoss,
    balanced_weights,
    resolve,
    unwrapped,
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
from hybridtrain.loss.text_metrics import OfTexts, check_number_of_tokens
from hybridtrain.loss.transformers_counts import WAY_OUT, count_of_output
from hybridtrain.loss.weights import (
    BatchWeight,
    MicrobatchCounts,
    ShareLoss,
    StepWeights,
    copied_to_host,
    microbatch_weights,
)

__all__ = [
    "IGNORED",
    "LOSSES",
    "METRICS",
    "WAY_OUT",
    "Accuracy",
    "BatchWeight",
    "CountFn",
    "CountedLoss",
    "LossFn",
    "MeanLoss",
    "Metric",
    "MicrobatchCounts",
    "OfTexts",
    "ShareLoss",
    "StepWeights",
    "SumLoss",
    "accuracy",
    "balanced_weights",
    "check_metric",
    "check_number_of_tokens",
    "check_reported",
    "copied_to_host",
    "count_of_output",
    "cross_entropy",
    "direction",
    "field_of",
    "main_output",
    "metric_of",
    "microbatch_weights",
    "model_output",
    "mse",
    "named_values",
    "nll",
    "resolve",
    "unwrapped",
    "zero_of",
]
