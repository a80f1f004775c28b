"""The base class of trackers, which report a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from hybridtrain.loop.callbacks.base import Callback
from hybridtrain.schedule import Spans

_log = logging.getLogger(__name__)


class Run(Protocol):
    """A run as a tracker sees it: a `Trainer`, or the loop of a script with a `Session`."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def total_steps(self) -> int | None:
        """The length of the run; None: not known."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Texts to show beside the curves, by title, for example the resolved config."""

    @property
    def account(self) -> Mapping[str, Any] | None:
        """The time of the recorded steps by its parts, see `Trainer.account`; None: not known."""

    @property
    def advice(self) -> Sequence[str]:
        """Changes that would make a step shorter, a sentence for each."""

    @property
    def finished(self) -> bool:
        """True if the run is complete."""

    @property
    def results(self) -> Mapping[str, Any]:
        """The results so far, see `Trainer.results`."""


class Tracker(Callback):
    """Reports a run from rank 0, to a screen, a file or a service; the defaults do nothing.

    A tracker is a callback that cannot end a run: when one of its hooks raises, because a disk is
    full or a server is away, the run goes on without it, with one warning. Trackers come after all
    other callbacks, so that they see what these add to the log.

    The tags of `on_log` are `<group>/<name>`: `train/loss`, `train/lr`, `train/grad_norm`,
    `train/samples_per_second`, `train/tokens_per_second` (see `Batch.tokens`), `train/step_ms`,
    `train/mfu`, `lr/<group>` where groups have different rates, `account/bubble_ms` (the mean of
    all devices; see `hybridtrain.schedule.Account`), `pipeline/bubble_fraction` (all idle time of a
    batch), `replicas/slowest_ms`, `stage0/forward_ms`, `stage0/memory_bytes`,
    `stage0/memory_percent` (on GPUs), `eval/loss`, `eval/accuracy`. The values are numbers on the
    host, because only the loop may decide to wait for a device.

    In a `Session` only `on_start`, `on_log`, `on_exception` and `on_end` are called.

    Attributes:
        broken: a hook has raised; no hook is called any more.
    """

    main_only = True
    broken = False

    def abandon(self) -> None:
        """Lets go of what it writes to, after a failure; must not raise."""

    def on_start(self, run: Run) -> None:
        """Begins the report of a run, or continues it after a resume.

        `run.step` is the number of steps already done: 0, or that of the checkpoint resumed
        from. What an interrupted attempt has reported of later steps is to be dropped.
        """

    def on_step(self, run: Run, samples: int) -> None:
        """Runs after step `run.step`, on `samples` samples.

        Called in the hot loop: it takes microseconds and waits for nothing.
        """

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Takes values measured at step `run.step`, by tag."""

    def on_evaluation_batch(self, run: Run, done: int, total: int | None) -> None:
        """See `Callback.on_evaluation_batch`; the numbers are rank 0's."""

    def on_evaluate(self, run: Run, values: Mapping[str, float]) -> None:
        """Takes the values of an evaluation; logs them with the tags `eval/<name>`."""
        self.on_log(run, {f"eval/{name}": x for name, x in values.items() if name != "samples"})

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Takes the spans of step `run.step`, in seconds; see also `Run.account`."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Runs before `on_end` when the run ends with `error`."""

    def on_end(self, run: Run) -> None:
        """Ends the report; may be called twice, or without `on_start`.

        If `run.finished`, the run is complete, and `run.results` are its results.
        """


def call_hook(callback: Callback, hook: str, *args: Any) -> None:
    """Calls a hook of a callback; a tracker that raises is left out from then on, with a warning.

    It may have met a full disk, a server that is away or a closed terminal, or have a bug.
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
        reason, *_ = str(error).splitlines() or [""]  # that of a database goes on with its query
        _log.warning(
            "%s has stopped, and training goes on without it: %s: %s",
            type(callback).__name__, type(error).__name__, reason,
        )  # fmt: skip


def parts_of_account(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts of a step's account among the values of `Tracker.on_log`, by name."""
    return {
        tag.removeprefix("account/").removesuffix("_ms"): value
        for tag, value in values.items()
        if tag.startswith("account/")
    }
