"""Interruptions of a run between two steps: signals, a time limit, periodic saves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist

from hybridtrain.launch import stop_on_signals
from hybridtrain.world import World

_POLL_S = 1.0

# numbers this process's evaluations, across trainers
_evaluation_numbers = itertools.count()


class StepFlags:
    """Requests, such as a stop, that all processes must follow in the same step.

    A flag set on one process before a step begins is read by all processes at its end. One
    all-reduce (max) of a few bytes runs while the step computes. A single process sends nothing.

    Args:
        world: the processes.
        names: the names of the flags.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = tuple(names)
        self._requested: dict[str, str] = {}  # flag name -> reason, not sent yet
        self._sent: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._values = torch.zeros(len(self._names), dtype=torch.int32)
        self._work: dist.Work | None = None

    def set(self, name: str, reason: str = "") -> None:
        """Sets a flag; safe in a signal handler and in any thread."""
        if name not in self._names:
            raise ValueError(f"unknown flag {name!r}; the flags are: {', '.join(self._names)}")
        self._requested.setdefault(name, reason)

    def requested(self, name: str) -> str | None:
        """Returns the reason for a flag set on this process since the last `begin`, or None."""
        return self._requested.get(name)

    def clear(self) -> None:
        """Clears all flags, sent or not, after a run that ended inside a step."""
        self._requested.clear()
        self._sent = {}
        self._work = None
        # an all-reduce of old flags may still be in flight
        self._values = torch.zeros_like(self._values)

    def begin(self) -> None:
        """Sends the flags set so far; called by every process at the start of a step."""
        self._sent = {}
        if self._requested:
            # one by one, because a signal handler may add a flag meanwhile
            for name in self._names:
                if name in self._requested:
                    self._sent[name] = self._requested.pop(name)
        if self._world.size > 1:
            for name in self._sent:
                self._values[self._names.index(name)] = 1
            self._work = self._world.begin_max(self._values)

    def read(self) -> frozenset[str]:
        """Returns the flags that any process had set before this step's `begin`.

        All processes call this and get the same result. Reading clears the flags.
        """
        if self._work is None:
            self._reasons |= self._sent
            return frozenset(self._sent)
        self._work.wait()
        self._work = None
        values = self._values.tolist()
        if not any(values):
            return frozenset()
        names = frozenset(name for name, value in zip(self._names, values, strict=True) if value)
        self._values.zero_()
        for reasons in reversed(self._world.gather(self._sent)):  # the lowest rank's reason counts
            self._reasons |= reasons
        return names

    def reason(self, name: str) -> str | None:
        """Returns the reason for a flag that `read` has returned; the same on all processes."""
        return self._reasons.get(name)


class Interruptions:
    """Makes all processes stop or save at the end of the same step.

    Any process may receive a signal. Only rank 0's clock counts, because clocks differ.

    Args:
        world: the processes.
        max_seconds: the time after which to stop, counted from `listening`; None for no limit.
        save_every_minutes: the minutes between saves; None for no periodic saves.
        clock: returns seconds; for tests.
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
        """Handles signals and measures time while the block runs."""
        if self._clock is not None and self._max_seconds is not None:
            self._stop_at = self._clock() + self._max_seconds
        self._flags.clear()  # a request to an earlier run must not end this one
        self.saved()
        ask = partial(self._flags.set, "stop")
        with stop_on_signals(ask, speaks=self._world.is_main):
            yield

    @contextmanager
    def time_limit(self, applies: bool) -> Iterator[None]:
        """Suspends the time limit while the block runs, unless `applies` is True."""
        stop_at = self._stop_at
        if not applies:
            self._stop_at = None
        try:
            yield
        finally:
            self._stop_at = stop_at

    def saved(self) -> None:
        """Restarts the interval to the next periodic save."""
        if self._clock is not None and self._save_seconds is not None:
            self._save_at = self._clock() + self._save_seconds

    def begin_step(self) -> None:
        """Sends this process's requests to the others while the step computes."""
        if self._stop_at is not None or self._save_at is not None:
            self._look_at_clock()
        self._flags.begin()

    def end_step(self) -> frozenset[str]:
        """Returns the requests, "stop" or "save", that any process made before this step."""
        return self._flags.read()

    def watch_for_stop(self) -> Callable[[], bool]:
        """Returns a function that returns whether any process has requested a stop.

        For work in which processes run different numbers of batches, so that they cannot agree
        through a collective: a request goes through the store, which the other processes read once
        a second. Every process calls this for the same evaluation.
        """
        store = self._world.watchdog.store if self._world.watchdog is not None else None
        work = f"stop/{next(_evaluation_numbers)}"
        is_shared, look_at = False, 0.0

        def wanted() -> bool:
            nonlocal is_shared, look_at
            self._look_at_clock()
            reason = self._flags.requested("stop")
            if is_shared or store is None:
                return reason is not None
            with suppress(RuntimeError):  # the store is gone: the next collective reports it
                if reason is not None:
                    is_shared = True
                    store.request_stop(work, reason)
                elif (now := time.monotonic()) >= look_at:
                    look_at = now + _POLL_S
                    reason = store.stop_reason(work)
                    if reason is not None:
                        is_shared = True
                        self._flags.set("stop", reason)
            return reason is not None

        return wanted

    @property
    def stop_reason(self) -> str:
        """The reason for the stop, such as a signal name, after `end_step` has returned "stop"."""
        return self._flags.reason("stop") or "a request"

    def _look_at_clock(self) -> None:
        if self._clock is None or (self._stop_at is None and self._save_at is None):
            return
        now = self._clock()
        if self._stop_at is not None and now >= self._stop_at:
            self._flags.set("stop", reason="max_time")
        if self._save_at is not None and now >= self._save_at:
            self._flags.set("save")
            self.saved()  # restarts the interval; a save that is not made now is due again after it
