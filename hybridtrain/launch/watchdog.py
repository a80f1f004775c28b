"""A thread per process that ends the run when it fails or stalls.

A process whose main thread is blocked in a collective notices neither that another process has
failed nor that the run has stalled. This thread notices both. It has a separate connection to the
processes' store, and ends the process by `os._exit`, since a blocked thread cannot be stopped.

Rank 0 usually serves the store. If it is stopped, every request waits for as long as that lasts, so
a second thread, the guard, makes no requests. It notices that the first one gets no answer.

A host that loses power or network closes no connection: processes that wait for it in a collective
wait until the collective's timeout, which is long because rank 0 may download or write. So every
process increments a counter in the store while it lives. Rank 0 reads all counters and the others
read rank 0's. A process on a host that is cut off gets no answer, and detects this by a timeout:

    rank 0    alive/1 the same for too long           ->  ends the run, and names rank 1
    rank 2    reads rank 0's failure in the store     ->  ends
    rank 1    no answer from the store for too long   ->  ends

A run has stalled if no process moves. A process that waits for a slow one does not move either, so
each sign of life says for how long its process has not moved (`Progress`), and a process that finds
itself beyond its limit looks at those of all others. Then each process derives from its stacks what
it is doing and whether it waits for others (`report`). The failure names the process that is not
waiting for another.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from hybridtrain.launch.activity import (
    WAIT_FOR_SAVE_S,
    Activity,
    Phase,
    Work,
    activity,
    end_process,
    ending_within,
    wait_until,
)
from hybridtrain.launch.environment import launcher_serves_store
from hybridtrain.launch.error_file import write_error_file
from hybridtrain.launch.limits import PRINT_S, VERDICT_S, say, within
from hybridtrain.launch.process_id import ProcessId, has_ended, is_seen_from_here, is_stopped, kill
from hybridtrain.launch.process_store import EXIT_STALLED, Failure, ProcessStore, Report, Sign
from hybridtrain.schedule import WORDS

# checked without importing the module
_TORCH = Path(str(getattr(find_spec("torch"), "origin", ""))).parent
_LIBRARY = Path(__file__).parents[1]
_STDLIB = Path(threading.__file__).parent

# `<` as in `<frozen importlib>`, and code without a file.
_NOT_THE_USERS = (str(_LIBRARY), str(_TORCH), str(_STDLIB), "<")

_NEUTRAL = tuple(str(_STDLIB / name) for name in ("threading.py", "queue.py", "contextlib.py"))
# A collective call has its innermost frames here.
_COLLECTIVES = (
    *(str(_LIBRARY / name) for name in ("world.py", "_base/objects.py", "launch")),
    str(_TORCH / "distributed"),
)
# An innermost frame in these files is waiting for another process, or for a thread that is examined
# separately.
_WAITS = (
    *_COLLECTIVES,
    *(
        str(_LIBRARY / name)
        for name in (
            "pipeline/message_wire.py",
            "pipeline/point_to_point.py",
            "pipeline/forward/engine.py",
            "pipeline/forward/turns.py",
        )
    ),
)
# An innermost frame here may wait: a backward ends with an all-reduce that has no Python frame.
_MAY_WAIT = (
    *(
        str(_LIBRARY / name)
        for name in ("pipeline", "_base/torch_private.py", "checkpoint/state.py")
    ),
    str(_TORCH / "nn/parallel"),
    str(_TORCH / "autograd"),
)


def write_stacks(path: Path) -> None:
    """Writes the stacks of all threads of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file: an existing link is not followed, and a link that appears meanwhile is an error.
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def report(activity: Activity) -> Report:
    """Returns what this process is doing, and whether it seems to wait for other processes."""
    # A snapshot while all threads run on: good enough, because a process that is asked for it
    # stands.
    frames = sys._current_frames()
    main = threading.main_thread()
    best: tuple[int, str, FrameType | None] = (0, "", None)
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        # A thread may have been the last one of several lanes, see `LaneActivity`.
        lanes = [lane for lane in activity.lanes if lane.thread == thread.ident]
        actions = [lane.action for lane in lanes if lane.action]
        # Threads without an action, such as this one, are not what the run waits for.
        if frame is None or not (thread is main or actions):
            continue
        blame, action = _blame(frame), ""
        if actions:
            # a thread that waits for another device still is the last one of those that it has left
            busy = [lane.action for lane in lanes if lane.action and not lane.waiting]
            blame = blame if busy else 0
            action = describe((busy or actions)[0])
        # The busiest thread decides: the others of this process may be waiting for it. Of two that
        # are equally busy, the one with an action says more.
        if best[2] is None or (blame, bool(action)) > (best[0], bool(best[1])):
            best = blame, action, frame
    blame, action, innermost = best
    work = str(activity.work or "no phase of training")
    what = f"in the {action} ({work})" if action else f"in {work!r}"
    where = _user_frame(innermost)
    if where:
        what += f", {where}"

    return Report(what, blame, activity.steps)


def stands_in_debugger() -> bool:
    """Returns whether a thread of this process is in a debugger, where no progress is expected."""
    return any(
        frame.f_code.co_filename.endswith("bdb.py") or "pydevd" in frame.f_code.co_filename
        for innermost in sys._current_frames().values()
        for frame in _frames(innermost)
    )


def summary(activity: Activity) -> str:
    """Summarizes what the training loop and the busy devices are doing."""
    work = str(activity.work or "no phase of training")
    busy = [lane.action for lane in activity.lanes if lane.action and not lane.waiting]
    doing = " and the ".join(describe(action) for action in busy)
    return f"in the {doing} ({work})" if doing else f"in {work!r}"


def describe(action: tuple[str, int, int]) -> str:
    """Returns an action of a schedule as text."""
    kind, stage, microbatch = action
    return f"{WORDS[kind]} of micro-batch {microbatch} on stage {stage}"


def _blame(frame: FrameType) -> int:
    """Returns 0 if the innermost frame waits for others, 1 if it may, 3 if it is busy.

    A collective call that the user's code makes itself waits too. It counts 2: only this process
    may have called it, while the others wait in a step.
    """
    # skips queues, conditions and context managers: their caller decides
    innermost = _without(frame, _NEUTRAL)
    path = "" if innermost is None else innermost.f_code.co_filename
    if path.startswith(_COLLECTIVES):
        caller = _without(innermost, (*_NEUTRAL, *_COLLECTIVES))
        if caller is not None and not caller.f_code.co_filename.startswith(_NOT_THE_USERS):
            return 2
    if path.startswith(_WAITS):
        return 0
    return 1 if path.startswith(_MAY_WAIT) else 3


def _without(frame: FrameType | None, files: tuple[str, ...]) -> FrameType | None:
    """Returns the innermost frame that is not in one of these files or folders."""
    outer_frames = _frames(frame)
    return next((f for f in outer_frames if not f.f_code.co_filename.startswith(files)), None)


def _user_frame(frame: FrameType | None) -> str:
    """Returns the location of the innermost frame in the user's code, or ""."""
    for user_frame in _frames(frame):
        path = user_frame.f_code.co_filename
        if not path.startswith(_NOT_THE_USERS):
            summary = traceback.extract_stack(user_frame, limit=1)[0]
            return f'File "{summary.filename}", line {summary.lineno}, in {summary.name}'
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


BEAT_S = 2.0
"""Seconds between two signs of life, at most."""

_LEAST_S = 20.0
_TICK_S = 0.25
# Time limits for a process to exit after a failure, and after an interruption.
_GRACE_S = 2.0
_GRACE_INTERRUPTED_S = 15.0
_WAIT_FOR_STACKS_S = 2.0
# The first steps and the first evaluation may compile, rehearse and fill caches.
_FIRST_TIMES = 4.0
_FIRST_STEPS = 2
# Work that may take long without progress, and the factor by which its limit is extended.
_LONG = {Phase.SAVE: 10.0, Phase.SETUP: math.inf}


class Progress:
    """When this process has moved last: begun other work, another step or another action of one.

    The threads of the watchdog look at the record of the activity several times a second, so the
    threads that train do nothing for it. No two states of a run are equal, because steps are
    numbered and each action occurs once in a step.

    Args:
        record: the record of what this process is doing.
        stall_s: seconds without progress that are allowed; 0 for no limit.
    """

    def __init__(self, record: Activity, stall_s: float) -> None:
        self._record = record
        self._stall_s = stall_s
        self._state: object = None
        self._since = self._looked = time.monotonic()

    def look(self) -> None:
        """Compares the record with what it was at the last look."""
        record, now = self._record, time.monotonic()
        # Both threads of the watchdog call this, without a lock: the worst is a `_since` that is a
        # tick too late.
        lanes = tuple((lane.action, lane.waiting) for lane in record.lanes)
        state = record.work, record.steps, record.compared, lanes
        # or this process itself was stopped meanwhile
        if state != self._state or now - self._looked > 20 * _TICK_S:
            self._state, self._since = state, now
        self._looked = now

    def idle_s(self) -> float:
        """Returns the seconds since this process last moved."""
        return time.monotonic() - self._since

    def overdue_s(self) -> float:
        """Returns the seconds without progress beyond the limit, see `Sign`."""
        overdue = self.idle_s() - self.limit(self._record.work)
        # Stacks are read only when it matters, and the limit begins again when the debugger is
        # left.
        if overdue >= 0 and stands_in_debugger():
            self._since = time.monotonic()
            return -self._stall_s
        return overdue

    def limit(self, work: Work | None) -> float:
        """Returns the seconds without progress that `work` may take.

        None is the time between two steps of a script. It counts, like a collective call there, if
        others wait for this process in a step.
        """
        if self._stall_s <= 0:
            return math.inf
        if work is None:
            return self._stall_s
        phase, steps = work.phase, self._record.steps
        # Counted from the phase's own first step: a run's first evaluation may come late.
        first = steps - self._record.entered.get(phase, steps) <= _FIRST_STEPS
        # processes synchronize only at the end of an evaluation, where they may wait for the first
        # batch of one
        first |= phase is Phase.EVALUATE and self._record.evaluations <= 1
        return self._stall_s * max(_LONG.get(phase, 1.0), _FIRST_TIMES if first else 1.0)


class Liveness:
    """The signs of life of this process and of the processes that it watches.

    Args:
        store: the store of the processes; only one thread may use it.
        timeout_s: seconds without a sign of life after which a process counts as gone; at least 20.
        stall_s: seconds without progress after which a run ends. Signs come several times in it.
        clock: returns the time in seconds; for tests.

    Attributes:
        timeout_s: the limit in effect, in seconds.
    """

    def __init__(
        self,
        store: ProcessStore,
        timeout_s: float,
        stall_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = max(timeout_s, _LEAST_S)
        self._store = store
        self._clock = clock
        # `stands` must learn within a fraction of the limit that a process has moved again.
        self._every_s = min(BEAT_S, max(_TICK_S, stall_s / 4)) if stall_s > 0 else BEAT_S
        self._others = [rank for rank in range(store.size) if rank != store.rank]
        # rank 0 watches all, and the others watch rank 0
        self._watched_ranks = self._others if store.rank == 0 else [0]
        self._signs: dict[int, Sign] = {}
        # When the sign of a rank has last changed, by this process's clock: clocks of hosts differ.
        self._changed: dict[int, float] = {}
        self._next = 0.0
        self._beat_count = 0
        self._answered = clock()

    def beat(self, overdue_s: float = -math.inf, looks_at_all: bool = False) -> None:
        """Publishes a sign of life and reads the other processes' signs, if they are due.

        Args:
            overdue_s: see `Sign`.
            looks_at_all: whether to read the signs of all processes, for `stands`.
        """
        now = self._clock()
        if now >= self._next:
            # Before the request: a slow store must not be asked more often.
            self._next = now + self._every_s
            self._beat_count += 1
            self._store.beat(self._beat_count, overdue_s)
            ranks = self._others if looks_at_all else self._watched_ranks
            for rank, sign in zip(ranks, self._store.signs(ranks), strict=True):
                known = self._signs.get(rank)
                if known is None or known.count != sign.count:
                    self._changed[rank] = self._clock()
                self._signs[rank] = sign
        # Also without a request: `_run` calls this when the requests of its last tick are answered.
        # The guard reads it, in the other thread.
        self._answered = self._clock()

    def silent(self) -> tuple[int, float] | None:
        """Returns the rank that has been silent for too long and for how many seconds, or None."""
        now = self._clock()
        for rank in self._watched_ranks:
            seconds = now - self._changed.get(rank, now)
            # A process that has left is silent because it has ended, after all its work.
            if seconds > self.timeout_s and not self._store.has_left(rank):
                return rank, seconds
        return None

    def stands(self, rank: int) -> bool:
        """Returns whether a process has reported that it has not moved within its limit.

        If its last sign is old, the time since then counts too.
        """
        sign = self._signs.get(rank)
        if sign is None:  # not read yet
            return False
        seconds = self._clock() - self._changed[rank]
        # More than two signs are missing: a process whose host is slow may miss one.
        late = seconds - self._every_s if seconds > 2.5 * self._every_s else 0.0
        return sign.overdue_s + late >= 0

    def unanswered_s(self) -> float:
        """Returns for how many seconds the store has not answered; callable from any thread."""
        return self._clock() - self._answered


# More than the limits of all that a process waits for when it ends.
_TO_END_S = WAIT_FOR_SAVE_S + VERDICT_S + 5 * PRINT_S

_SILENCE = "the limit is timeout_s, at least 20 s"

_log = logging.getLogger(__name__)

_current: Watchdog | None = None


def current() -> Watchdog | None:
    """Returns the watchdog of this process, or None."""
    return _current


class Watchdog:
    """Watches this process and, through the store, the others.

    Args:
        store: the store of the processes.
        stall_s: seconds without progress after which the run ends; 0 for no limit. Only work
            recorded in `activity` is watched, because outside a run no progress is expected.
        timeout_s: the timeout of collectives, in seconds.
        record: the record of what this process is doing.

    Raises:
        RuntimeError: the store is gone or does not answer.

    Attributes:
        store: the store of the processes, for the main thread.
        stacks: the folder for the stacks of a stalled run; None for a new folder in the temporary
            directory.
        exit_code: the exit code of this process if another process's failure ends it.
        known_failure: the failure that ends the run, once this process has read it.
        prints_failures: whether this process prints another process's failure that ends it.
    """

    def __init__(
        self, store: ProcessStore, stall_s: float, timeout_s: float, record: Activity = activity
    ) -> None:
        self.store = store
        self.timeout_s = timeout_s
        self.stacks: Path | None = None
        self.exit_code = 1
        self.known_failure: Failure | None = None
        self.prints_failures = True
        # In another thread with a limit: rank 0, which serves the store, may be stopped after the
        # meeting.
        self._processes = within(timeout_s + _LEAST_S, store.enter)
        # a connection of its own: on one, the main thread's wait for a key would block the beats
        self._store = within(_LEAST_S, store.clone)
        self._liveness = Liveness(self._store, timeout_s, stall_s)
        self._progress = Progress(record, stall_s)
        self._store_is_gone = self._is_ending = False
        self._stall_s = stall_s
        self._activity = record
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answered = False

    def start(self) -> None:
        """Starts the threads unless they run; replaces another watchdog of this process."""
        global _current
        if _current is not None and _current is not self:
            # Both would answer the same requests, on the same keys.
            _current.end_threads()
            atexit.unregister(_current.end_threads)
        _current = self
        if not self._threads:
            targets = [self._watch]
            if self._store.size > 1:
                targets.append(self._guard)
            # Daemon: a store call that never returns must not keep the process alive.
            self._threads = [
                threading.Thread(target=target, name="watchdog", daemon=True) for target in targets
            ]
            for thread in self._threads:
                thread.start()
            # At exit, the interpreter aborts the process if a thread is in a store call.
            atexit.register(self.end_threads)

    def close(self) -> None:
        """Ends the threads, and publishes that this process ends normally."""
        global _current
        if _current is self:
            _current = None
        with suppress(RuntimeError):
            # Before the threads end: the others' watchdogs must find `left` when this process is
            # gone.
            within(VERDICT_S, self.store.leave)
        self.end_threads()
        atexit.unregister(self.end_threads)
        # A later run of this process begins with the limits of first steps again.
        self._activity.set(None)

    def end_threads(self) -> None:
        """Ends the threads; this process is no longer watched."""
        # Wakes both threads at once, and `_follow`, which leaves the report to the main thread.
        self._ended.set()
        for thread in self._threads:
            # a thread may be in a store call without an end, and exits with the process anyway
            thread.join(timeout=_GRACE_S)

    def lost_process(self, store: ProcessStore) -> Failure | None:
        """Returns a failure about a process of this host that ended silently, or None."""
        for rank, process in enumerate(self._processes):
            # `has_ended` first: it costs no request. And in this order a process that leaves and
            # ends between the two is not taken for lost.
            if rank == store.rank or not has_ended(process) or store.has_left(rank):
                continue
            last = self._last_seen(store, rank)
            return Failure(
                store.rank,
                f"{self.name(store, rank)} ended without a message{last}: it was killed (by the "
                "system if memory ran out), crashed or called exit; see the launcher's report "
                "for its signal or exit code",
                time=time.time() + 2,  # after the launcher's report on that process
            )
        return None

    def silent_process(self) -> Failure | None:
        """Returns a failure about a process that stopped responding, or None."""
        silent = self._liveness.silent()
        if silent is None:
            return None
        rank, seconds = silent
        return Failure(
            self._store.rank,
            f"{self.name(self._store, rank)} has not responded for {seconds:.0f} "
            f"s{self._last_seen(self._store, rank)}: {self._why_silent(rank)} ({_SILENCE})",
            unresponsive=(self._processes[rank],),
        )

    def _why_silent(self, rank: int) -> str:
        process = self._processes[rank]
        if is_stopped(process):
            return "the process is stopped"
        if is_seen_from_here(process):
            return "the process is in a call that does not return, or its host is overloaded"
        return "its host or the network to it is down, or the process is stopped"

    def process_gone(self) -> Failure | None:
        """Returns a failure about a process of another host that has ended, or None.

        Called by the main thread after a broken connection; watches signs of life for some seconds.
        """
        store = self.store
        ranks = range(store.size)
        signs_before = store.signs(ranks)
        # Longer than two beats: one may be late.
        time.sleep(2.5 * BEAT_S)
        for rank, before, sign in zip(ranks, signs_before, store.signs(ranks), strict=True):
            if rank != store.rank and sign == before and not store.has_left(rank):
                return Failure(
                    store.rank,
                    f"{self.name(store, rank)} is gone: its connection broke, and it does not "
                    f"respond{self._last_seen(store, rank)}; check its output and the launcher's "
                    "report",
                )
        return None

    def store_gone(self) -> Failure:
        """Returns a failure about a store that is gone or does not answer.

        Rank 0 serves it, or its launcher. No request to the store is made.
        """
        rank = self._store.rank
        if self.main_is_stopped:
            line = f"{self._main} has not responded for {self._liveness.unanswered_s():.0f} s"
            process = self._processes[0]
            return Failure(rank, f"{line}: the process is stopped", unresponsive=(process,))
        return Failure(
            rank,
            f"lost the connection to the processes' store: {self._main} or its launcher has ended; "
            "check its output",
        )

    @property
    def main_is_stopped(self) -> bool:
        """Whether rank 0 serves the store, runs on this host and is stopped."""
        return self._main_serves and is_stopped(self._processes[0])

    @property
    def _main_serves(self) -> bool:
        return not launcher_serves_store(os.environ)

    @property
    def _main(self) -> str:
        """The name of rank 0, without a request to the store."""
        process = self._processes[0]
        return f"rank 0 (pid {process.pid} on {process.host})"

    def _guard(self) -> None:
        """Ends this process where the other thread cannot, because the store does not answer."""
        last_tick = since = time.monotonic()
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            # Time in which this process was stopped says nothing about the store.
            if now - last_tick > 20 * _TICK_S:  # this process itself was stopped meanwhile
                since = now
            last_tick = now
            # Here too, because the other thread may be blocked in a request.
            self._progress.look()
            seconds = min(self._liveness.unanswered_s(), now - since)
            # Set by the other thread, which has ended: only this one is left to notice a stall.
            if self._store_is_gone:
                failure = self._stall_without_store()
            elif seconds > self._liveness.timeout_s:
                failure = self._unanswered(seconds)
            # Much earlier than the limit: a stopped rank 0 on this host is known for certain. One
            # that is continued in time does no harm, so only a stall ends the run.
            elif seconds > BEAT_S and self.main_is_stopped:
                failure = self._stall_without_store()
            else:
                continue
            if failure is not None:
                self._print_and_end(failure)

    def _unanswered(self, seconds: float) -> Failure:
        """Returns the failure about a store that has not answered for `seconds`."""
        rank = self._store.rank
        if not self._main_serves:
            return Failure(
                rank,
                f"the processes' store, which the launcher serves at MASTER_ADDR, has not answered "
                f"rank {rank} on {self._processes[rank].host} for {seconds:.0f} s: the launcher is "
                f"stopped, or its host or the network to it is down ({_SILENCE})",
            )
        host = self._processes[0].host
        if is_seen_from_here(self._processes[0]):
            line = f"{self._main} has not responded for {seconds:.0f} s: {self._why_silent(0)}"
        else:
            line = (
                f"rank {rank} on {self._processes[rank].host} has been cut off from rank 0 on "
                f"{host} for {seconds:.0f} s: that host or the network is down, or rank 0 is "
                "stopped"
            )
        return Failure(rank, f"{line} ({_SILENCE})", unresponsive=(self._processes[0],))

    def _stall_without_store(self) -> Failure | None:
        """Returns a failure if this process waits beyond its limit, and rank 0 is gone or stopped.

        Between two steps it may have all it needs, and ends by itself.
        """
        if self._activity.work is None or self._progress.overdue_s() < 0:
            return None
        gone = self.store_gone()
        return replace(
            gone,
            line=f"{gone.line}; no progress for {self._progress.idle_s():.0f} s "
            f"{summary(self._activity)} (the limit, stall_s, is {self._stall_s:g} s)",
            exit_code=EXIT_STALLED,
        )

    def explain_stall(self, store: ProcessStore, seconds: float) -> Failure | None:
        """Collects the stacks of all processes and finds the process that the others wait for.

        Args:
            store: the store of the processes, for the calling thread.
            seconds: for how long this process has waited.

        Returns:
            the failure; None if another process collects the stacks.
        """
        # A name that no other user of the machine can predict and occupy with a link.
        folder = Path(tempfile.gettempdir()) / f"hybridtrain-stalls-{secrets.token_hex(8)}"
        folder = self.stacks or folder
        if not store.request_stacks(str(folder)):
            return None
        # Itself: the caller may be this process's watchdog, which then reads no requests.
        self._answer(store, folder)
        ranks = range(store.size)
        # The watchdogs of the others read the request within a tick; one that is silent for this
        # long cannot run Python.
        wait_until(lambda: len(store.reports("stands", ranks)) == store.size, _WAIT_FOR_STACKS_S)
        reports = store.reports("stands", ranks)
        silent = [rank for rank in ranks if rank not in reports]
        if silent:
            culprit, process = silent[0], self._processes[silent[0]]
            state = (
                "stopped" if is_stopped(process) else "stopped, or in a call that does not return"
            )
            line = (
                f"{self.name(store, culprit)} does not respond "
                f"({state}){self._last_seen(store, culprit)}; no progress for {seconds:.0f} s"
            )
        else:
            # Of those that are equally busy, the one that has begun the fewest steps is the one
            # that the others wait for.
            culprit = min(
                ranks, key=lambda rank: (-reports[rank].blame, reports[rank].progress, rank)
            )
            name, seen = self.short_name(store, culprit), reports[culprit]
            line = f"{name} has made no progress for {seen.idle_s:.0f} s {seen.what}"
            if seen.idle_s < seconds / 2:  # a collective call has timed out
                line = f"rank {store.rank} has waited {seconds:.0f} s for {name}, {seen.what}"
        return Failure(
            store.rank,
            f"{line}; the stacks of all ranks are in {folder} (the limit, "
            f"stall_s, is {self._stall_s:g} s)",
            EXIT_STALLED,
            unresponsive=tuple(self._processes[rank] for rank in silent),
        )

    def name(self, store: ProcessStore, rank: int) -> str:
        """Returns the name of an ended process for messages: `rank 3 (stage 1, pid 7 on n2)`.

        It includes the stage if the pipeline spans several processes.
        """
        process, place = self._processes[rank], store.place(rank)
        return f"rank {rank} ({place and place + ', '}pid {process.pid} on {process.host})"

    def short_name(self, store: ProcessStore, rank: int) -> str:
        """Returns the name of a process for messages about itself: `rank 3 (stage 1, n2)`."""
        place = store.place(rank)
        return f"rank {rank}" + (f" ({place}, {self._processes[rank].host})" if place else "")

    def _last_seen(self, store: ProcessStore, rank: int) -> str:
        """Returns a process's last reported work, as the end of a sentence."""
        doing = store.reports("doing", [rank]).get(rank)
        return f", last seen {doing.what}" if doing else ""

    def _watch(self) -> None:
        try:
            self._run()
        except RuntimeError:
            # The launcher or rank 0 has ended, perhaps after all its work. If it has died, the
            # system signals the launcher's death, and collectives detect rank 0's.
            self._store_is_gone = True
        except Exception:
            _log.exception("the watchdog failed; the run continues without it")
            # Ends the guard too: it would take the missing answers for a store that is gone.
            self._ended.set()

    def _run(self) -> None:
        published = ""
        progress, record, size = self._progress, self._activity, self._store.size
        while not self._ended.wait(_TICK_S):
            progress.look()
            work = record.work
            overdue = progress.overdue_s()
            if size > 1:
                # not all the time, since that is a request per process for each of the others
                looks_at_all = work is not None and overdue > -progress.limit(work) / 2
                self._liveness.beat(overdue, looks_at_all)
            # Before this process judges itself: a failure that is known already is the first one.
            failure = self._store.failure()
            if failure is not None:
                self._follow(failure)
                return
            if (folder := self._store.requested_stacks()) is not None:
                self._answer(self._store, Path(folder))
            # Outside of a run no process is expected to live: a script may end a rank between its
            # steps.
            if work is None:
                continue
            if size > 1:
                lost = self.lost_process(self._store)
                lost = lost or self.silent_process()
                if lost is not None:
                    # Returns only if the main thread is already reporting this failure; `_ended` is
                    # then set.
                    self._end(lost)
                doing = summary(record)
                if doing != published and work.phase is not Phase.SETUP:
                    self._store.publish_report("doing", Report(doing, 0))
                    published = doing
            # between two steps another process may take long: only who waits in a step may judge
            if overdue >= 0 and work.phase is not Phase.WAIT and self._all_stand():
                # None on all but one of the processes, which read its failure in their next ticks.
                stall = self.explain_stall(self._store, progress.idle_s())
                if stall is not None:
                    self._end(stall)

    def _all_stand(self) -> bool:
        """Returns whether no other process moves either."""
        return all(
            rank == self._store.rank
            or self._liveness.stands(rank)
            or is_stopped(process)
            or self._store.has_left(rank)
            for rank, process in enumerate(self._processes)
        )

    def _answer(self, store: ProcessStore, folder: Path) -> None:
        """Publishes this process's report and writes its stacks, to `folder` by default."""
        # Once: requests stay in the store, and this is called in every tick.
        if not self._answered:
            self._answered = True
            seen = replace(report(self._activity), idle_s=self._progress.idle_s())
            store.publish_report("stands", seen)
            # the folder may be on the disk that does not answer
            with suppress(OSError, RuntimeError):
                within(PRINT_S, write_stacks, (self.stacks or folder) / f"rank_{store.rank}.txt")

    def _end(self, failure: Failure) -> None:
        """Records `failure` as the run's, prints it unless there is an earlier one, and exits."""
        first = self._store.claim(failure)  # several processes may notice the same failure
        # One failure, one report: a process that was not the first follows the recorded one.
        if first == failure:
            self._print_and_end(failure)
        self._follow(first)

    def _print_and_end(self, failure: Failure) -> None:
        self.exit_code = failure.exit_code
        self._tell_and_end(failure, failure.time)

    def _tell_and_end(self, failure: Failure, at: float, prints: bool = True) -> None:
        """Prints a failure, writes it to torchrun's error file with the time `at`, and exits."""
        self._is_ending = True
        # The last resort for a limit inside that does not hold, such as a thread that cannot start.
        with ending_within(_TO_END_S, self.exit_code):
            with suppress(OSError, RuntimeError):
                within(PRINT_S, write_error_file, failure.line, at)
            if prints:
                say(f"error: {failure.line}")
            self._end_process(failure, self._store)

    def _follow(self, failure: Failure) -> None:
        """Ends this process because another process reported a failure."""
        self.known_failure = failure
        with suppress(RuntimeError):  # the store has shut down meanwhile
            self._store.acknowledge_failure()
        if failure.exit_code == EXIT_STALLED or failure.exit_code >= 75:  # interrupted, or a signal
            self.exit_code = failure.exit_code
        if failure.exit_code != EXIT_STALLED:
            # the main thread is probably about to fail for this reason: it then reports the failure
            # itself, with a traceback where that helps, and ends this thread
            grace = _GRACE_INTERRUPTED_S if failure.exit_code >= 75 else _GRACE_S
            # Set by `end_threads`, with which the main thread takes over the report.
            if self._ended.wait(grace):
                return
        if failure.rank == self._store.rank:
            # The main thread of this process has claimed the failure, and prints it itself.
            self._end_process(failure, self._store)
        else:
            # later than the process that failed: torchrun reports the earliest error
            self._tell_and_end(failure, failure.time + 1, prints=self.prints_failures)

    def end(self, failure: Failure) -> None:
        """Ends this process; called by the main thread.

        Kills unresponsive processes of this host. Rank 0 leaves last, see `wait_for_readers`.
        """
        self._end_process(failure, self.store)

    def _end_process(self, failure: Failure, store: ProcessStore) -> None:
        def kill_unresponsive() -> None:
            # at last: connections break when they end, and the main thread would report that
            for process in failure.unresponsive:
                kill(process)

        with ending_within(_TO_END_S, self.exit_code):
            # Before the wait for a save: the others need the store, which may end with rank 0, and
            # can only end when they have read.
            self._wait_for_readers(store, failure.unresponsive)
            # A save that stands would use up its whole time and still not complete.
            stands_in_save = failure.exit_code == EXIT_STALLED and self._activity.is_in(Phase.SAVE)
            wait_for_save = 0.0 if stands_in_save else WAIT_FOR_SAVE_S
            end_process(self.exit_code, wait_for_save, at_last=kill_unresponsive)

    def await_end(self) -> None:
        """Waits for the end of this process if a thread of the watchdog reports why it ends.

        Called by the main thread, which would report the broken connections of that end.
        """
        if self._is_ending:
            # Never returns: the watchdog's thread ends the process within this time.
            time.sleep(_TO_END_S)

    def wait_for_readers(self) -> None:
        """Waits, in rank 0, until the others know why the run ends, at most `VERDICT_S`.

        The store may end with rank 0. Called by the main thread.
        """
        self._wait_for_readers(self.store)

    def _wait_for_readers(
        self, store: ProcessStore, unresponsive: Collection[ProcessId] = ()
    ) -> None:
        if store.rank != 0 or store.size == 1:
            return

        def all_know() -> bool:
            others = list(enumerate(self._processes))[1:]
            # A process that has ended, or is going to be killed, will never acknowledge.
            return store.have_acknowledged(
                [rank for rank, it in others if it not in unresponsive and not has_ended(it)]
            )

        with suppress(RuntimeError):  # the store is gone
            # `within` too, because a request of `all_know` may block for longer than the limit that
            # `wait_until` checks between requests.
            within(VERDICT_S, wait_until, all_know, VERDICT_S)
