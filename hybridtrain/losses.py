"""Losses and metrics by name, for outputs with the classes in the last dimension or in dim 1.

A loss gives the mean over the rows of a micro-batch; the trainer weighs these means by rows. A
metric gives a sum and a count, which are added up over batches and replicas before they are
divided, so that every sample counts once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LossFn = Callable[[Tensor, Tensor], Tensor]
MetricFn = Callable[[Tensor, Tensor], tuple[Tensor, int]]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits with class indices: (N, C) with (N), (N, T, C) with (N, T)."""
    return F.cross_entropy(*_classes_in_dim_1(logits, targets))


def nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of what `log_softmax` gave."""
    return F.nll_loss(*_classes_in_dim_1(log_probabilities, targets))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error; both of the same shape."""
    return F.mse_loss(outputs, targets)


def accuracy(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """How many of the most likely classes are right, and of how many."""
    outputs, targets = _classes_in_dim_1(outputs, targets)
    return (outputs.argmax(1) == targets).sum(), targets.numel()


LOSSES: dict[str, LossFn] = {"cross_entropy": cross_entropy, "nll": nll, "mse": mse}
METRICS: dict[str, MetricFn] = {"accuracy": accuracy}


def _classes_in_dim_1(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), torch.flatten(targets)
    return outputs, targets
