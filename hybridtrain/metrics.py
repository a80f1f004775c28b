"""Metrics that torchmetrics does not have in this form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from hybridtrain.losses import IGNORED, classes_in_dim_1, main_output


class Accuracy(Metric):
    """The share of predictions that are right; NaN without any. Targets of -100 are left out.

    Unlike torchmetrics' own, it needs no number of classes and takes them in the last dimension
    too: (N, C) with (N), (N, T, C) with (N, T), (N, C, ...) with (N, ...).
    """

    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("correct", "total"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Adds the predictions of a batch."""
        logits, targets = classes_in_dim_1(main_output(outputs), targets)
        self.correct += (logits.argmax(1) == targets).sum()  # which -100 never is
        self.total += (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        """Returns the accuracy, 0-dim, float64."""
        return self.correct.double() / self.total
