"""Interruptions of a run between two steps: signals, a time limit, a save every few minutes."""

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

# of the evaluations of this process, whichever trainer makes them
_evaluation_numbers = itertools.count()


class StepFlags:
    """Requests that all processes must follow in the same step, such as to stop.

    A flag that is set on one process before a step begins is read on all of them at its end: they
    take the largest value, by one all-reduce of a few bytes that runs while the step computes. With
    one process nothing is sent.

    Args:
        world: the processes.
        names: the flags.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = tuple(names)
        self._requested: dict[str, str] = {}  # by name, the reason; not sent yet
        self._sent: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._values = torch.zeros(len(self._names), dtype=torch.int32)
        self._work: dist.Work | None = None

    def set(self, name: str, reason: str = "") -> None:
        """Sets a flag; safe in a signal handler and in any thread."""
        if name not in self._names:
            raise ValueError(f"there is no flag {name!r}; the flags are: {', '.join(self._names)}")
        self._requested.setdefault(name, reason)

    def requested(self, name: str) -> str | None:
        """Returns why a flag was set on this process since the last `begin`, if it was."""
        return self._requested.get(name)

    def clear(self) -> None:
        """Forgets what was set and what is on the way: of a run that has ended in a step."""
        self._requested.clear()
        self._sent = {}
        self._work = None
        self._values = torch.zeros_like(self._values)  # the old ones may still be sent

    def begin(self) -> None:
        """Sends what was set so far; called by every process at the start of a step."""
        self._sent = {}
        if self._requested:
            for name in self._names:  # one by one: a handler may add another meanwhile
                if name in self._requested:
                    self._sent[name] = self._requested.pop(name)
        if self._world.size > 1:
            for name in self._sent:
                self._values[self._names.index(name)] = 1
            self._work = self._world.begin_max(self._values)

    def read(self) -> frozenset[str]:
        """Returns the flags that any process had set before this step's `begin`.

        All processes call it, and get the same. A flag counts once: to be read again it must be set
        again.
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
        for reasons in reversed(self._world.gather(self._sent)):  # the lowest rank's count
            self._reasons |= reasons
        return names

    def reason(self, name: str) -> str | None:
        """Returns why a flag was set, once `read` has returned it; the same on all processes."""
        return self._reasons.get(name)


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
        ask = partial(self._flags.set, "stop")
        with stop_on_signals(ask, speaks=self._world.is_main):
            yield

    @contextmanager
    def time_limit(self, applies: bool) -> Iterator[None]:
        """Ignores the end of the time while the block runs, unless the limit `applies` there."""
        stop_at = self._stop_at
        if not applies:
            self._stop_at = None
        try:
            yield
        finally:
            self._stop_at = stop_at

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
        store = self._world.watchdog.store if self._world.watchdog is not None else None
        work = f"stop/{next(_evaluation_numbers)}"
        is_shared, look_at = False, 0.0

        def wanted() -> bool:
            nonlocal is_shared, look_at
            self._look_at_clock()
            reason = self._flags.requested("stop")
            if is_shared or store is None:
                return reason is not None
            with suppress(RuntimeError):  # without the store: the next collective says so
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
