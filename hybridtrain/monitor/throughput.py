"""Samples a second and step times, with pauses left out."""

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Interval(NamedTuple):
    """What was measured since the last reading."""

    samples_per_second: float
    step_ms: float
    """The mean."""


class Summary(NamedTuple):
    """What was measured over the whole run."""

    samples: int
    samples_per_second: float
    step_ms_p50: float
    step_ms_p95: float


class Throughput:
    """Counts samples against the time spent on training steps, from its construction on.

    Time is the host's. Work on a GPU runs behind it, so a single step's time there is that of
    handing the work over, until the loop waits for a value; intervals that end with a logged
    step, and the whole run, are right.

    Every step time is kept, for exact percentiles: 8 bytes a step, 8 MB after a million. A
    sample of them would save little and make two summaries of one run differ.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_seconds = array("d")
        self._seconds = 0.0
        self._samples = 0
        self._read = (0, 0, 0.0)  # steps, samples and seconds at the last reading
        self._mark = clock()  # the end of the last step, moved forward by pauses

    def tick(self, samples: int) -> None:
        """Tell that a step on `samples` samples ends now, and the next begins."""
        now = self._clock()
        self._step_seconds.append(now - self._mark)
        self._seconds += now - self._mark
        self._samples += samples
        self._mark = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time within out: evaluation, checkpoints."""
        begin = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - begin

    def read(self) -> Interval:
        """Return the rates since the last reading and begin the next interval; 0 without steps."""
        steps, samples, seconds = self._read
        self._read = (len(self._step_seconds), self._samples, self._seconds)
        seconds = self._seconds - seconds
        return Interval(
            samples_per_second=_ratio(self._samples - samples, seconds),
            step_ms=_ratio(1e3 * seconds, len(self._step_seconds) - steps),
        )

    def summary(self) -> Summary:
        """Return the rates of the whole run; 0 without steps."""
        ordered = sorted(self._step_seconds)
        return Summary(
            samples=self._samples,
            samples_per_second=_ratio(self._samples, self._seconds),
            step_ms_p50=1e3 * _percentile(ordered, 50),
            step_ms_p95=1e3 * _percentile(ordered, 95),
        )


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


def _percentile(ordered: list[float], percent: float) -> float:
    """The percentile by linear interpolation between the closest ranks, as numpy's default."""
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])
