"""The base class of monitors, which the training loop reports to, and several as one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.schedule import Spans

if TYPE_CHECKING:
    from hybridtrain.loop.trainer import Trainer

_log = logging.getLogger(__name__)


def call_hook(callback: Callback, hook: str, *args: Any, **kwargs: Any) -> None:
    """Calls a method of a callback; a monitor that raises does not end the run.

    It may have met a full disk, a server that is away or a closed terminal, or have a bug. It is
    let go with one warning, and left out from then on.
    """
    if not isinstance(callback, Monitor):
        getattr(callback, hook)(*args, **kwargs)
        return
    if callback.broken:
        return
    try:
        getattr(callback, hook)(*args, **kwargs)
    except Exception as error:
        callback.broken = True
        with suppress(Exception):
            callback.abandon()
        reason, *_ = str(error).splitlines() or [""]  # that of a database goes on with its query
        _log.warning(
            "%s has stopped, and training goes on without it: %s: %s",
            type(callback).__name__, type(error).__name__, reason,
        )  # fmt: skip


def parts_of_account(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of a step's account among the values of `Monitor.scalars`, by name."""
    return {
        tag.removeprefix("account/").removesuffix("_ms"): value
        for tag, value in values.items()
        if tag.startswith("account/")
    }


class Monitor(Callback):
    """Receives the progress of a run from rank 0's training loop; the defaults do nothing.

    It is a callback that needs nothing of the trainer but numbers and texts. The loop calls `start`
    once, `step` after every optimizer step, `scalars` on the steps that are logged or evaluated,
    `results` when the run is complete, and `close` at the end, also after an exception.

    The tags of `scalars` are `<group>/<name>`: `train/loss`, `train/lr`, `train/grad_norm`,
    `train/samples_per_second`, `train/tokens_per_second` (see `Batch.tokens`), `train/step_ms`,
    `train/mfu`, `lr/<group>` where groups have different rates, `account/bubble_ms` (the mean of
    all devices; see `hybridtrain.schedule.Account`), `pipeline/bubble_fraction` (all idle time of a
    batch), `replicas/slowest_ms`, `stage0/forward_ms`, `stage0/memory_bytes`,
    `stage0/memory_percent` (on GPUs), `eval/loss`, `eval/accuracy`. The values are numbers on the
    host, because only the loop may decide to wait for a device.

    A monitor that raises does not end the run: it is left out from then on, with one warning. What
    may end a run is a `Callback`.

    Attributes:
        broken: it has raised.
    """

    main_only = True
    broken = False

    def abandon(self) -> None:
        """Lets go of what it writes to, after a failure; must not raise."""

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """Begins a run, or continues one after a resume.

        Args:
            total_steps: None when the end is not known.
            first_step: the number of steps already done: 0, or that of the checkpoint resumed
                from. Reports of later steps by an interrupted attempt are dropped.
            texts: to show beside the curves, by title, for example the resolved config.
        """

    def step(self, step: int, samples: int) -> None:
        """Reports that optimizer step `step` (the first is 1) is done, on `samples` samples.

        Called in the hot loop: it takes microseconds and waits for nothing.
        """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Reports values measured at `step`, by tag."""

    def evaluating(self, done: int, total: int | None) -> None:
        """Reports that an evaluation has `done` samples of `total` (None: not known) behind it.

        Both are rank 0's share. Called after each batch.
        """

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """Reports the predicted and the measured spans of `step`, in seconds."""

    def account(self, step: int, account: Mapping[str, Any], advice: Sequence[str]) -> None:
        """Reports where the time of the recorded steps up to `step` has gone, and what to change.

        Args:
            step: that was recorded last.
            account: as in `summary.json`: the `mean` and the `devices`, in milliseconds by part.
            advice: a sentence each.
        """

    def results(self, step: int, results: Mapping[str, Any]) -> None:
        """Reports what a complete run has come to at `step`, its last, before `close`.

        Args:
            step: the last one.
            results: see `Trainer.results`: the first numbers of `summary.json`.
        """

    def close(self) -> None:
        """Writes out what is pending; may be called twice, or without `start`."""

    def on_start(self, trainer: Trainer) -> None:
        """Calls `start`."""
        self.start(total_steps=trainer.total_steps, first_step=trainer.step, texts=trainer.texts)

    def on_step(self, trainer: Trainer, samples: int) -> None:
        """Calls `step`."""
        self.step(trainer.step, samples)

    def on_log(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Calls `scalars`."""
        self.scalars(trainer.step, values)

    def on_evaluation_batch(self, trainer: Trainer, done: int, total: int | None) -> None:
        """Calls `evaluating`."""
        self.evaluating(done, total)

    def on_evaluate(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Calls `scalars`."""
        shown = {f"eval/{name}": x for name, x in values.items() if name != "samples"}
        self.scalars(trainer.step, shown)

    def on_timeline(self, trainer: Trainer, predicted: Spans, measured: Spans) -> None:
        """Calls `timeline`."""
        self.timeline(trainer.step, predicted, measured)
        if (account := trainer.account) is not None:
            self.account(trainer.step, account, trainer.advice)

    def on_end(self, trainer: Trainer) -> None:
        """Calls `results`, if the run is complete, and `close`."""
        if trainer.finished:
            self.results(trainer.step, trainer.results)
        self.close()


class Monitors(Monitor):
    """Forwards every call to each of `monitors`, in order."""

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self._monitors = tuple(monitors)

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`."""
        self._tell("start", total_steps=total_steps, first_step=first_step, texts=texts)

    def step(self, step: int, samples: int) -> None:
        """See `Monitor.step`."""
        self._tell("step", step, samples)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`."""
        self._tell("scalars", step, values)

    def evaluating(self, done: int, total: int | None) -> None:
        """See `Monitor.evaluating`."""
        self._tell("evaluating", done, total)

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`."""
        self._tell("timeline", step, predicted, measured)

    def account(self, step: int, account: Mapping[str, Any], advice: Sequence[str]) -> None:
        """See `Monitor.account`."""
        self._tell("account", step, account, advice)

    def results(self, step: int, results: Mapping[str, Any]) -> None:
        """See `Monitor.results`."""
        self._tell("results", step, results)

    def close(self) -> None:
        """See `Monitor.close`."""
        self._tell("close")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """See `Callback.on_exception`."""
        self._tell("on_exception", trainer, error)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        for monitor in self._monitors:
            call_hook(monitor, method, *args, **kwargs)
