"""Losses and metrics by name, for outputs with the classes in the last dimension or in dim 1.

A loss is the mean over the samples of a micro-batch; the trainer weighs these means by samples.

Of an output with a field `logits` (a mapping, a named tuple, a dataclass), that field is used. The
fields `aux_logits...` of a named tuple are those of auxiliary heads, whose losses are added with a
smaller weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrain.errors import ConfigError

if TYPE_CHECKING:
    from torchmetrics import Metric

LossFn = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of logits with class indices: (N, C) with (N), (N, T, C) with (N, T)."""
    return _over_heads(F.cross_entropy, outputs, targets)


def nll(outputs: Any, targets: Tensor) -> Tensor:
    """Negative log-likelihood of log-probabilities, as `log_softmax` returns them."""
    return _over_heads(F.nll_loss, outputs, targets)


def mse(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared error; both of the same shape."""
    return F.mse_loss(main_output(outputs), targets)


def accuracy() -> Metric:
    """A new `hybridtrain.metrics.Accuracy`."""
    from hybridtrain.metrics import Accuracy  # torchmetrics takes seconds to import

    return Accuracy()


LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy, "nll": nll, "mse": mse}
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
