"""Lowers the learning rate of a run that stops improving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.loop.callbacks.early_stopping import EarlyStopping
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class Plateau(Callback):
    """Lowers the learning rate when an evaluation value stops improving.

    Follows the rule of `torch.optim.lr_scheduler.ReduceLROnPlateau`, and multiplies the rate of the
    run's schedule. The checkpoint records the reductions, so a resumed run has bitwise identical
    rates.

    Args:
        value: `loss`, or the name of a metric.
        mode: `min` if smaller is better, `max` if larger is better; None to infer it from the
            value, as `TrainerOptions.best_mode` does.
        factor: the multiplier of each reduction, between 0 and 1.
        patience: the number of evaluations without improvement before a reduction.
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
        factor: float = 0.1,
        patience: int = 3,
        min_delta: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ConfigError(f"{setting('factor', factor)} must be between 0 and 1")
        self._factor = factor
        self._stopping = EarlyStopping(value, mode, patience + 1, min_delta)
        self._lowered: list[int] = []  # the steps

    def on_init(self, trainer: Trainer) -> None:
        """Checks that the value exists, and wraps the learning rate schedule."""
        self._stopping.on_init(trainer)
        self._lowered = []
        schedule = trainer.lr_schedule
        inner = schedule._inner if isinstance(schedule, _Lowered) else schedule
        trainer.lr_schedule = _Lowered(trainer.optimizer, inner, self._lowered, self._factor)

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Compares the value, and lowers the rates when patience runs out."""
        if self._stopping.is_over(values):
            self._stopping.begin_again()
            self._lowered.append(trainer.step)
            assert isinstance(trainer.lr_schedule, _Lowered)
            trainer.lr_schedule.lower()

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps at which the rates were lowered, and the evaluations since then."""
        return {"lowered": list(self._lowered), **self._stopping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._lowered[:] = state["lowered"]
        self._stopping.load_state_dict(state)


class _Lowered(LRScheduler):
    """A schedule with rates lowered after given steps.

    The wrapped schedule never sees a lowered rate: many schedules, such as cosine annealing,
    compute the next rate from the current one and would undo the reduction.
    """

    def __init__(
        self, optimizer: Optimizer, inner: LRScheduler | None, steps: Sequence[int], factor: float
    ) -> None:
        self.optimizer = optimizer
        self._inner, self._steps, self._factor = inner, steps, factor
        self._done = 0
        self._given = self._rates()

    def step(self, epoch: int | None = None) -> None:
        self._done += 1
        times = self._steps.count(self._done)
        if self._inner is not None:
            for group, rate in zip(self.optimizer.param_groups, self._given, strict=False):
                group["lr"] = _copied(rate, group["lr"])
            self._inner.step()
            self._given = self._rates()
            times = sum(step <= self._done for step in self._steps)
        for _ in range(times):
            self.lower()

    def lower(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= self._factor

    def get_last_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _rates(self) -> list[float | Tensor]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _copied(rate: float | Tensor, into: float | Tensor) -> float | Tensor:
    """Returns `rate`, stored in a tensor `into`, which a compiled step may hold."""
    return into.copy_(torch.as_tensor(rate)) if isinstance(into, Tensor) else rate
