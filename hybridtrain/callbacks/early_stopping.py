"""Early stopping.

Callbacks that add to the log: gradient norms of parts, and learning rates of all groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtrain.callbacks.base import Callback, Comparison
from hybridtrain.errors import ConfigError
from hybridtrain.options import names_checked

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer

_log = logging.getLogger(__name__)


class EarlyStopping(Callback):
    """Ends the run after `patience` consecutive evaluations without a better value.

    A run that has ended so is complete; resumed with a larger `patience`, it trains on.

    Args:
        value: `loss`, or the name of a metric.
        mode: `min` if the smallest value is best, `max` if the largest is.
        patience: evaluations.
        min_delta: by how much a value must be better to count, 0 or more.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @names_checked
    def __init__(
        self, value: str = "loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0
    ) -> None:
        if type(patience) is not int or patience < 1:
            raise ConfigError(f"patience={patience} must be a whole number of at least 1")
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta} must be 0 or more")
        self.patience = patience
        self._comparison = Comparison(value, mode)
        self._min_delta = min_delta
        self._best = math.inf
        self._without_progress = 0

    def on_init(self, trainer: Trainer) -> None:
        """Checks that there is such a value; begins to count."""
        self._comparison.check(trainer)
        self._best, self._without_progress = math.inf, 0

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Compares, and ends the run when the patience is over."""
        found = self._comparison.of(values)
        if found < self._best - self._min_delta or (
            math.isinf(self._best) and math.isfinite(found)
        ):
            self._best, self._without_progress = found, 0
            return
        self._without_progress += 1
        if self.stops and trainer.world.is_main:
            _log.info(
                "the run ends early, at step %d: %s has not become better in %d evaluations",
                trainer.step, self._comparison.value, self._without_progress,
            )  # fmt: skip

    @property
    def stops(self) -> bool:  # type: ignore[override]
        """True once the patience is over."""
        return self._without_progress >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the evaluations since."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "without_progress": self._without_progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`."""
        self._best = math.inf if state["best"] is None else state["best"]
        self._without_progress = state["without_progress"]


class GradientNorms(Callback):
    """Logs the L2 norm of the gradients of each part of the model, before clipping.

    The tags are `grad_norm/<part>`; `train/grad_norm` is that of the whole model.

    Args:
        depth: how many components of a parameter's name make a part: with 2,
            `layers.0.linear.weight` is of the part `layers.0`.

    Raises:
        ConfigError: `depth` is less than 1.
    """

    def __init__(self, depth: int = 1) -> None:
        if type(depth) is not int or depth < 1:
            raise ConfigError(f"depth={depth} must be a whole number of at least 1")
        self._depth = depth
        self._norms: dict[str, Tensor] = {}

    def on_gradients(self, trainer: Trainer) -> None:
        """Takes the norms, if this step is logged."""
        if not trainer.logging:
            return
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                part = ".".join(name.split(".")[: self._depth])
                parts.setdefault(part, []).append(parameter.grad.detach())
        self._norms = {part: torch.nn.utils.get_total_norm(g) for part, g in parts.items()}

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds the norms; parts that several processes share are put together."""
        squares: dict[str, float] = {}
        own = {part: float(norm) ** 2 for part, norm in self._norms.items()}
        world = trainer.world
        found = [own]
        if world.pipeline_group is not None:
            found = world.gather(own if world.replica == 0 else {})
        for each in found:
            for part, square in each.items():
                squares[part] = squares.get(part, 0.0) + square
        values.update({f"grad_norm/{part}": square**0.5 for part, square in squares.items()})


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
