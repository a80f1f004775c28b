"""Ends a run that stops improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback, Comparison
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer

_log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Ends the run after `patience` consecutive evaluations without improvement.

    Such a run counts as complete; resume it with a larger `patience` to train further.

    Args:
        value: `loss`, or the name of a metric.
        mode: `min` if smaller is better, `max` if larger is better; None to infer it from the
            value, as `TrainerOptions.best_mode` does.
        patience: the number of evaluations.
        min_delta: the smallest change that counts as an improvement, 0 or more.

    Raises:
        ConfigError: an argument is out of its range.
    """

    needs_evaluations = True

    @names_checked
    def __init__(
        self,
        value: str = "loss",
        mode: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        if type(patience) is not int or patience < 1:
            raise ConfigError(
                f"{setting('patience', patience)} must be a whole number of at least 1"
            )
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"{setting('min_delta', min_delta)} must be 0 or more")
        self.patience = patience
        self._comparison = Comparison(value, mode)
        self._min_delta = min_delta
        self._best = math.inf
        self._without_progress = 0

    def on_init(self, trainer: Trainer) -> None:
        """Checks that the value exists, and resets the count."""
        self._comparison.check(trainer)
        self._best, self._without_progress = math.inf, 0

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Compares the value, and ends the run when patience runs out."""
        if self.is_over(values) and trainer.world.is_main:
            _log.info(
                "stopping early at step %d: %s has not improved in %d evaluations",
                trainer.step, self._comparison.value, self._without_progress,
            )  # fmt: skip

    def is_over(self, values: Mapping[str, float]) -> bool:
        """Counts an evaluation; returns whether patience has run out."""
        value = self._comparison.of(values)
        if value < self._best - self._min_delta or (
            math.isinf(self._best) and math.isfinite(value)
        ):
            self._best, self._without_progress = value, 0
        else:
            self._without_progress += 1
        return self.stops

    def begin_again(self) -> None:
        """Resets the count."""
        self._without_progress = 0

    @property
    def stops(self) -> bool:  # type: ignore[override]
        """True once patience has run out."""
        return self._without_progress >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the number of evaluations since then."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "without_progress": self._without_progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._without_progress = state["without_progress"]
