"""The base class of trackers for slow services: their thread, and the ID of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from time import monotonic
from typing import Any

import yaml
from PIL import Image

from hybridtrain._base.files import write_atomically
from hybridtrain.errors import ConfigError, Interrupted
from hybridtrain.loop import Run, Tracker
from hybridtrain.observe.pictures import draw
from hybridtrain.schedule import Spans

_MOST_WAITING = 10_000

# The total patience of all trackers after an interruption, and the minimum for each. The other
# processes wait 10 seconds for rank 0 (`Trainer`); then they exit, and torchrun ends rank 0.
_AFTER_INTERRUPTION_S = 5.0
_LEAST_S = 1.0


class QueuedTracker(Tracker):
    """Base class for services that may be slow or unreachable, called from one thread.

    A step never waits for the service; the end of a run waits at most `patience_s`. The next hook
    raises an exception of the thread, which disables the tracker (see `Tracker`).

    Subclasses implement `begin`, `values`, `picture` and `finish`, which run in the thread. The
    tags are the same as in `metrics.jsonl`, and the x-axis is the step. The file `<package>.id` in
    `directory` has the service's ID of the run, with which a resumed run continues its curves.

    Args:
        directory: the run directory; its name becomes the name of the run.

    Attributes:
        package: the required package, also the name of the extra.
        patience_s: the seconds that the end of a run waits for pending reports; an interrupted run
            waits less.
        failed: whether the run ended with an error.

    Raises:
        ConfigError: the package is not installed.
    """

    package: str
    patience_s = 30.0

    def __init__(self, directory: str | Path) -> None:
        if find_spec(self.package) is None:
            raise ConfigError(
                f"{type(self).__name__} needs the package {self.package}, which is not installed: "
                f"pip install 'hybridtrain[{self.package}]', or remove it from monitor="
            )
        self.directory = Path(directory)
        self.run_name = self.directory.resolve().name
        self.failed = False
        self._thread: threading.Thread | None = None
        self._waiting: Queue[Callable[[], None] | None] = Queue(_MOST_WAITING)
        self._error: Exception | None = None
        self._deadline: float | None = None

    def begin(self, run_id: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """Begins a run, or continues the run with the ID `run_id`; returns its ID.

        Args:
            run_id: the ID of a run to resume; None for a new run.
            config: the text `config`, as a nested mapping.
            texts: see `Run.texts`.
        """
        raise NotImplementedError

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Reports values by tag."""
        raise NotImplementedError

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """Reports a picture, which replaces an earlier one of the same name."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the run at the service, as failed if `failed` is True."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        """Starts the thread, which begins or resumes the run at the tracking service."""
        # A new queue for each run: a thread that was abandoned keeps the old one, and cannot take
        # jobs of this one.
        self._waiting, self._error, self.failed = Queue(_MOST_WAITING), None, False
        self._deadline = None
        self.directory.mkdir(parents=True, exist_ok=True)
        # Daemon, so that a service that does not answer does not keep the process from ending.
        thread = threading.Thread(target=self._work, args=[self._waiting], daemon=True)
        thread.start()
        self._thread = thread
        first_step, texts = run.step, dict(run.texts)
        self._do(lambda: self._begin(first_step, texts))

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Queues the values."""
        step, copied = run.step, dict(values)  # copied now, because the thread reads them later
        self._do(lambda: self.values(step, copied))

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Queues a picture of the last recorded step."""
        step, title = run.step, f"{self.run_name}, step {run.step}"
        # Drawn in the thread, since drawing takes longer than a small step.
        self._do(lambda: self.picture(step, "timeline", draw(predicted, measured, title)))

    def on_end(self, run: Run) -> None:
        """Reports the results of a complete run as `summary/...`, and waits for the thread.

        Raises:
            TimeoutError: the service did not accept all reports in time.
        """
        if self._thread is None:
            return
        if run.finished:
            step = run.step
            numbers = {
                f"summary/{key.replace('.', '/')}": value
                for key, value in flat(run.results)
                if isinstance(value, int | float)
            }
            self._do(lambda: self.values(step, numbers))
        # First: whatever follows may raise, and a second call must do nothing.
        thread, self._thread = self._thread, None
        # After an error the thread has ended, and nobody would take these jobs.
        if self._error is None:
            self._put(self.finish)
            self._put(None)
            patience_s = self.patience_s
            if self._deadline is not None:
                patience_s = min(patience_s, max(_LEAST_S, self._deadline - monotonic()))
            thread.join(patience_s)
            if thread.is_alive():
                raise TimeoutError(
                    f"the remaining reports were not accepted within {patience_s:.3g} seconds"
                )
        # Again: the thread may have failed in its last jobs. `join` orders its write before this
        # read.
        if self._error is not None:
            raise self._error

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Marks the run as failed; after an interruption all trackers share one deadline."""
        self.failed = True
        if isinstance(error, Interrupted):
            self._deadline = monotonic() + _AFTER_INTERRUPTION_S

    def abandon(self) -> None:
        """Abandons the thread, which ends with the process."""
        self._thread = None

    def _begin(self, first_step: int, texts: Mapping[str, str]) -> None:
        file = self.directory / f"{self.package}.id"
        run_id = file.read_text().strip() if first_step and file.exists() else None
        config = yaml.safe_load(texts.get("config", "")) or {}
        # Only now: the ID counts when the service has accepted it.
        write_atomically(file, self.begin(run_id, config, texts) + "\n")

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            raise RuntimeError(f"call {type(self).__name__}.on_start() first")
        # Written once by the thread, as its last act, so no lock is needed.
        if self._error is not None:
            raise self._error
        self._put(job)

    def _put(self, job: Callable[[], None] | None) -> None:
        try:
            # Never waits: a step must not depend on a service.
            self._waiting.put_nowait(job)
        except Full:
            raise TimeoutError(f"{_MOST_WAITING} reports are waiting for the service") from None

    def _work(self, jobs: Queue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                if jobs is self._waiting:  # not abandoned: raised by the next report
                    self._error = error
                return


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str | bool | float]]:
    """Flattens a nested mapping to dotted keys; values other than numbers become text."""
    if not isinstance(tree, Mapping):
        return [(prefix, tree if isinstance(tree, str | bool | int | float) else str(tree))]
    return [
        entry
        for key, value in tree.items()
        if value is not None
        for entry in flat(value, f"{prefix}.{key}" if prefix else str(key))
    ]
