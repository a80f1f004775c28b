"""The losses and metrics that a config can choose by name.

They take outputs with the classes in the last dimension or in dim 1. If an output has a field
`logits` (a mapping, a named tuple, a dataclass), they use that field. The fields `aux_logits...` of
a named tuple are outputs of auxiliary heads, whose losses are added with a smaller weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrain.errors import ConfigError, check_choice, setting
from hybridtrain.loss.class_metrics import KINDS, ByClass
from hybridtrain.loss.metrics import (
    Accuracy,
    Metric,
    Perplexity,
    classes_in_dim_1,
    field_of,
    main_output,
)
from hybridtrain.loss.text_metrics import TEXT_METRICS

LossFn = Callable[[Any, Any], Tensor]

# `count(inputs, targets)` of a batch or micro-batch returns the number of elements its loss counts.
CountFn = Callable[[Any, Any], int | float | Tensor]


def cross_entropy(
    outputs: Any, targets: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of logits with class indices: (N, C) with (N), (N, T, C) with (N, T).

    It averages over the targets that are not -100, weighted by their class weights; with
    probabilities as targets, (N, C), it averages over the samples.
    """
    return _over_heads(F.cross_entropy, outputs, targets, weight, label_smoothing=label_smoothing)


def nll(
    outputs: Any, targets: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Negative log-likelihood of log-probabilities, as returned by `log_softmax`.

    It averages over the targets that are not -100, weighted by their class weights.
    """
    if label_smoothing:  # log-probabilities are logits of the same probabilities
        return cross_entropy(outputs, targets, weight=weight, label_smoothing=label_smoothing)
    return _over_heads(F.nll_loss, outputs, targets, weight)


def bce(outputs: Any, targets: Tensor, *, weight: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of logits with labels 0 or 1, both (N, C): the mean over all of them.

    `weight`, (C), multiplies the loss of each label that is 1.
    """
    logits = _in_float(main_output(outputs))
    weight = None if weight is None else weight.to(logits.device, logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), pos_weight=weight)


def mse(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared error of two tensors of the same shape."""
    return F.mse_loss(main_output(outputs), targets)


def model_output(output: Any, targets: Any) -> Tensor:
    """Returns `output.loss`, for a model that computes its loss from labels among its inputs.

    For models of transformers, `hybridtrain.loss.transformers_counts` knows the elements that the
    loss averages over.
    """
    loss = field_of(output, "loss")
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{setting('loss', 'model_output')} needs a model output with `loss`, but this model "
            f"returns a {type(output).__name__} without it: are its labels among the inputs?"
        )
    return loss


def accuracy() -> Metric:
    """Returns a new `hybridtrain.loss.metrics.Accuracy`."""
    return Accuracy()


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "nll": nll,
    "bce": bce,
    "mse": mse,
    "model_output": model_output,
}
METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": accuracy,
    "perplexity": Perplexity,
    **{name: partial(ByClass, name) for name in KINDS},
    **TEXT_METRICS,
}
"""Metrics by name; the ones from `hybridtrain.loss.class_metrics` take the data's classes."""

# Other scores of whole texts, by the beginnings of their names.
_OF_TEXTS = ("rouge", "bleu", "sacrebleu", "chrf", "meteor", "bertscore")


def check_metric(key: str, name: Any) -> None:
    """Checks that a metric has a name.

    Args:
        key: of the setting, for messages.
        name: of the metric.

    Raises:
        ConfigError: the name is unknown; for another score of texts, says which there are.
    """
    if name not in METRICS and str(name).lower().startswith(_OF_TEXTS):
        raise ConfigError(
            f"{setting(key, name)} is unknown; the metrics of generated texts are "
            f"{' and '.join(TEXT_METRICS)}. For others, run `hybridtrain export "
            f"format=transformers`, generate with transformers, and score the result "
            f"(docs/export.md, 'Generate text')"
        )
    check_choice(key, name, METRICS)


def _over_heads(
    function: Callable[..., Tensor],
    outputs: Any,
    targets: Tensor,
    class_weights: Tensor | None,
    **settings: Any,
) -> Tensor:
    """The loss of the main output, plus the weighted losses of the auxiliary heads."""
    main = _in_float(main_output(outputs))
    if class_weights is not None:
        settings["weight"] = class_weights.to(main.device, main.dtype)
    loss_fn = partial(function, **settings)
    loss = loss_fn(*classes_in_dim_1(main, targets))
    fields = getattr(outputs, "_fields", ())
    heads = [getattr(outputs, name) for name in fields if name.startswith("aux_logits")]
    # GoogLeNet, with two such heads, gives each 0.3 (Szegedy et al., Going Deeper with
    # Convolutions, 2015, section 5); Inception v3, with one, 0.4 (its authors' code in TensorFlow,
    # and PyTorch's tutorial on fine-tuning; the paper does not say).
    weight = 0.4 if len(heads) == 1 else 0.3
    for head in heads:
        loss = loss + weight * loss_fn(*classes_in_dim_1(_in_float(head), targets))
    return loss


def _in_float(logits: Tensor) -> Tensor:
    """Returns half-precision logits as float32, as autocast does in a loss."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
