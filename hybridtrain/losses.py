"""Losses and metrics by name, for outputs with the classes in the last dimension or in dim 1.

A loss gives the mean over the rows of a micro-batch; the trainer weighs these means by rows. A
metric gives a sum and a count, which are added up over batches and replicas before they are
divided, so that every sample counts once.

An output with a field `logits` (a named tuple, a dataclass) counts by that. The fields
`aux_logits...` of a named tuple are those of auxiliary heads, whose losses are added with a smaller
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtrain.errors import ConfigError

LossFn = Callable[[Any, Tensor], Tensor]
MetricFn = Callable[[Any, Tensor], tuple[Tensor, int]]


def cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of logits with class indices: (N, C) with (N), (N, T, C) with (N, T)."""
    return _over_heads(F.cross_entropy, outputs, targets)


def nll(outputs: Any, targets: Tensor) -> Tensor:
    """Negative log-likelihood of what `log_softmax` gave."""
    return _over_heads(F.nll_loss, outputs, targets)


def mse(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared error; both of the same shape."""
    return F.mse_loss(main_output(outputs), targets)


def accuracy(outputs: Any, targets: Tensor) -> tuple[Tensor, int]:
    """How many of the most likely classes are right, and of how many."""
    logits, targets = _classes_in_dim_1(main_output(outputs), targets)
    return (logits.argmax(1) == targets).sum(), targets.numel()


LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy, "nll": nll, "mse": mse}
METRICS: dict[str, Callable[[], MetricFn]] = {"accuracy": lambda: accuracy}


def main_output(outputs: Any) -> Tensor:
    """What a prediction is made from: the output, or its field `logits`.

    Raises:
        ConfigError: there is no such tensor.
    """
    inside = outputs if isinstance(outputs, Mapping) else getattr(outputs, "__dict__", {})
    main = inside["logits"] if "logits" in inside else getattr(outputs, "logits", outputs)
    if not isinstance(main, Tensor):
        raise ConfigError(
            f"trainer.loss and trainer.metrics take a tensor, or an output with `logits`; the "
            f"model gives a {type(outputs).__name__}: return the logits, or train from Python "
            f"with a loss of your own"
        )
    return main


def _over_heads(
    loss_fn: Callable[[Tensor, Tensor], Tensor], outputs: Any, targets: Tensor
) -> Tensor:
    """The loss of the main output, and of the auxiliary heads' with their weight."""
    loss = loss_fn(*_classes_in_dim_1(main_output(outputs), targets))
    fields = getattr(outputs, "_fields", ())
    heads = [getattr(outputs, name) for name in fields if name.startswith("aux_logits")]
    # GoogLeNet, with two such heads, gives each 0.3 (Szegedy et al., Going Deeper with
    # Convolutions, 2015, section 5); Inception v3, with one, 0.4 (its authors' code in TensorFlow,
    # and PyTorch's tutorial on fine-tuning; the paper does not say).
    weight = 0.4 if len(heads) == 1 else 0.3
    for head in heads:
        loss = loss + weight * loss_fn(*_classes_in_dim_1(head, targets))
    return loss


def _classes_in_dim_1(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), torch.flatten(targets)
    return outputs, targets
