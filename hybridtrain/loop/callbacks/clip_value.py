"""Clips gradients elementwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class ClipValue(Callback):
    """Clips each gradient element to the range [-`value`, `value`].

    `trainer.clip_norm` is the usual choice, because it preserves the gradient's direction. It and
    the logged norm `train/grad_norm` are computed after this clipping.

    Args:
        value: the largest absolute value, positive.

    Raises:
        ConfigError: `value` is not positive.
    """

    @names_checked
    def __init__(self, value: float) -> None:
        if not value > 0:
            raise ConfigError(f"{setting('value', value)} must be positive")
        self._value = value

    def on_gradients(self, trainer: Trainer) -> None:
        """Clips the gradients of this process's stages."""
        for parameter in trainer.model.parameters():
            if (grad := parameter.grad) is not None:
                # infinite elements become NaN, so that the step is skipped
                grad.copy_(grad.clamp(-self._value, self._value) + 0 * grad)
