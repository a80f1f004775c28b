"""The base class of callbacks, with the hooks that a `Trainer` calls.

Also the parts that callbacks share: comparing two evaluations, and saving callback states.
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
    """Base class for the callbacks of a `Trainer`; the default hooks do nothing.

    Every process calls every hook at the same point of the loop, in the order of `callbacks=`;
    `main_only` callbacks come after the others, and trackers last. A hook may therefore
    communicate, but must do so on all processes or on none. An exception in a hook ends the run; a
    single-process run first saves the last complete step.

    State that a resumed run needs belongs in `state_dict`, which is saved in the checkpoint under
    `state_name`. If a checkpoint lacks it, the run resumes with a warning, and the callback starts
    from `on_init` with the resumed weights.

    Attributes:
        main_only: True to run on rank 0 only, for example to write files. Such a callback has no
            state in the checkpoint.
        needs_evaluations: True if a single evaluation, at the end of a run, has no effect on it.
        stops: set to True on all processes in the same step to end the run after this step. The run
            then evaluates and saves as after its last step.
    """

    main_only = False
    needs_evaluations = False
    stops: bool = False

    @property
    def state_name(self) -> str:
        """The key of the state in a checkpoint: the class name in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    def on_init(self, trainer: Trainer) -> None:
        """Runs when the trainer is created; a checkpoint may be resumed after this."""

    def on_start(self, trainer: Trainer) -> None:
        """Runs when `fit` begins; `trainer.step` is 0, or the step of the resumed checkpoint."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Runs when the gradients of a step are averaged and unscaled, before clipping.

        `trainer.step` is still the number of completed steps.
        """

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Runs after step `trainer.step`, on `samples` samples; the optimizer may have skipped it.

        Called in the hot loop, so it should not block.
        """

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Receives the values of a logged step by tag; values that it adds are logged as well."""

    def evaluation_context(self, trainer: Trainer) -> AbstractContextManager[object]:
        """Returns a context manager for an evaluation, for example to swap the weights."""
        return nullcontext()

    def on_evaluation_batch(self, trainer: Trainer, done: int, total: int | None) -> None:
        """Runs after each evaluation batch, at `done` of `total` samples (None if unknown).

        Both numbers are for this process. Processes may have different numbers of batches: do not
        communicate here.
        """

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Receives the values of an evaluation during `fit`, equal on all processes.

        The model still has the evaluated weights (see `evaluation_context`): do not save here.
        """

    def on_timeline(self, trainer: Trainer, predicted: Spans, measured: Spans) -> None:
        """Receives the predicted and measured spans of step `trainer.step`, in seconds."""

    def on_texts(self, trainer: Trainer, texts: Mapping[str, str]) -> None:
        """Receives texts of step `trainer.step` by tag, such as generated samples, on rank 0."""

    def on_save(self, trainer: Trainer, path: Path) -> None:
        """Runs after a save to `path`; a background save may still be in progress."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Runs when `fit` ends with `error`. Other processes may be gone: do not communicate."""

    def on_end(self, trainer: Trainer) -> None:
        """Runs whenever `fit` ends; do not communicate here."""

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values to save; runs on all processes, rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`, the same on every process, after the weights are loaded."""


@dataclass
class Comparison:
    """An evaluation value to compare, and the direction that is better.

    Raises:
        ConfigError: `mode` is neither `min` nor `max` nor None.
    """

    value: str
    """`loss`, the name of a metric, or `metric/class` for a metric with a value per class."""
    mode: str | None
    """`min` if smaller is better, `max` if larger is better; None to let `check` infer it."""

    def __post_init__(self) -> None:
        # with the key of the callback, which only its construction knows
        self._setting = setting("value", self.value)
        if self.mode is not None:
            check_choice("mode", self.mode, ("min", "max"))

    def check(self, trainer: Trainer) -> None:
        """Checks that the evaluations of `trainer` have the value, and infers the mode.

        Raises:
            ConfigError: the run has no evaluation, the evaluation lacks the value, or `mode` cannot
                be inferred.
        """
        if trainer.evaluation is None:
            raise ConfigError(f"{self._setting} needs an evaluation, but this run has none")
        names = ("loss", *trainer.metrics)
        metric = metric_of(self.value, names)
        if metric is None:
            raise ConfigError(
                f"{self._setting} is not a value of the evaluation: "
                f"{did_you_mean(self.value, names)}"
            )
        self.mode = direction("mode", self.value, trainer.metrics.get(metric), self.mode)
        trainer.compared.add(self.value)

    def of(self, values: Mapping[str, float]) -> float:
        """Returns the value of an evaluation as a number for which smaller is better.

        NaN is the worst.
        """
        value = values[self.value]
        if math.isnan(value):
            return math.inf
        return -value if self.mode == "max" else value


_log = logging.getLogger(__name__)


class CallbackStates:
    """The states of `callbacks` by their names, for `Trainer.states`.

    Attributes:
        optional: True, because a checkpoint may lack them; see `Callback`.

    Raises:
        ConfigError: two callbacks with a state have the same name.
    """

    optional = True

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = [callback for callback in callbacks if _has_state(callback)]
        for name, count in Counter(callback.state_name for callback in self._callbacks).items():
            if count > 1:
                raise ConfigError(
                    f"{count} entries of callbacks= have the state name {name!r}: give each its "
                    "own `state_name` in a subclass"
                )

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states by name; every process calls it."""
        return {callback.state_name: callback.state_dict() for callback in self._callbacks}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a `state_dict`; a callback without a saved state starts over, with a warning."""
        state = dict(state or {})
        main = self._trainer.world.is_main
        for callback in self._callbacks:
            if callback.state_name in state:
                callback.load_state_dict(state.pop(callback.state_name))
                continue
            callback.on_init(self._trainer)
            if main:
                _log.warning(
                    "the checkpoint has no state for the callback %s: it starts over at step %d",
                    callback.state_name, self._trainer.step,
                )  # fmt: skip
        if state and main:
            _log.warning(
                "ignored the checkpoint's states of callbacks that this run does not have: %s",
                ", ".join(state),
            )


def _has_state(callback: Callback) -> bool:
    # a main_only callback has none, because other processes lack the callback: see Callback
    return not callback.main_only and type(callback).state_dict is not Callback.state_dict
