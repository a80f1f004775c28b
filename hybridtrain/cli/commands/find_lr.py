"""The command `find-lr`: finds a learning rate with a range test.

Source: L. Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3. As in
fastai and Lightning, it chooses the rate at which the smoothed loss falls fastest.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from statistics import pstdev
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from hybridtrain._base.text_table import Block, text_table
from hybridtrain.checkpoint import init_from, parse_init_from
from hybridtrain.cli.commands.result import Result
from hybridtrain.cli.config.resolve import Settings
from hybridtrain.cli.run.build import build_run
from hybridtrain.cli.run.components import build_model_optimizer
from hybridtrain.cli.run.errors import print_result
from hybridtrain.errors import ConfigError
from hybridtrain.loop import Callback, Trainer

_log = logging.getLogger(__name__)

STEPS = 100
LOWEST, HIGHEST = 1e-7, 10.0

# The test ends when the loss is this many times the smallest one.
_DIVERGED = 4.0
_SMOOTHING = 0.9  # the weight of the earlier losses
_CLEAR = 5.0  # a fall this many times larger than the noise is significant
_FIRST = 10  # the first steps, where the mean covers few losses
_LINES = 12


class Point(NamedTuple):
    """A step of the test."""

    lr: float
    loss: float
    smooth: float


class _Recorder(Callback):
    """Records learning rates and losses, and ends the test when the loss diverges."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._lr = 0.0
        self._mean = 0.0

    def on_gradients(self, trainer: Trainer) -> None:
        """Reads the step's rate before the schedule changes it."""
        self._lr = trainer.optimizer.param_groups[0]["lr"]

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Adds a point; stops all processes at the same step."""
        loss = values["train/loss"]
        count = len(self.points) + 1
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        smooth = self._mean / (1 - _SMOOTHING**count)
        least = min((point.smooth for point in self.points), default=math.inf)
        diverged = not math.isfinite(loss) or (count > _FIRST and smooth > _DIVERGED * least)
        self.stops = bool(trainer.model.world.from_main(lambda: diverged))
        if math.isfinite(loss):
            self.points.append(Point(self._lr, loss, smooth))


def find_lr(settings: Settings) -> Result:
    """Trains with a rate that rises from 1e-7 to 10, and prints a value for `optim.lr`.

    It saves nothing. The rates of other groups rise in proportion.

    Raises:
        ConfigError: the loss never falls.
    """
    context = build_run(settings)
    config, model = context.config, context.model
    if (initial := parse_init_from(config.init_from)) is not None:
        init_from(model, **initial)
    optimizer = build_model_optimizer(config.optim, model, config.allow_targets)
    first = optimizer.param_groups[0]["lr"]
    ratio = HIGHEST / LOWEST
    schedule = LambdaLR(optimizer, lambda step: LOWEST / first * ratio ** (step / (STEPS - 1)))
    recorder = _Recorder()
    options = replace(
        context.options.trainer,
        steps=STEPS,
        epochs=None,
        log_every=1,
        max_skipped=None,
        checkpoint_every_steps=None,
        checkpoint_every_epochs=None,
        checkpoint_every_minutes=None,
        best=None,
    )
    torch.manual_seed(config.seed)
    Trainer(
        model,
        optimizer,
        context.options.loss_fn,
        context.train_loader(),
        options,
        lr_schedule=schedule,
        callbacks=[recorder],
    ).fit()
    best = steepest(recorder.points)
    lines = [
        (f"{point.lr:.1e}", f"{point.loss:.4f}", f"{point.smooth:.4f}")
        for point in recorder.points[:: max(1, len(recorder.points) // _LINES)]
    ]
    table = text_table([("learning rate", "loss", "smoothed"), *lines], 3)
    _log.info("%s", Block("\n".join(table)))
    _log.info("the loss falls fastest at optim.lr=%.1e", best)
    print_result({"lr": float(f"{best:.1e}"), "steps": len(recorder.points)})
    context.world.close()
    return {"lr": best}


def steepest(points: list[Point]) -> float:
    """Returns the rate at which the smoothed loss falls fastest, over the logarithm of the rate.

    It ignores the loss after its minimum, where it may jump up and fall again.

    Raises:
        ConfigError: the loss does not fall by more than its noise.
    """
    after = points[_FIRST:]
    lowest = min(range(len(after)), key=lambda number: after[number].smooth, default=0)
    looked_at = after[: lowest + 1]
    slopes = [
        (second.smooth - first.smooth, first.lr)
        for first, second in zip(looked_at, looked_at[2:], strict=False)
    ]
    _, rate = min(slopes, default=(0.0, 0.0))
    # noise of the mean with these weights, relative to the noise of a single loss
    share = ((1 - _SMOOTHING) / (1 + _SMOOTHING)) ** 0.5
    noise = share * pstdev(point.loss - point.smooth for point in points[:_FIRST])
    if not slopes or looked_at[0].smooth - looked_at[-1].smooth < _CLEAR * noise:
        raise ConfigError(
            f"the loss does not fall at any learning rate from {LOWEST} to {HIGHEST:g}: check the "
            f"data and the loss"
        )
    return rate
