"""The best evaluation of a run by one of its values, whose checkpoint is kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import ConfigError, did_you_mean
from hybridtrain.world import World


class BestCheckpoint:
    """Remembers the best evaluation so far.

    Args:
        name: the value to compare; None: none is best.
        mode: `min` or `max`.
        values: the values that an evaluation has; None: the run has no evaluation.

    Attributes:
        step: the step of the best evaluation; None before the first.
        value: what it gave.

    Raises:
        ConfigError: there is no such value.
    """

    def __init__(self, name: str | None, mode: str, values: Collection[str] | None) -> None:
        self.step: int | None = None
        self.value: float | None = None
        self._name = name
        self._smallest = mode == "min"
        if name is not None and values is None:
            raise ConfigError(f"best={name} needs an evaluation, and this run has none")
        if name is not None and name not in (values or ()):
            raise ConfigError(
                f"best={name} is not a value of the evaluation: {did_you_mean(name, values or ())}"
            )

    def improves(self, step: int, result: Mapping[str, float]) -> bool:
        """Returns whether `result`, the evaluation of `step`, is the best; remembers it then."""
        if self._name is None or not math.isfinite(value := result[self._name]):
            return False
        if self.value is not None:
            better = value < self.value if self._smallest else value > self.value
            if not better:
                return False
        self.step, self.value = step, value
        return True

    def mark(self, step: int, store: CheckpointStore, world: World) -> None:
        """Marks the checkpoint of `step`, which is saved, if it is the best; a collective call."""
        if self.step == step and self.value is not None:
            value = self.value
            world.on_main(lambda: store.mark_best(step, value))

    def state_dict(self) -> dict[str, Any]:
        """Returns the best step and value, in JSON's types."""
        return {"best_step": self.step, "best_value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`; checkpoints of earlier versions have none."""
        self.step, self.value = state.get("best_step"), state.get("best_value")
