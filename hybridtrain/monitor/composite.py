"""Several monitors as one."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from hybridtrain.monitor.base import Monitor
from hybridtrain.schedule import Spans


class Monitors(Monitor):
    """Forwards every call to each of `monitors`, in order."""

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self._monitors = tuple(monitors)

    def start(self, *, total_steps: int | None, first_step: int, texts: Mapping[str, str]) -> None:
        """See `Monitor.start`."""
        for monitor in self._monitors:
            monitor.start(total_steps=total_steps, first_step=first_step, texts=texts)

    def step(self, step: int, samples: int) -> None:
        """See `Monitor.step`."""
        for monitor in self._monitors:
            monitor.step(step, samples)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """See `Monitor.scalars`."""
        for monitor in self._monitors:
            monitor.scalars(step, values)

    def timeline(self, step: int, predicted: Spans, measured: Spans) -> None:
        """See `Monitor.timeline`."""
        for monitor in self._monitors:
            monitor.timeline(step, predicted, measured)

    def close(self) -> None:
        """Closes all of them, even if one fails; then raises its exception."""
        with ExitStack() as stack:
            for monitor in reversed(self._monitors):
                stack.callback(monitor.close)
