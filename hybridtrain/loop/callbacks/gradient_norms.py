"""Logs the gradient norm of each part of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class GradientNorms(Callback):
    """Logs the L2 gradient norm of each part of the model, before `trainer.clip_norm`.

    The tags are `grad_norm/<part>`; `train/grad_norm` is the norm over the whole model. If a
    `ClipValue` precedes it in `callbacks`, the norms are of clipped elements.

    Args:
        depth: the number of leading name components that define a part: with 2,
            `layers.0.linear.weight` belongs to the part `layers.0`.

    Raises:
        ConfigError: `depth` is less than 1.
    """

    def __init__(self, depth: int = 1) -> None:
        if type(depth) is not int or depth < 1:
            raise ConfigError(f"{setting('depth', depth)} must be a whole number of at least 1")
        self._depth = depth
        self._norms: dict[str, Tensor] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Computes the norms if this step is logged."""
        if not trainer.logging:
            return
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                part = ".".join(name.split(".")[: self._depth])
                parts.setdefault(part, []).append(parameter.grad.detach())
        self._norms = {part: torch.nn.utils.get_total_norm(g) for part, g in parts.items()}

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the norms, summed over the processes that share a part."""
        parts = [(part, float(norm) ** 2) for part, norm in self._norms.items()]
        squares: dict[str, float] = {}
        for part, square in trainer.model.pipeline.gather(parts):
            squares[part] = squares.get(part, 0.0) + square
        values.update({f"grad_norm/{part}": square**0.5 for part, square in squares.items()})
