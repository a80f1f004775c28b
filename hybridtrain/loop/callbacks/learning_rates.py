"""Logs the learning rate of each parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.step import learning_rates

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class LearningRates(Callback):
    """Logs the learning rate of each parameter group as `lr/<name or index>`.

    `train/lr` is the rate of the first group. The values are the rates used by the step. Groups
    with different rates are logged even without this callback.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Reads the rates, before the schedule changes them."""
        if trainer.logging:
            self._rates = learning_rates(trainer.optimizer)

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the rates."""
        values.update(self._rates)
