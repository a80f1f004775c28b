"""The base of trackers of slow services: their thread, and the run's id in its directory."""

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

# Of all trackers of an interrupted run together, and the least of each. The other processes wait
# for rank 0 for 10 seconds (`Trainer`); then they leave, and torchrun ends it.
_AFTER_INTERRUPTION_S = 5.0
_LEAST_S = 1.0


class QueuedTracker(Tracker):
    """Reports to a service that may be slow or away: all calls of it are made in one thread.

    A step never waits for it, and the end of a run waits `patience_s`. What the thread raises is
    raised by the next hook, which lets the tracker go (see `Tracker`).

    A subclass has `begin`, `values`, `picture` and `finish`, which run in the thread. The tags are
    those of `metrics.jsonl`, and the x-axis is the step. `<package>.id` in `directory` keeps the id
    of the run, by which a resumed run continues its curves.

    Args:
        directory: the run directory; its name is that of the run.

    Attributes:
        package: that it needs, also the name of the extra.
        patience_s: seconds that the end of a run waits for the reports before it; that of an
            interrupted one waits less.
        failed: the run has ended with an error.

    Raises:
        ConfigError: the package is not installed.
    """

    package: str
    patience_s = 30.0

    def __init__(self, directory: str | Path) -> None:
        if find_spec(self.package) is None:
            raise ConfigError(
                f"{type(self).__name__} needs the package {self.package}, which is not installed: "
                f"pip install 'hybridtrain[{self.package}]', or leave it out of monitor="
            )
        self.directory = Path(directory)
        self.run_name = self.directory.resolve().name
        self.failed = False
        self._thread: threading.Thread | None = None
        self._waiting: Queue[Callable[[], None] | None] = Queue(_MOST_WAITING)
        self._error: Exception | None = None
        self._deadline: float | None = None

    def begin(self, known: str | None, config: Mapping[str, Any], texts: Mapping[str, str]) -> str:
        """Begins the run, or continues the one with the id `known`; returns its id.

        Args:
            known: the id of a run that is resumed; None: a new run.
            config: the text of that title, as a nested mapping.
            texts: see `Run.texts`.
        """
        raise NotImplementedError

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Reports values by tag."""
        raise NotImplementedError

    def picture(self, step: int, name: str, picture: Image.Image) -> None:
        """Reports a picture, which replaces an earlier one of that name."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends the run at the service, as `failed` says."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        """Starts the thread, which begins or continues the run of the service."""
        self._waiting, self._error, self.failed = Queue(_MOST_WAITING), None, False
        self._deadline = None
        self.directory.mkdir(parents=True, exist_ok=True)
        thread = threading.Thread(target=self._work, args=[self._waiting], daemon=True)
        thread.start()
        self._thread = thread
        first_step, texts = run.step, dict(run.texts)
        self._do(lambda: self._begin(first_step, texts))

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        """Queues the values."""
        step, copied = run.step, dict(values)  # of now: the thread reads them later
        self._do(lambda: self.values(step, copied))

    def on_timeline(self, run: Run, predicted: Spans, measured: Spans) -> None:
        """Queues one picture, of the last recorded step."""
        step, title = run.step, f"{self.run_name}, step {run.step}"
        self._do(lambda: self.picture(step, "timeline", draw(predicted, measured, title)))

    def on_end(self, run: Run) -> None:
        """Reports the results of a complete run as `summary/...`, and waits for the thread.

        Raises:
            TimeoutError: the service has not taken everything in time.
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
        thread, self._thread = self._thread, None
        if self._error is None:
            self._put(self.finish)
            self._put(None)
            patience_s = self.patience_s
            if self._deadline is not None:
                patience_s = min(patience_s, max(_LEAST_S, self._deadline - monotonic()))
            thread.join(patience_s)
            if thread.is_alive():
                raise TimeoutError(f"what is left was not taken in {patience_s:.3g} seconds")
        if self._error is not None:
            raise self._error

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Notes that the run has failed; after an interruption all trackers share one patience."""
        self.failed = True
        if isinstance(error, Interrupted):
            self._deadline = monotonic() + _AFTER_INTERRUPTION_S

    def abandon(self) -> None:
        """Leaves the thread, which ends with the process."""
        self._thread = None

    def _begin(self, first_step: int, texts: Mapping[str, str]) -> None:
        file = self.directory / f"{self.package}.id"
        known = file.read_text().strip() if first_step and file.exists() else None
        config = yaml.safe_load(texts.get("config", "")) or {}
        write_atomically(file, self.begin(known, config, texts) + "\n")

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            raise RuntimeError(f"call {type(self).__name__}.on_start() first")
        if self._error is not None:
            raise self._error
        self._put(job)

    def _put(self, job: Callable[[], None] | None) -> None:
        try:
            self._waiting.put_nowait(job)
        except Full:
            raise TimeoutError(f"{_MOST_WAITING} reports are waiting to be taken") from None

    def _work(self, jobs: Queue[Callable[[], None] | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # raised by the next report
                self._error = error
                return


def flat(tree: Any, prefix: str = "") -> list[tuple[str, str | bool | float]]:
    """Returns the dotted keys of a nested mapping, with their numbers; all else is text."""
    if not isinstance(tree, Mapping):
        return [(prefix, tree if isinstance(tree, str | bool | int | float) else str(tree))]
    return [
        entry
        for key, value in tree.items()
        if value is not None
        for entry in flat(value, f"{prefix}.{key}" if prefix else str(key))
    ]
