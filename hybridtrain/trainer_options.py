"""The settings of a `Trainer`: how long it trains, and when it logs, evaluates, saves and stops."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from hybridtrain.errors import ConfigError, check_choice

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WHOLE = (
    "steps",
    "epochs",
    "accumulate",
    "max_skipped",
    "log_every",
    "eval_every",
    "eval_every_epochs",
    "checkpoint_every",
    "checkpoint_every_epochs",
    "timeline_every",
)
_POSITIVE = ("clip_norm", "loss_scale", "checkpoint_every_minutes")


@dataclass(frozen=True)
class TrainerOptions:
    """The length of a training run, and when to log, evaluate, save and stop.

    Each `..._every...` also takes place at the last step.

    Raises:
        ConfigError: a value is out of its range; the message names the argument.
    """

    steps: int | None = None
    """Optimizer steps in total; give this or `epochs`."""
    epochs: int | None = None
    """Passes over the data in total."""
    max_time: float | str | None = None
    """Time after which the run saves and stops, at the end of a step: seconds, or text such as
    `"01:30:00"`, `"1-12:00:00"` (with days) or `90m`; None: no limit. `fit` raises `Interrupted`
    then."""
    accumulate: int = 1
    """Batches whose gradients an optimizer step adds up. A step does not reach into the next
    epoch."""
    clip_norm: float | None = None
    """Largest norm of the gradient, over all stages."""
    loss_scale: float | None = None
    """A fixed scale of the loss, for fp16; None: an adaptive one."""
    max_skipped: int | None = 10
    """Consecutive steps that may be skipped because the loss or a gradient is not finite; None: any
    number. One more is a `DivergedError`."""
    log_every: int = 10
    """Steps between two logged lines."""
    eval_every: int | None = None
    """Steps between two evaluations; None: only at the end."""
    eval_every_epochs: int | None = None
    """Epochs between two evaluations."""
    eval_first: bool = False
    """Evaluate before the first step too, at step 0. Otherwise one batch of the evaluation runs
    there, which counts for nothing, so that an error in a metric is found."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; None: only at the end."""
    checkpoint_every_epochs: int | None = None
    """Epochs between two checkpoints."""
    checkpoint_every_minutes: float | None = None
    """Minutes of rank 0's clock between two checkpoints."""
    best: str | None = None
    """A value of the evaluation, `loss` or the name of a metric, whose best step is saved as well
    and never removed; None: none."""
    best_mode: str = "min"
    """`min` if the smallest value is best, `max` if the largest is."""
    timeline_every: int | None = None
    """Steps between two timelines; None: only at the end."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"give exactly one of steps= and epochs=, not steps={self.steps} and "
                f"epochs={self.epochs}"
            )
        for name in _WHOLE:
            value = getattr(self, name)
            if value is None and name not in ("accumulate", "log_every"):
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value} must be a whole number of at least 1")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be positive")
        if type(self.eval_first) is not bool:
            raise ConfigError(f"eval_first={self.eval_first} must be true or false")
        check_choice("best_mode", self.best_mode, ("min", "max"))
        seconds(self.max_time)

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return seconds(self.max_time)

    def total_steps(self, batches_per_epoch: int | None) -> int:
        """Returns the number of optimizer steps of the whole run.

        Raises:
            ConfigError: it is counted in `epochs`, and their length is not known.
        """
        if self.steps is not None:
            return self.steps
        if batches_per_epoch is None:
            raise ConfigError(
                f"epochs={self.epochs} needs the length of the training data, which has none "
                f"(`__len__`): set steps= in place of epochs="
            )
        return (self.epochs or 0) * -(-batches_per_epoch // self.accumulate)


def seconds(max_time: Any) -> float | None:
    """Returns the seconds of a time as `TrainerOptions.max_time` takes it.

    Raises:
        ConfigError: it cannot be read, or is not positive.
    """
    if max_time is None:
        return None
    text = str(max_time).strip()
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    amount = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([smhd]?)", text)
    if type(max_time) in (int, float):
        total = float(max_time)
    elif clock:
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        total = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    elif amount:
        total = float(amount[1]) * _UNITS[amount[2] or "s"]
    else:
        total = 0.0
    if not 0 < total < math.inf:
        raise ConfigError(
            f"max_time={max_time} must be a positive number of seconds, or a time such as "
            f'"01:30:00" (hours:minutes:seconds), "1-12:00:00" (days-...), "90m" or "1.5h"'
        )
    return total
