"""The base class of trackers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.schedule import Spans

_log = logging.getLogger(__name__)


class Run(Protocol):
    """A run as seen by a tracker: a `Trainer`, or a script's loop with a `Session`."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def total_steps(self) -> int | None:
        """The length of the run; None if unknown."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Texts to show with the curves, by title, for example the resolved config."""

    @property
    def account(self) -> Mapping[str, Any] | None:
        """The time breakdown of the recorded steps, see `Trainer.account`; None if unknown."""

    @property
    def advice(self) -> Sequence[str]:
        """Changes that would make a step shorter, one sentence each."""

    @property
    def finished(self) -> bool:
        """True if the run is complete."""

    @property
    def results(self) -> Mapping[str, Any]:
        """The results so far, see `Trainer.results`."""


class Tracker(Callback):
    """Reports a run from rank 0 to a terminal, a file or a service; the default hooks do nothing.

    A tracker is a callback that cannot end a run: when one of its hooks raises, because a disk is
    full or a server is unreachable, the run continues without it, with one warning. Trackers run
    after all other callbacks, so that they see the values that callbacks add to the log.

    The tags of `on_log` are `<group>/<name>`: `train/loss`, `train/lr`, `train/grad_norm`,
    `train/samples_per_second`, `train/tokens_per_second` (see `Batch.tokens`), `train/step_ms`,
    `train/mfu`, `lr/<group>` where groups have different rates, `account/bubble_ms` (the mean of
    all devices; see `hybridtrain.schedule.Account`), `pipeline/bubble_fraction` (all idle time of a
    batch), `replicas/slowest_ms`, `stage0/forward_ms`, `stage0/memory_bytes`,
    `stage0/memory_percent` (on GPUs), `eval/loss`, `eval/accuracy`. The values are numbers on the
    host, because only the loop decides when to wait for a device.

    A `Session` calls only `on_start`, `on_log`, `on_exception` and `on_end`.

    Attributes:
        broken: True after a hook has raised; no hook is called from then on.
    """

    main_only = True
    broken = False

    def abandon(self) -> None:
        """Releases files and connections after a failure; must not raise."""

    def on_start(self, run: Run) -> None:
        """Begins the report of a run, or continues it after a resume.

        `run.step` is the number of completed steps: 0, or the step of the resumed checkpoint. Drop
        values that an interrupted attempt reported for later steps.
        """

    def on_step(self, run: Run, samples: int) -> None:
        """Runs after step `run.step`, on `samples` samples.

        Called in the hot loop: it must take microseconds and must not block.
        """

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Receives the values measured at step `run.step`, by tag."""

    def on_evaluation_batch(self, run: Run, done: int, total: int | None) -> None:
        """See `Callback.on_evaluation_batch`; the numbers are rank 0's."""

    def on_evaluate(self, run: Run, values: Mapping[str, float]) -> None:
        """Receives the values of an evaluation, and logs them with the tags `eval/<name>`."""
        self.on_log(run, {f"eval/{name}": x for name, x in values.items() if name != "samples"})

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Receives the spans of step `run.step`, in seconds; see also `Run.account`."""

    def on_texts(self, run: Run, texts: Mapping[str, str]) -> None:
        """Receives texts of step `run.step` by tag, such as generated samples."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Runs before `on_end` when the run ends with `error`."""

    def on_end(self, run: Run) -> None:
        """Ends the report; may be called twice, or without `on_start`.

        If `run.finished` is True, `run.results` are the final results.
        """


def call_hook(callback: Callback, hook: str, *args: Any) -> None:
    """Calls a hook of a callback; disables a tracker that raises, with a warning.

    Causes include a full disk, an unreachable server, a closed terminal and a bug in the tracker.
    """
    if not isinstance(callback, Tracker):
        getattr(callback, hook)(*args)
        return
    if callback.broken:
        return
    try:
        getattr(callback, hook)(*args)
    except Exception as error:
        callback.broken = True
        with suppress(Exception):
            callback.abandon()
        reason, *_ = str(error).splitlines() or [""]  # a database error continues with its query
        _log.warning(
            "%s failed, and training continues without it: %s: %s",
            type(callback).__name__, type(error).__name__, reason,
        )  # fmt: skip


def defines(callback: Callback, hook: str) -> bool:
    """Returns whether calling a hook of a callback does anything."""
    defined = getattr(callback, hook)  # an instance may have its own
    function = getattr(defined, "__func__", defined)
    return function is not getattr(Callback, hook) and function is not getattr(Tracker, hook)


def parts_of_account(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of the step's time breakdown among the values of `Tracker.on_log`."""
    return {
        tag.removeprefix("account/").removesuffix("_ms"): value
        for tag, value in values.items()
        if tag.startswith("account/")
    }
