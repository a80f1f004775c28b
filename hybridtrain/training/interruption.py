"""Interruptions of a run between two steps: signals, a time limit, a save every few minutes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hybridtrain.launch.signals import stop_on_signals
from hybridtrain.launch.step_flags import StepFlags
from hybridtrain.world import World

_POLL_S = 1.0

# of the evaluations of this process, whichever trainer makes them
_evaluation_numbers = itertools.count()


class Interruptions:
    """Tells all processes at the end of the same step that somebody wants to stop or to save.

    A signal may reach any process. Time is rank 0's: clocks of different processes do not agree.

    Args:
        world: the processes.
        max_seconds: when to stop, counted from `listening`; None: never.
        save_every_minutes: when to save, and again after each `saved`; None: never.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        world: World,
        max_seconds: float | None,
        save_every_minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world = world
        self._flags = StepFlags(world, ("stop", "save"))
        self._clock = clock if world.is_main else None
        self._max_seconds = max_seconds
        self._save_seconds = save_every_minutes and 60 * save_every_minutes
        self._stop_at: float | None = None
        self._save_at: float | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to signals, and counts the time, while the block runs."""
        if self._clock is not None and self._max_seconds is not None:
            self._stop_at = self._clock() + self._max_seconds
        self._flags.clear()  # a request of the last time must not end this one
        self.saved()
        with stop_on_signals(self._flags):
            yield

    def saved(self) -> None:
        """Counts the minutes to the next save from now on."""
        if self._clock is not None and self._save_seconds is not None:
            self._save_at = self._clock() + self._save_seconds

    def begin_step(self) -> None:
        """Sends the wishes of this process to the others; they arrive while the step computes."""
        self._look_at_clock()
        self._flags.begin()

    def end_step(self) -> frozenset[str]:
        """Returns the wishes of all processes before this step, of "stop" and "save"."""
        return self._flags.read()

    def watch_for_stop(self) -> Callable[[], bool]:
        """Returns a function that tells whether any process wants to stop.

        It is for work in which the processes take different numbers of batches, so that they cannot
        agree by a collective: the wish of one goes through their store, where the others look once
        a second. Every process calls this for the same evaluation.
        """
        job = self._world.watchdog.job if self._world.watchdog is not None else None
        work = f"stop/{next(_evaluation_numbers)}"
        told, look_at = False, 0.0

        def wanted() -> bool:
            nonlocal told, look_at
            self._look_at_clock()
            reason = self._flags.requested("stop")
            if told or job is None:
                return reason is not None
            with suppress(RuntimeError):  # without the store: the next collective says so
                if reason is not None:
                    told = True
                    job.say_stop(work, reason)
                elif (now := time.monotonic()) >= look_at:
                    look_at = now + _POLL_S
                    reason = job.stop_said(work)
                    if reason is not None:
                        told = True
                        self._flags.set("stop", reason)
            return reason is not None

        return wanted

    @property
    def stop_reason(self) -> str:
        """The reason to stop, such as the name of a signal, once `end_step` has returned "stop"."""
        return self._flags.reason("stop") or "a request"

    def _look_at_clock(self) -> None:
        if self._clock is None or (self._stop_at is None and self._save_at is None):
            return
        now = self._clock()
        if self._stop_at is not None and now >= self._stop_at:
            self._flags.set("stop", reason="max_time")
        if self._save_at is not None and now >= self._save_at:
            self._flags.set("save")
            self.saved()  # it will be; and if it must not, it is asked for again then
