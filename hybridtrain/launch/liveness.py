"""Signs of life of the processes of a run, over their store.

A host that loses its power or its network closes no connection: those who wait for it in a
collective wait until the limit of the collective, which is long where rank 0 may download or write.
So every process counts in the store while it lives. Rank 0 reads everyone's count and the others
rank 0's. A process that can read none, because its own host is cut off, learns it from the clock:

    rank 0    alive/1 the same for too long           ->  ends the run, and names rank 1
    rank 2    told by rank 0 through the store
    rank 1    no answer from the store for too long   ->  ends by itself
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridtrain.launch.job import Job

BEAT_S = 2.0
"""Seconds between two signs of life."""

_LEAST_S = 20.0


class Liveness:
    """The signs of life of this process and of those it looks at.

    Args:
        job: what the processes share; used by one thread alone.
        timeout_s: seconds without a sign after which a process counts as gone; 20 at least.
        clock: seconds, for tests.

    Attributes:
        timeout_s: the limit that holds.
    """

    def __init__(
        self, job: Job, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = max(timeout_s, _LEAST_S)
        self._job = job
        self._clock = clock
        self._others = [rank for rank in range(job.size) if rank != job.rank]
        if job.rank != 0:
            self._others = [0]
        self._counts: dict[int, int] = {}
        self._changed: dict[int, float] = {}
        self._next = 0.0
        self._own = 0
        self._answered = clock()

    def beat(self) -> None:
        """Gives a sign of life, and reads those of the others, if it is time to."""
        now = self._clock()
        if now >= self._next:
            self._next = now + BEAT_S
            self._own += 1
            self._job.beat(self._own)
            for rank in self._others:
                count = self._job.beats(rank)
                if count != self._counts.get(rank):
                    self._counts[rank] = count
                    self._changed[rank] = self._clock()
        self._answered = self._clock()

    def silent(self) -> tuple[int, float] | None:
        """Returns the process that has been silent for too long, and for how many seconds."""
        now = self._clock()
        for rank in self._others:
            seconds = now - self._changed.get(rank, now)
            if seconds > self.timeout_s and not self._job.has_left(rank):
                return rank, seconds
        return None

    def unanswered_s(self) -> float:
        """Returns for how long the store has not answered; from any thread."""
        return self._clock() - self._answered
