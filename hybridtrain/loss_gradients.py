"""The gradients that the backward of a step starts from."""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT = 64  # shares that change from step to step would otherwise fill the memory


class LossGradients:
    """Makes the gradient of a micro-batch's loss, which is its share of the samples."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, share: float, loss: Tensor) -> Tensor:
        """Returns `share` as a tensor like `loss`, which is detached.

        It is NaN if the loss is not finite, also where the derivative would be finite: then all
        replicas see it in the averaged gradients, and skip the step together.
        """
        key = share, loss.dtype, loss.device
        if key not in self._known:
            if len(self._known) == _KEPT:
                self._known.clear()
            self._known[key] = torch.full_like(loss, share)
        return torch.add(self._known[key], loss, alpha=0)
