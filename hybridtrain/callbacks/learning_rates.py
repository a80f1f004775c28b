"""The learning rates of all parameter groups, in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtrain.callbacks.base import Callback

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer


class LearningRates(Callback):
    """Logs the learning rate of each parameter group, as `lr/<its name or number>`.

    `train/lr` is that of the first group. Each is the rate that the step was taken with.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Reads the rates, before the schedule changes them."""
        if trainer.logging:
            groups = enumerate(trainer.optimizer.param_groups)
            self._rates = {f"lr/{g.get('name', i)}": float(g["lr"]) for i, g in groups}

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the rates."""
        values.update(self._rates)
