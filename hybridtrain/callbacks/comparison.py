"""The comparison of evaluations by one of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridtrain.errors import ConfigError, check_choice, did_you_mean

if TYPE_CHECKING:
    from hybridtrain.trainer import Trainer


@dataclass(frozen=True)
class Comparison:
    """The value of an evaluation that counts, and which of two is better.

    Raises:
        ConfigError: `mode` is neither `min` nor `max`.
    """

    value: str
    """`loss`, or the name of a metric."""
    mode: str
    """`min` if the smallest value is best, `max` if the largest is."""

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("min", "max"))

    def check(self, trainer: Trainer) -> None:
        """Checks that the evaluations of `trainer` have the value.

        Raises:
            ConfigError: there is no evaluation, or it has no such value.
        """
        if trainer.evaluation is None:
            raise ConfigError(f"value={self.value} needs an evaluation, and this run has none")
        known = ("loss", *trainer.metrics)
        if self.value not in known:
            raise ConfigError(
                f"value={self.value} is not a value of the evaluation: "
                f"{did_you_mean(self.value, known)}"
            )

    def of(self, values: Mapping[str, float]) -> float:
        """Returns the value of an evaluation as a number of which the smallest is best.

        What is not a number is worst.
        """
        found = values[self.value]
        if math.isnan(found):
            return math.inf
        return found if self.mode == "min" else -found
