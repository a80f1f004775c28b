"""Learning-rate schedules that PyTorch lacks, for the config group `lr_schedule`.

Each is a function of the step after the warm-up, which `lr_schedule.warmup_steps` or `warmup_share`
adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hybridtrain.errors import ConfigError, check_choice, setting

__all__ = ["cosine_restarts", "inverse_sqrt", "wsd"]

# the share of the decay that is left, by the share of its steps that is done
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(done),
}


def wsd(
    optimizer: Optimizer,
    total_steps: int,
    decay_share: float = 0.1,
    decay: str = "linear",
    min_factor: float = 0.0,
) -> LambdaLR:
    """Returns warm-up, stable, decay: a constant rate that falls in the last steps.

    Source: S. Hu et al., MiniCPM, 2024; the decay `sqrt` is 1 - sqrt of A. Hägele et al., Scaling
    Laws and Compute-Optimal Training Beyond Fixed Training Durations, 2024.

    Args:
        optimizer: the optimizer.
        total_steps: the number of steps after the warm-up.
        decay_share: the share of these steps in which the rate falls, above 0 to 1.
        decay: `linear`, `cosine` or `sqrt`.
        min_factor: the last rate as a share of the constant one.

    Raises:
        ConfigError: an argument is out of range.
    """
    check_choice("decay", decay, _DECAYS)
    _check_factor(min_factor)
    if not 0 < decay_share <= 1:
        raise ConfigError(f"{setting('decay_share', decay_share)} must be above 0 and at most 1")
    steps = max(1, round(total_steps * decay_share))

    def factor(step: int) -> float:
        done = min(max((step - (total_steps - steps)) / steps, 0.0), 1.0)
        return min_factor + (1 - min_factor) * _DECAYS[decay](done)

    return LambdaLR(optimizer, factor)


def inverse_sqrt(optimizer: Optimizer, timescale: int) -> LambdaLR:
    """Returns a rate that falls with one over the square root of the step.

    With `timescale` equal to the steps of the warm-up, the rate is proportional to one over the
    square root of all steps, as in A. Vaswani et al., Attention Is All You Need, 2017.

    Args:
        optimizer: the optimizer.
        timescale: the number of steps after which the rate is divided by the square root of 2.

    Raises:
        ConfigError: `timescale` is not positive.
    """
    if timescale < 1:
        raise ConfigError(f"{setting('timescale', timescale)} must be at least 1 step")
    return LambdaLR(optimizer, lambda step: math.sqrt(timescale / (timescale + step)))


def cosine_restarts(
    optimizer: Optimizer, total_steps: int, cycles: int = 2, min_factor: float = 0.0
) -> LambdaLR:
    """Returns a cosine decay that starts again from the full rate, in cycles of equal length.

    Source: I. Loshchilov and F. Hutter, SGDR, 2017.

    Args:
        optimizer: the optimizer.
        total_steps: the number of steps after the warm-up.
        cycles: the number of cycles.
        min_factor: the rate at the end of a cycle as a share of the full one.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check_factor(min_factor)
    if not 1 <= cycles <= total_steps:
        raise ConfigError(
            f"{setting('cycles', cycles)} must be from 1 to the {total_steps} steps after the "
            "warm-up"
        )

    def factor(step: int) -> float:
        done = 1.0 if step >= total_steps else step * cycles / total_steps % 1
        return min_factor + (1 - min_factor) * _DECAYS["cosine"](done)

    return LambdaLR(optimizer, factor)


def _check_factor(min_factor: float) -> None:
    if not 0 <= min_factor <= 1:
        raise ConfigError(f"{setting('min_factor', min_factor)} must be from 0 to 1")
