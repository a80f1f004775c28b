"""Freezes parameters for part of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridtrain.errors import ConfigError, setting
from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.step import fits, matching

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class Freeze(Callback):
    """Freezes the parameters with matching names from step `start` to step `until`.

        Freeze("features.*", until=500)      # trained from step 501 on

    Before `start` and after `until` the parameters are trained, unless another `Freeze` applies.
    The frozen set depends only on the step, so a resumed run continues exactly. The optimizer must
    hold all of these parameters from the beginning; it skips parameters without a gradient. A
    frozen batch norm still updates its running statistics in training mode.

    Args:
        match: a pattern for parameter names, such as `features.*`, or a list of patterns.
        start: the number of steps before freezing.
        until: the last frozen step; None to freeze until the end of the run.

    Raises:
        ConfigError: `until` is not greater than `start`; or, at the start of a run, no parameter
            matches.
    """

    def __init__(
        self, match: str | Sequence[str], start: int = 0, until: int | None = None
    ) -> None:
        if type(start) is not int or start < 0:
            raise ConfigError(f"{setting('start', start)} must be a number of steps, 0 or more")
        if until is not None and (type(until) is not int or until <= start):
            raise ConfigError(
                f"{setting('until', until)} must be a number of steps greater than "
                f"{setting('start', start)}"
            )
        self._match = match
        self._start = start
        self._until = until
        self._frozen: bool | None = None

    def on_init(self, trainer: Trainer) -> None:
        """Checks that parameters match and that the optimizer holds those trained later."""
        names = [name for name, _ in trainer.model.net.named_parameters()]
        held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        chosen = matching(self._match, names, "match")
        parameters = dict(trainer.model.named_parameters())
        ever_trained = self._start > 0 or self._until is not None
        missing = [
            name for name in chosen if name in parameters and id(parameters[name]) not in held
        ]
        if missing and ever_trained:
            raise ConfigError(
                f"Freeze({setting('match', self._match, repr)}) trains {missing[0]} for part of "
                "the run, but optimizer= does not hold it: build the optimizer from all "
                "parameters"
            )

    def on_start(self, trainer: Trainer) -> None:
        """Freezes or unfreezes the parameters for the next step."""
        self._frozen = None
        self._apply(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Freezes or unfreezes the parameters for the next step."""
        self._apply(trainer)

    def _apply(self, trainer: Trainer) -> None:
        frozen = self._freezes_at(trainer.step)
        if frozen is self._frozen:
            return
        self._frozen = frozen
        parameters = dict(trainer.model.net.named_parameters())
        active = [
            each._match
            for each in trainer.callbacks
            if isinstance(each, Freeze) and each._freezes_at(trainer.step)
        ]
        for name in matching(self._match, parameters, "match"):
            parameters[name].requires_grad_(not any(fits(name, match) for match in active))

    def _freezes_at(self, step: int) -> bool:
        return self._start <= step < (math.inf if self._until is None else self._until)
