"""Losses with a count of what they average over, and losses and metrics by name.

A plain `loss_fn(output, targets)` returns the mean over the samples of a micro-batch. `SumLoss` and
`MeanLoss` say what else a loss averages over; see `hybridtrain.loss_counts` for the losses whose
count is known.

The losses that are chosen by name take outputs with the classes in the last dimension or in dim 1.
Of an output with a field `logits` (a mapping, a named tuple, a dataclass), that field is used. The
fields `aux_logits...` of a named tuple are those of auxiliary heads, whose losses are added with a
smaller weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from hybridtrain.metrics import Metric

IGNORED = -100
"""The target that PyTorch's losses leave out."""

LossFn = Callable[[Any, Any], Tensor]

# `count(inputs, targets)` of a batch or of one micro-batch: how many elements its loss counts.
CountFn = Callable[[Any, Any], int | float | Tensor]


@dataclass(frozen=True)
class SumLoss:
    """A loss that is a sum, and how many elements it sums.

    A step is the sum over all micro-batches, batches and replicas divided by the sum of their
    counts. Any callable with a method `count` is such a loss too.

    >>> SumLoss(
    ...     lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
    ...     lambda inputs, targets: (targets != -100).sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_sum: `loss_sum(output, targets)` of one micro-batch, a 0-dim tensor.
        count: `count(inputs, targets)` of one batch, before its forward: an int, a float (such as
            a sum of weights) or a 0-dim tensor. The count of a batch must be the sum of the counts
            of its samples.
    """

    loss_sum: LossFn
    count: CountFn

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Returns the sum of one micro-batch."""
        return self.loss_sum(output, targets)


@dataclass(frozen=True)
class MeanLoss:
    """A loss that is a mean over what `count` counts, such as the labels that are not ignored.

    Each micro-batch is weighted by its count. A micro-batch that counts nothing contributes
    nothing, and `loss_mean` is not called for it.

    >>> MeanLoss(
    ...     lambda output, _: output.loss,  # of a causal language model, which has no first label
    ...     lambda inputs, _: (inputs["labels"] != -100)[:, 1:].sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_mean: `loss_mean(output, targets)` of one micro-batch, a 0-dim tensor.
        count: as in `SumLoss`, of one batch or one micro-batch.
    """

    loss_mean: LossFn
    count: CountFn

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Returns the mean of one micro-batch."""
        return self.loss_mean(output, targets)


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of logits with class indices: (N, C) with (N), (N, T, C) with (N, T).

    The mean over the targets that are not -100.
    """
    return _over_heads(F.cross_entropy, outputs, targets)


def nll(outputs: Any, targets: Tensor) -> Tensor:
    """Negative log-likelihood of log-probabilities, as `log_softmax` returns them.

    The mean over the targets that are not -100.
    """
    return _over_heads(F.nll_loss, outputs, targets)


def mse(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared error; both of the same shape."""
    return F.mse_loss(main_output(outputs), targets)


def model_output(output: Any, targets: Any) -> Tensor:
    """The model's own loss, `output.loss`, for a model that is given its labels as an input.

    What it averages over is known for models of transformers; see
    `hybridtrain.output_loss.count_of_output`.
    """
    fields = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    loss = fields["loss"] if "loss" in fields else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"loss=model_output needs a model whose output has `loss`; this one gives a "
            f"{type(output).__name__} without: are its labels among the inputs?"
        )
    return loss


def accuracy() -> Metric:
    """A new `hybridtrain.metrics.Accuracy`."""
    from hybridtrain.metrics import Accuracy  # which imports this module

    return Accuracy()


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "nll": nll,
    "mse": mse,
    "model_output": model_output,
}
METRICS: dict[str, Callable[[], Metric]] = {"accuracy": accuracy}


def main_output(outputs: Any) -> Tensor:
    """Returns the tensor that predictions are made from: the output, or its field `logits`.

    Raises:
        ConfigError: there is no such tensor.
    """
    fields = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    main = fields["logits"] if "logits" in fields else getattr(outputs, "logits", outputs)
    if not isinstance(main, Tensor):
        raise ConfigError(
            f"the losses and metrics that are chosen by name take a tensor, or an output with "
            f"`logits`; the model gives a {type(outputs).__name__}: return the logits, or train "
            f"from Python with your own loss_fn="
        )
    return main


def classes_in_dim_1(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flattens (N, T, C) with (N, T) to (N * T, C) with (N * T); others are returned unchanged."""
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), torch.flatten(targets)
    return outputs, targets


def _over_heads(
    loss_fn: Callable[[Tensor, Tensor], Tensor], outputs: Any, targets: Tensor
) -> Tensor:
    """The loss of the main output, plus the weighted losses of the auxiliary heads."""
    loss = loss_fn(*classes_in_dim_1(main_output(outputs), targets))
    fields = getattr(outputs, "_fields", ())
    heads = [getattr(outputs, name) for name in fields if name.startswith("aux_logits")]
    # GoogLeNet, with two such heads, gives each 0.3 (Szegedy et al., Going Deeper with
    # Convolutions, 2015, section 5); Inception v3, with one, 0.4 (its authors' code in TensorFlow,
    # and PyTorch's tutorial on fine-tuning; the paper does not say).
    weight = 0.4 if len(heads) == 1 else 0.3
    for head in heads:
        loss = loss + weight * loss_fn(*classes_in_dim_1(head, targets))
    return loss
