"""Freezes parameters for a part of a run."""

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
    """Freezes the parameters whose names match, from step `start` to step `until`.

        Freeze("features.*", until=500)      # trained from step 501 on

    Before `start` and after `until` they are trained, unless another `Freeze` freezes them then.
    Which they are is a function of the step alone, so a resumed run goes on exactly. The optimizer
    must hold all of them from the beginning: it leaves out those without a gradient. What a frozen
    batch norm does with its running statistics is up to its mode.

    Args:
        match: a pattern for the names of parameters, such as `features.*`, or several.
        start: the steps before which they are trained.
        until: the last step in which they are frozen; None: to the end.

    Raises:
        ConfigError: the numbers do not fit together; at the start of a run: no parameter matches.
    """

    def __init__(
        self, match: str | Sequence[str], start: int = 0, until: int | None = None
    ) -> None:
        if type(start) is not int or start < 0:
            raise ConfigError(f"{setting('start', start)} must be a number of steps, 0 or more")
        if until is not None and (type(until) is not int or until <= start):
            raise ConfigError(
                f"{setting('until', until)} must be a number of steps, more than "
                f"{setting('start', start)}"
            )
        self._match = match
        self._start = start
        self._until = until
        self._frozen: bool | None = None

    def on_init(self, trainer: Trainer) -> None:
        """Checks that parameters match, and that the optimizer holds those trained later."""
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
                f"Freeze({setting('match', self._match, repr)}) trains {missing[0]} in a part of "
                "the run, and optimizer= does not hold it: make the optimizer over all "
                "parameters"
            )

    def on_start(self, trainer: Trainer) -> None:
        """Freezes or frees them for the next step."""
        self._frozen = None
        self._apply(trainer)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Freezes or frees them for the next step."""
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
