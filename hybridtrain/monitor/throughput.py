"""Samples per second and step times, without pauses."""

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """Rates since the last reading."""

    samples_per_second: float
    step_ms: float
    """Mean time per step."""


class Summary(NamedTuple):
    """Rates of the whole run."""

    samples_per_second: float
    step_ms_p50: float
    step_ms_p95: float


class Throughput:
    """Measures samples per second of training, from its construction on.

    Time is measured on the host. GPU work is asynchronous, so the time of a single step there is
    the time to launch it; intervals that end with a logged step, which waits for the GPU, and the
    whole run are right.

    Every step time is kept (8 bytes each), for exact percentiles.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_seconds = array("d")
        self._samples = 0
        self._read = (0, 0)  # steps and samples at the last reading
        self._mark = clock()  # the end of the last step, moved forward by pauses

    def tick(self, samples: int) -> None:
        """Ends a step on `samples` samples and begins the next."""
        now = self._clock()
        self._step_seconds.append(now - self._mark)
        self._samples += samples
        self._mark = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time inside: evaluation, checkpoints."""
        begin = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - begin

    def read(self) -> Interval:
        """Returns the rates since the last reading, or 0 without steps; begins an interval."""
        steps, samples = self._read
        self._read = (len(self._step_seconds), self._samples)
        seconds = self._step_seconds[steps:]
        rate = _ratio(self._samples - samples, sum(seconds))
        return Interval(rate, _ratio(1e3 * sum(seconds), len(seconds)))

    def summary(self) -> Summary:
        """Returns the rates of the whole run; 0 without steps."""
        p50, p95 = (1e3 * np.percentile(self._step_seconds or [0.0], [50, 95])).tolist()
        return Summary(_ratio(self._samples, sum(self._step_seconds)), p50, p95)


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
