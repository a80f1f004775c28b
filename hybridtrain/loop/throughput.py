"""Throughput of a run in samples, tokens and step times, excluding evaluations and saves."""

from __future__ import annotations

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
    tokens_per_second: float
    """0 if samples have no length; see `Batch.tokens`."""


class Summary(NamedTuple):
    """Rates of the whole run."""

    samples_per_second: float
    step_ms_p50: float
    step_ms_p95: float
    tokens_per_second: float


class Throughput:
    """Measures training throughput from construction on.

    Time is measured on the host. GPU work is asynchronous, so the time of a single step on a GPU is
    its launch time. Intervals that end with a logged step, which synchronizes, and totals of the
    whole run are accurate.

    All step times are stored (8 bytes each) for exact percentiles.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._step_seconds = array("d")
        self._samples = self._tokens = 0
        self._read = (0, 0, 0)  # steps, samples and tokens at the last reading
        self._mark = clock()  # the end of the last step, moved forward by pauses

    def tick(self, samples: int, tokens: int = 0) -> None:
        """Ends a step on `samples` samples with `tokens` tokens in total, and begins the next."""
        now = self._clock()
        self._step_seconds.append(now - self._mark)
        self._samples += samples
        self._tokens += tokens
        self._mark = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time in the block, such as evaluation, checkpoints and pictures."""
        begin = self._clock()
        try:
            yield
        finally:
            self._mark += self._clock() - begin

    def read(self) -> Interval:
        """Returns the rates since the last reading (0 without steps), and begins an interval."""
        steps, samples, tokens = self._read
        self._read = (len(self._step_seconds), self._samples, self._tokens)
        seconds = self._step_seconds[steps:]
        total = sum(seconds)
        return Interval(
            _ratio(self._samples - samples, total),
            _ratio(1e3 * total, len(seconds)),
            _ratio(self._tokens - tokens, total),
        )

    def summary(self) -> Summary:
        """Returns the rates of the whole run; 0 without steps."""
        p50, p95 = (1e3 * np.percentile(self._step_seconds or [0.0], [50, 95])).tolist()
        total = sum(self._step_seconds)
        return Summary(_ratio(self._samples, total), p50, p95, _ratio(self._tokens, total))


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
