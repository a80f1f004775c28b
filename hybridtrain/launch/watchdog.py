"""A thread per process that ends the run when it fails or stands still.

A process whose main thread is blocked in a collective notices nothing: not that another process
has failed, not that nothing moves any more. This thread does. It has a separate connection to the
processes' store, and ends the process by `os._exit`, since a blocked thread cannot be stopped. A
second thread notices that the store itself does not answer.

A host that loses its power or its network closes no connection: those who wait for it in a
collective wait until the limit of the collective, which is long where rank 0 may download or write.
So every process counts in the store while it lives. Rank 0 reads everyone's count and the others
rank 0's. A process that can read none, because its own host is cut off, learns it from the clock:

    rank 0    alive/1 the same for too long           ->  ends the run, and names rank 1
    rank 2    told by rank 0 through the store
    rank 1    no answer from the store for too long   ->  ends by itself

Where nothing moves, each process says by its own stacks what it is doing and whether it seems to
wait for others (`report`), and the one that waits for nobody is named.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import secrets
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    wait_until,
)
from hybridtrain.launch.failure import write_error_file
from hybridtrain.launch.job import EXIT_STALLED, Failure, Job, Report, has_ended, is_stopped, kill
from hybridtrain.schedule import WORDS

_TORCH = Path(str(getattr(find_spec("torch"), "origin", ""))).parent  # without an import
_LIBRARY = Path(__file__).parents[1]
_STDLIB = Path(threading.__file__).parent

# In these the innermost frame waits for another process, or for another thread that is looked at
# by itself.
_WAITS = (
    *(str(_LIBRARY / name) for name in ("world.py", "launch", "pipeline/engines")),
    str(_TORCH / "distributed"),
)
# Here it may: a backward ends with the all-reduce of a stage, without any frame that says so.
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
    # A new file: a link that is there is not followed, and one that comes in between is an error.
    path.unlink(missing_ok=True)
    with path.open("x") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def report(activity: Activity) -> Report:
    """Says what this process is doing, and whether it seems to wait for other processes."""
    frames = sys._current_frames()
    main = threading.main_thread()
    best: tuple[int, str, FrameType | None] = (0, "", None)
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is None or not (thread is main or thread.name.startswith("stage-")):
            continue
        blame, lane = _blame(frame), _lane_of(thread, frame)
        action = ""
        if lane is not None and lane < len(activity.lanes):
            record = activity.lanes[lane]
            if record.waiting:
                blame = 0
            if record.action is not None:
                action = describe(record.action)
        elif thread is not main:
            blame = 0  # a lane that has ended
        if best[2] is None or (blame, bool(action)) > (best[0], bool(best[1])):
            best = blame, action, frame
    blame, action, innermost = best
    work = str(activity.work or "no phase of training")
    what = f"in the {action} ({work})" if action else f"in {work!r}"
    where = _user_frame(innermost)
    if where:
        what += f", {where}"
    # micro-batches done count within a step: between equal steps, the one behind is the cause
    return Report(what, blame, activity.steps)


def stands_in_debugger() -> bool:
    """Returns whether a thread of this process is in a debugger, where nothing has to move."""
    return any(
        frame.f_code.co_filename.endswith("bdb.py") or "pydevd" in frame.f_code.co_filename
        for innermost in sys._current_frames().values()
        for frame in _frames(innermost)
    )


def summary(activity: Activity) -> str:
    """Says in a few words what the training loop and the busy lanes are doing."""
    work = str(activity.work or "no phase of training")
    busy = [lane.action for lane in activity.lanes if lane.action and not lane.waiting]
    doing = " and the ".join(describe(action) for action in busy)
    return f"in the {doing} ({work})" if doing else f"in {work!r}"


def describe(action: tuple[str, int, int]) -> str:
    """Returns a schedule's action in words."""
    kind, stage, microbatch = action
    return f"{WORDS[kind]} of micro-batch {microbatch} on stage {stage}"


def _blame(frame: FrameType) -> int:
    """Returns 0 if the innermost frame waits for others, 1 if it may, 2 if it is busy."""
    innermost: FrameType | None = frame
    # queues, conditions and context managers wait for whoever calls them
    while innermost is not None and innermost.f_code.co_filename.startswith(
        (str(_STDLIB / "threading.py"), str(_STDLIB / "queue.py"), str(_STDLIB / "contextlib.py"))
    ):
        innermost = innermost.f_back
    path = "" if innermost is None else innermost.f_code.co_filename
    if path.startswith(_WAITS):
        return 0
    return 1 if path.startswith(_MAY_WAIT) else 2


def _lane_of(thread: threading.Thread, frame: FrameType) -> int | None:
    """Returns the record of a thread that executes actions; a single one may be the caller's."""
    running = any(each.f_code.co_name == "run_actions" for each in _frames(frame))
    if not running:
        return None
    return int(thread.name[6:]) if thread.name.startswith("stage-") else 0


def _user_frame(frame: FrameType | None) -> str:
    """Returns where the innermost frame of the user's code is, or nothing."""
    for each in _frames(frame):
        path = each.f_code.co_filename
        if not path.startswith((str(_LIBRARY), str(_TORCH), str(_STDLIB), "<")):
            summary = traceback.extract_stack(each, limit=1)[0]
            return f'File "{summary.filename}", line {summary.lineno}, in {summary.name}'
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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


_TICK_S = 0.25
# How long a process may take to end by itself after a failure, and after an interruption.
_GRACE_S = 2.0
_GRACE_INTERRUPTED_S = 15.0
_WAIT_FOR_STACKS_S = 2.0
# The first steps and the first evaluation may compile, trace and fill caches.
_FIRST_TIMES = 4.0
_FIRST_STEPS = 2
# Work that may take long without a sign of life, and how many times the limit it gets.
_LONG = {Phase.SAVE: 10.0, Phase.SETUP: float("inf")}

_log = logging.getLogger(__name__)

_current: Watchdog | None = None


def current() -> Watchdog | None:
    """Returns the watchdog of this process, while there is one."""
    return _current


class Watchdog:
    """Watches this process and, through the store, the others.

    Args:
        job: what the processes share.
        stall_s: seconds without progress after which the run ends; 0: never. Only work of
            `activity` is watched: outside of a run nobody expects progress.
        timeout_s: seconds that a collective may take.
        record: what this process is doing.

    Attributes:
        job: what the processes share, for the main thread.
        stacks: the folder that the stacks of a run that stands still are written to; None: a new
            one in the temporary directory.
        exit_code: of this process, when another one's failure ends it.
        heard: the failure that ends the run, once this process knows it.
        tells: whether a process that another one's failure ends prints it.
    """

    def __init__(
        self, job: Job, stall_s: float, timeout_s: float, record: Activity = activity
    ) -> None:
        self.job = job
        self.timeout_s = timeout_s
        self.stacks: Path | None = None
        self.exit_code = 1
        self.heard: Failure | None = None
        self.tells = True
        self._processes = job.enter()
        self._job = job.clone()
        self._liveness = Liveness(self._job, timeout_s)
        self._stall_s = stall_s
        self._activity = record
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answered = False

    def start(self) -> None:
        """Starts the thread, unless it runs, in place of one that runs for this process."""
        global _current
        if _current is not None and _current is not self:
            _current.end_threads()
            atexit.unregister(_current.end_threads)
        _current = self
        if not self._threads:
            alone = self._job.size == 1
            targets = [self._watch] if alone else [self._watch, self._watch_store]
            self._threads = [
                threading.Thread(target=target, name="watchdog", daemon=True) for target in targets
            ]
            for thread in self._threads:
                thread.start()
            # A thread that the interpreter finds in a call of the store aborts the process.
            atexit.register(self.end_threads)

    def close(self) -> None:
        """Ends the thread, and tells the other processes that this one ends as it should."""
        global _current
        if _current is self:
            _current = None
        with suppress(RuntimeError):
            self.job.leave()
        self.end_threads()
        atexit.unregister(self.end_threads)
        self._activity.set(None)

    def end_threads(self) -> None:
        """Ends the threads: from now on nobody watches this process."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=_GRACE_S)

    def lost_process(self, job: Job) -> Failure | None:
        """Returns the failure that a process of this host is, if one ended without a word."""
        for rank, process in enumerate(self._processes):
            if rank == job.rank or not has_ended(process) or job.has_left(rank):
                continue
            last = self._last_seen(job, rank)
            return Failure(
                job.rank,
                f"{self.name(job, rank)} has ended without a message{last}: it was killed (by the "
                f"system if memory ran out), has crashed or has "
                f"called exit; the launcher's report has its signal or exit code",
                time=time.time() + 2,  # after what the launcher says of that process
            )
        return None

    def silent_process(self) -> Failure | None:
        """Returns the failure that a process is which gives no sign of life, if there is one."""
        found = self._liveness.silent()
        if found is None:
            return None
        rank, seconds = found
        return Failure(
            self._job.rank,
            f"{self.name(self._job, rank)} has given no sign of life for "
            f"{seconds:.0f} s{self._last_seen(self._job, rank)}: its host, or the network to it, "
            f"is gone, or the process is stopped (the limit is timeout_s, and at least 20 s)",
        )

    def process_gone(self, seconds: float) -> Failure | None:
        """Returns the failure that a process of another host is which has ended meanwhile.

        Looks for as many seconds for signs of life; for the main thread, when a connection broke.
        """
        job = self.job
        before = [job.beats(rank) for rank in range(job.size)]
        time.sleep(max(seconds, 2.5 * BEAT_S))
        for rank in range(job.size):
            if rank != job.rank and job.beats(rank) == before[rank] and not job.has_left(rank):
                return Failure(
                    job.rank,
                    f"{self.name(job, rank)} is gone: its connection "
                    f"broke, and it gives no sign of life{self._last_seen(job, rank)}; see what "
                    f"its own output says, and the launcher's report",
                )
        return None

    def main_gone(self) -> str:
        """Returns the failure that rank 0's end is, in one line, when its store is not there."""
        process = self._processes[0]
        return (
            f"the processes' store is gone, and with it rank 0 (pid {process.pid} on "
            f"{process.host}) or its launcher: see what its output says"
        )

    def _watch_store(self) -> None:
        """Ends this process when the store does not answer any more, and nobody can be asked."""
        before = since = time.monotonic()
        while not self._ended.wait(1.0):
            now = time.monotonic()
            if now - before > 20 * _TICK_S:  # it was stopped itself meanwhile
                since = now
            before = now
            seconds = min(self._liveness.unanswered_s(), now - since)
            if seconds <= self._liveness.timeout_s or self._activity.work is None:
                continue
            host = self._processes[0].host
            failure = Failure(
                self._job.rank,
                f"rank {self._job.rank} on {self._processes[self._job.rank].host} has been cut off "
                f"from rank 0 on {host} for {seconds:.0f} s: that host or the network is gone (the "
                f"limit is timeout_s, and at least 20 s)",
            )
            self._print_and_end(failure)

    def explain_stall(self, job: Job, seconds: float) -> Failure | None:
        """Collects the stacks of all processes and finds the one that the others wait for.

        Returns None if another process does it.
        """
        # A name that no other user of the machine can foresee, with a link in it.
        folder = Path(tempfile.gettempdir()) / f"hybridtrain-stalls-{secrets.token_hex(8)}"
        folder = self.stacks or folder
        if not job.ask_for_stacks(str(folder)):
            return None
        self._answer(job, folder)
        ranks = range(job.size)
        wait_until(lambda: len(job.said("stands", ranks)) == job.size, _WAIT_FOR_STACKS_S)
        said = job.said("stands", ranks)
        silent = [rank for rank in ranks if rank not in said]
        if silent:
            culprit, process = silent[0], self._processes[silent[0]]
            state = "stopped" if is_stopped(process) else "stopped, or in a call that never returns"
            line = (
                f"{self.name(job, culprit)} does not answer ({state})"
                f"{self._last_seen(job, culprit)}; nothing has moved for {seconds:.0f} s"
            )
        else:
            culprit = min(ranks, key=lambda rank: (-said[rank].blame, said[rank].progress, rank))
            name = self.short_name(job, culprit)
            line = f"{name} has stood still for {seconds:.0f} s {said[culprit].what}"
        return Failure(
            job.rank,
            f"{line}; the stacks of all ranks are in {folder} (the limit, "
            f"stall_s, is {self._stall_s:g} s)",
            EXIT_STALLED,
            unresponsive=tuple(self._processes[rank] for rank in silent),
        )

    def name(self, job: Job, rank: int) -> str:
        """Returns a process as messages name it when it has ended: `rank 3 (stage 1, pid 7 on n2)`.

        The stage is there if its pipeline is over several processes.
        """
        process, place = self._processes[rank], job.place(rank)
        return f"rank {rank} ({place and place + ', '}pid {process.pid} on {process.host})"

    def short_name(self, job: Job, rank: int) -> str:
        """Returns a process as messages name it that it prints itself: `rank 3 (stage 1, n2)`."""
        place = job.place(rank)
        return f"rank {rank}" + (f" ({place}, {self._processes[rank].host})" if place else "")

    def _last_seen(self, job: Job, rank: int) -> str:
        """Returns where a process was that cannot say it, by the last tick of its watchdog."""
        doing = job.said("doing", [rank]).get(rank)
        return f", last heard of {doing.what}" if doing else ""

    def _watch(self) -> None:
        # Without the store there is nobody to tell: the launcher or rank 0 has died. The system
        # tells this process of its parent's death, and the collectives notice rank 0's.
        try:
            with suppress(RuntimeError):
                self._run()
        except Exception:
            _log.exception("the watchdog has ended, and the run goes on unwatched")
            self._ended.set()

    def _run(self) -> None:
        state: object = None
        published = ""
        since = before = time.monotonic()
        while not self._ended.wait(_TICK_S):
            now = time.monotonic()
            work = self._activity.work
            if self._job.size > 1:
                self._liveness.beat()
            record = self._activity
            lanes = tuple((lane.action, lane.waiting) for lane in record.lanes)
            current = record.work, record.steps, lanes
            if current != state or now - before > 20 * _TICK_S:  # it was stopped itself meanwhile
                state, since = current, now
            before = now
            failure = self._job.failure()
            if failure is not None:
                self._follow(failure)
                return
            if (folder := self._job.stacks_asked_for()) is not None:
                self._answer(self._job, Path(folder))
            if work is None:
                continue
            if self._job.size > 1:
                lost = self.lost_process(self._job)
                lost = lost or self.silent_process()
                if lost is not None:
                    self._end(lost)
                doing = summary(self._activity)
                if doing != published and work.phase is not Phase.SETUP:
                    self._job.say("doing", Report(doing, 0))
                    published = doing
            if now - since >= self._limit(work):
                if stands_in_debugger():
                    since = now
                    continue
                stall = self.explain_stall(self._job, now - since)
                if stall is not None:
                    self._end(stall)

    def _limit(self, work: Work) -> float:
        """Returns the seconds without progress that `work` may take."""
        if self._stall_s <= 0:
            return float("inf")
        phase, steps = work.phase, self._activity.steps
        first = steps - self._activity.entered.get(phase, steps) <= _FIRST_STEPS
        # processes meet at the end of an evaluation only, and may wait there for one's first batch
        first |= phase is Phase.EVALUATE and self._activity.evaluations <= 1
        return self._stall_s * max(_LONG.get(phase, 1.0), _FIRST_TIMES if first else 1.0)

    def _answer(self, job: Job, folder: Path) -> None:
        """Says what this process is doing, and writes its stacks, to `folder` if it has no own."""
        if not self._answered:
            self._answered = True
            job.say("stands", report(self._activity))
            with suppress(OSError):
                write_stacks((self.stacks or folder) / f"rank_{job.rank}.txt")

    def _end(self, failure: Failure) -> None:
        """Makes `failure` the run's, prints it unless there is an earlier one, and ends."""
        first = self._job.claim(failure)
        if first == failure:
            self._print_and_end(failure)
        self._follow(first)

    def _print_and_end(self, failure: Failure) -> None:
        self.exit_code = failure.exit_code
        self._tell_and_end(failure, failure.time)

    def _tell_and_end(self, failure: Failure, at: float, prints: bool = True) -> None:
        """Prints a failure, leaves it for torchrun as one of the time `at`, and ends."""
        try:
            with suppress(OSError, ValueError):  # the terminal is gone, or the disk is full
                if prints:
                    print(f"error: {failure.line}", file=sys.stderr, flush=True)
            write_error_file(failure.line, at)
        finally:
            self.end(failure)

    def _follow(self, failure: Failure) -> None:
        """Ends this process because of a failure that another one has reported."""
        self.heard = failure
        with suppress(RuntimeError):  # the store has ended meanwhile
            self._job.say_heard()
        if failure.exit_code == EXIT_STALLED or failure.exit_code >= 75:  # interrupted, or a signal
            self.exit_code = failure.exit_code
        if failure.exit_code != EXIT_STALLED:
            grace = _GRACE_INTERRUPTED_S if failure.exit_code >= 75 else _GRACE_S
            if self._ended.wait(grace):
                return
        if failure.rank == self._job.rank:
            self.end(failure)
        else:
            self._tell_and_end(failure, failure.time + 1, prints=self.tells)

    def end(self, failure: Failure) -> None:
        """Ends this process, and those of this host that do not answer."""
        for process in failure.unresponsive:
            kill(process)
        stands_in_save = failure.exit_code == EXIT_STALLED and self._activity.is_in(Phase.SAVE)
        end_process(self.exit_code, 0.0 if stands_in_save else WAIT_FOR_SAVE_S)
