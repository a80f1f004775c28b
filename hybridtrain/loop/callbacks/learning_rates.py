"""Logs the learning rate of each parameter group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.step import learning_rates

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class LearningRates(Callback):
    """Logs the learning rate of each parameter group, as `lr/<its name or number>`.

    `train/lr` is that of the first group. Each is the rate that the step was taken with. Groups
    whose rates differ are logged without it too.
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
