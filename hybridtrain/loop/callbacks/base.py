"""The base class of callbacks: the moments of a run at which a `Trainer` calls them.

And what several of them share: how two evaluations are compared, and their states in a checkpoint.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtrain.errors import ConfigError, check_choice, did_you_mean, setting
from hybridtrain.loss import direction, metric_of
from hybridtrain.schedule import Spans

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer


class Callback:
    """Follows the run of a `Trainer`; the defaults do nothing.

    Every process calls every hook at the same place of the loop, in the order of `callbacks=`, with
    those that are `main_only` after the others, and each `Tracker` last. So a hook may communicate,
    and must do so on all processes or on none. An exception of a hook ends the run, in one process
    after a save of the last complete step.

    What a callback keeps from step to step, and a resumed run needs, is its `state_dict`, which
    goes into the checkpoint under `state_name`. A checkpoint without it is resumed with a warning:
    the callback begins anew with what `on_init` makes of the resumed weights.

    Attributes:
        main_only: True to run on rank 0 alone, as a callback that writes files does; it has no
            state then.
        stops: set it to True, on all processes in the same step, to end the run after this step.
            The run then evaluates and saves as at its last step.
    """

    main_only = False
    stops: bool = False

    @property
    def state_name(self) -> str:
        """The key of its state in a checkpoint: the name of the class, in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    def on_init(self, trainer: Trainer) -> None:
        """Runs when the trainer is made; a checkpoint may be resumed after this."""

    def on_start(self, trainer: Trainer) -> None:
        """Runs when `fit` begins, at `trainer.step`: 0, or that of the checkpoint resumed from."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Runs when the gradients of a step are complete: averaged, unscaled, not clipped yet.

        `trainer.step` is still the number of steps before.
        """

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Runs after step `trainer.step`, on `samples` samples; the optimizer may have skipped it.

        Called in the hot loop: it should wait for nothing.
        """

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Takes the values of a logged step, by tag; what it adds to them is logged as well."""

    def evaluation_context(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Returns a context that an evaluation runs in, such as one with other weights."""
        return nullcontext()

    def on_evaluation_batch(self, trainer: Trainer, done: int, total: int | None) -> None:
        """Runs after each batch of an evaluation, `done` of `total` samples (None: not known).

        Both are this process's. Processes may have different numbers of batches: do not
        communicate here.
        """

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Takes the values of an evaluation during `fit`, equal on all processes.

        The weights are those that were evaluated (see `evaluation_context`): do not save here.
        """

    def on_timeline(self, trainer: Trainer, predicted: Spans, measured: Spans) -> None:
        """Takes the predicted and the measured spans of step `trainer.step`, in seconds."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Runs after a save to `path`; in the background it may still be written."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Runs when `fit` ends with `error`. Other processes may be gone: do not communicate."""

    def on_end(self, trainer: Trainer) -> None:
        """Runs when `fit` ends, in whatever way; do not communicate here."""

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values to save; every process calls it, rank 0's counts."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, the same on every process; the weights are loaded by then."""


@dataclass
class Comparison:
    """The value of an evaluation that counts, and which of two is better.

    Raises:
        ConfigError: `mode` is neither `min` nor `max` nor None.
    """

    value: str
    """`loss`, or the name of a metric; of a metric with a value per class `metric/class`."""
    mode: str | None
    """`min` if the smallest value is best, `max` if the largest is; None: `check` finds it out."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("mode", self.mode, ("min", "max"))

    def check(self, trainer: Trainer) -> None:
        """Checks that the evaluations of `trainer` have the value, and finds out which is better.

        Raises:
            ConfigError: there is no evaluation, it has no such value, or `mode` has to be given.
        """
        if trainer.evaluation is None:
            raise ConfigError(
                f"{setting('value', self.value)} needs an evaluation, and this run has none"
            )
        names = ("loss", *trainer.metrics)
        metric = metric_of(self.value, names)
        if metric is None:
            raise ConfigError(
                f"{setting('value', self.value)} is not a value of the evaluation: "
                f"{did_you_mean(self.value, names)}"
            )
        self.mode = direction("mode", self.value, trainer.metrics.get(metric), self.mode)
        trainer.compared.add(self.value)

    def of(self, values: Mapping[str, float]) -> float:
        """Returns the value of an evaluation as a number of which the smallest is best.

        What is not a number is worst.
        """
        value = values[self.value]
        if math.isnan(value):
            return math.inf
        return -value if self.mode == "max" else value


_log = logging.getLogger(__name__)


class CallbackStates:
    """The states of `callbacks` by their names, for `Trainer.states`.

    Attributes:
        optional: True, so that a checkpoint may lack them; see `Callback`.

    Raises:
        ConfigError: two callbacks that have a state have the same name.
    """

    optional = True

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = [callback for callback in callbacks if _has_state(callback)]
        for name, count in Counter(callback.state_name for callback in self._callbacks).items():
            if count > 1:
                raise ConfigError(
                    f"callbacks= has {count} whose state is called {name!r}: give each its own "
                    f"`state_name`, in a subclass"
                )

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states by name; every process calls it."""
        return {callback.state_name: callback.state_dict() for callback in self._callbacks}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a `state_dict`; a callback that it lacks begins anew, with a warning."""
        state = dict(state or {})
        main = self._trainer.world.is_main
        for callback in self._callbacks:
            if callback.state_name in state:
                callback.load_state_dict(state.pop(callback.state_name))
                continue
            callback.on_init(self._trainer)
            if main:
                _log.warning(
                    "the checkpoint has no state of the callback %s: it begins anew, at step %d",
                    callback.state_name, self._trainer.step,
                )  # fmt: skip
        if state and main:
            _log.warning(
                "the checkpoint has states of callbacks that this run does not have: %s",
                ", ".join(state),
            )


def _has_state(callback: Callback) -> bool:
    # one that is main_only has none, since other processes do not have it: see Callback
    return not callback.main_only and type(callback).state_dict is not Callback.state_dict
