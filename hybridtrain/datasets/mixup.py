"""Mixup: samples that are weighted means of two samples and of their class probabilities.

Source: H. Zhang et al., mixup: Beyond Empirical Risk Minimization, 2018 (arXiv:1710.09412).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridtrain.errors import DataError, setting


class MixedUp(Dataset[Any]):
    """Samples of a data set, each mixed with another randomly drawn sample.

    Items are `(input, probabilities)`: share x sample + (1 - share) x other sample, and float32 of
    shape (classes,). The share is drawn from Beta(alpha, alpha). Both are drawn per sample, not per
    batch, so they do not depend on batches, processes or micro-batches.

    Args:
        dataset: a data set with the method `labels`.
        alpha: above 0; 0.2 is usual for images. A large alpha gives shares near one half.
        classes: the number of classes.

    Raises:
        DataError: `alpha` is not above 0.
    """

    def __init__(self, dataset: Any, alpha: float, classes: int) -> None:
        if alpha <= 0:
            raise DataError(f"{setting('mixup', alpha)} must be above 0")
        self.dataset = dataset
        self.labels = dataset.labels
        self._alpha = alpha
        self._classes = classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        share = float(torch.distributions.Beta(self._alpha, self._alpha).sample())
        other = int(torch.randint(len(self), ()))
        (first, label), (second, other_label) = self.dataset[index], self.dataset[other]
        probabilities = torch.zeros(self._classes)
        probabilities[label] += share
        probabilities[other_label] += 1 - share
        return share * first + (1 - share) * second, probabilities
