"""Stochastic weight averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.ema import EMA
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class SWA(EMA):
    """Averages the parameters of all steps from `start` on, with equal weights.

    It is used like an `EMA`, and instead of one: evaluations, checkpoints and exports use the
    average. Before `start`, the average equals the parameters.

    Args:
        start: the first step to average, 1 or more.
        every: the number of steps between two averaged steps.
        evaluates: False to evaluate with the parameters themselves.

    Raises:
        ConfigError: `start` or `every` is less than 1.

    Source: P. Izmailov et al., *Averaging Weights Leads to Wider Optima and Better Generalization*,
    arXiv:1803.05407. Use `torch.optim.swa_utils.update_bn` to recompute the running statistics of
    batch norm.
    """

    @names_checked
    def __init__(self, start: int, every: int = 1, evaluates: bool = True) -> None:
        super().__init__(evaluates=evaluates)
        for name, value in (("start", start), ("every", every)):
            if type(value) is not int or value < 1:
                raise ConfigError(f"{setting(name, value)} must be a whole number of at least 1")
        self._start = start
        self._every = every
        self._averaged = 0

    def on_init(self, trainer: Trainer) -> None:
        """Starts with the current weights, not averaged yet; rejects a second average."""
        if any(isinstance(other, EMA) and other is not self for other in trainer.callbacks):
            raise ConfigError("callbacks= has SWA and another weight average: use only one")
        super().on_init(trainer)
        self._averaged = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the average of all stages, and the number of averaged steps."""
        return {**super().state_dict(), "averaged": self._averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        super().load_state_dict(state)
        self._averaged = state["averaged"]

    def _decay_of(self, step: int) -> float:
        if step < self._start:
            self._averaged = 0
        elif (step - self._start) % self._every == 0:
            self._averaged += 1
            return (self._averaged - 1) / self._averaged
        return 1.0 if self._averaged else 0.0
