"""The record of what this process is doing, for the watchdog.

Written by the training loop and by the threads of the stages with plain attribute writes, without a
lock; read by the watchdog's thread. A reader may see work that has just ended, but never a partial
record.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from hybridtrain.launch.limits import PRINT_S, is_stuck, try_to_write

if TYPE_CHECKING:
    from hybridtrain.schedule import Action


WAIT_FOR_SAVE_S = 20.0
"""Seconds that an exiting process waits for a checkpoint being written.

torchrun kills its workers after 30 s.
"""


class Phase(StrEnum):
    """A phase of a run; the watchdog has a time limit for each.

    WAIT is a collective call outside of the other phases, for which another process may take long.
    """

    SETUP = "setup"
    WAIT = "wait for the other processes"
    DATA = "data"
    TRAIN = "train"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"


_IN_STEPS = frozenset((Phase.DATA, Phase.TRAIN, Phase.OPTIMIZER))


class Work(NamedTuple):
    """Work of the training loop: a phase, and its step, if any."""

    phase: Phase
    step: int | None = None

    def __str__(self) -> str:
        return self.phase.value if self.step is None else f"step {self.step}: {self.phase.value}"


class LaneActivity:
    """The activity of a lane: one device's list of actions in a schedule.

    Attributes:
        action: the action (kind, stage, micro-batch) that is running; None between steps.
        thread: the identifier of the thread that runs it, or has run the last one.
        waiting: True while the action waits for a message from another stage.
    """

    __slots__ = ("action", "thread", "waiting")

    def __init__(self) -> None:
        self.action: Action | None = None
        self.thread = 0
        self.waiting = False

    def begin(self, action: Action) -> None:
        """Records that the lane executes `action`, in this thread."""
        # Two writes: the watchdog may see one without the other, but judges only a process that has
        # not moved for long.
        self.action, self.thread = action, threading.get_ident()

    def wait(self, waiting: bool) -> None:
        """Records that the lane begins or ends waiting for another lane."""
        self.waiting = waiting

    def end(self) -> None:
        """Records that the lane has finished its step."""
        self.action, self.waiting = None, False


class Activity:
    """The work and the lanes of a process.

    Attributes:
        work: the current work of the training loop; None outside a run, where no progress is
            expected.
        steps: the number of pipeline steps that have begun, to distinguish equal actions of two
            steps.
        lanes: one record per lane of the running step.
        entered: the value of `steps` when each phase first began, since the last setup.
        evaluations: the number of evaluations begun since the last setup.
        compared: the number of micro-batches that comparisons have run in plain PyTorch, without
            lanes.
    """

    def __init__(self) -> None:
        self.work: Work | None = None
        self.steps = 0
        self.lanes: list[LaneActivity] = []
        self.entered: dict[Phase, int] = {}
        self.evaluations = 0
        self.compared = 0
        self._saves = 0
        self._saves_change = threading.Lock()

    def now(self, phase: Phase, step: int | None = None) -> None:
        """Records that work of `phase` begins, for a step."""
        work = Work(phase, step)
        # `set` would find the phase entered and change nothing else.
        if phase in _IN_STEPS and phase in self.entered:  # in every step
            self.work = work
        else:
            self.set(work)

    def set(self, work: Work | None) -> None:
        """Records `work` as the current work of this process."""
        if work is None or work.phase is Phase.SETUP:
            self.entered = {}  # a new run begins
            self.evaluations = 0
        else:
            self.entered.setdefault(work.phase, self.steps)
            if work.phase is Phase.EVALUATE and not self.is_in(Phase.EVALUATE):
                self.evaluations += 1
        self.work = work

    def is_in(self, phase: Phase) -> bool:
        """Returns whether the current work is in this phase."""
        work = self.work
        return work is not None and work.phase is phase

    def during(self, phase: Phase, step: int | None = None) -> AbstractContextManager[None]:
        """Records work of `phase` during the block, then restores the previous work."""
        return _During(self, Work(phase, step))

    def forget(self, phase: Phase) -> None:
        """Resets a phase to not begun, after a trial run of it."""
        self.entered.pop(phase, None)
        self.evaluations = 0

    def step(self, trains: bool) -> AbstractContextManager[None] | None:
        """Returns a context that sets a phase while a pipeline runs; None if one is set.

        A `Trainer` or an evaluation sets one. The watchdog expects progress within a step of any
        script, but not between steps.
        """
        work = self.work
        if work is not None and work.phase is not Phase.SETUP:
            return None
        return self.during(Phase.TRAIN if trains else Phase.EVALUATE, self.steps + 1)

    def waiting(self) -> AbstractContextManager[None]:
        """Sets a phase while this process waits for others between two steps of a script.

        The watchdog then notices that one of them has ended or is stopped.
        """
        return _NOTED if self.work is not None else self.during(Phase.WAIT)

    def catching_up(self) -> None:
        """Records a setup during a run, while a data set reads up to its saved position."""
        if self.work is not None:
            self.now(Phase.SETUP)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Records that a checkpoint is being written while the block runs, in any thread."""
        with self._saves_change:
            self._saves += 1
        try:
            yield
        finally:
            with self._saves_change:
                self._saves -= 1

    def wait_for_save(self, seconds: float) -> None:
        """Waits until no checkpoint is being written, at most `seconds`."""
        # A save that begins after this is lost, and harmless: its directory is only published when
        # it is complete.
        wait_until(lambda: not self._saves, seconds)

    def begin_step(self, lanes: int) -> list[LaneActivity]:
        """Returns the records of the step's lanes, which the stages' threads write."""
        self.steps += 1
        if len(self.lanes) != lanes:
            # Replaced as a whole: the watchdog iterates over the list that it has read.
            self.lanes = [LaneActivity() for _ in range(lanes)]
        return self.lanes


# Shared by all steps of a run that records its own phases.
_NOTED = nullcontext()


class _During(AbstractContextManager[None]):
    """The context manager of `Activity.during`; a class for speed, because every step enters it."""

    __slots__ = ("_activity", "_before", "_work")

    def __init__(self, activity: Activity, work: Work) -> None:
        self._activity, self._work = activity, work

    def __enter__(self) -> None:
        self._before = self._activity.work
        self._activity.set(self._work)

    def __exit__(self, *error: object) -> None:
        # not through `set`: the next step belongs to the same run
        self._activity.work = self._before


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Waits until `holds()` is True, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


activity = Activity()
"""The record of this process."""


def end_process(
    code: int,
    wait_for_save: float = WAIT_FOR_SAVE_S,
    at_last: Callable[[], object] = lambda: None,
) -> None:
    """Ends this process without waiting for its threads and connections.

    Kills its daemonic child processes, such as the workers of a `DataLoader`. The interpreter would
    end them at exit, and a worker that hangs or is stopped does not notice the end of its parent.

    Args:
        code: the exit code.
        wait_for_save: seconds to wait for a checkpoint that is being written.
        at_last: called right before the end.
    """
    with ending_within(wait_for_save + 3 * PRINT_S, code):
        activity.wait_for_save(wait_for_save)
        # By SIGKILL, because a worker that is stopped does not receive SIGTERM.
        for child in multiprocessing.active_children():
            # `is_alive` asserts that this process, not one that it was forked from, is the parent
            with suppress(AssertionError, OSError, ValueError):
                if child.daemon and child.is_alive():
                    child.kill()
        # A flush would wait for the pipe that the last write is still waiting for.
        if not is_stuck():
            try_to_write(_flush)
        at_last()
        # Not `sys.exit`: it would only end this thread, and the interpreter's end waits for threads
        # in C++ calls, such as a collective.
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # see `try_to_write`
            stream.flush()


@contextmanager
def ending_within(seconds: float, code: int) -> Iterator[None]:
    """Ends this process with `code` if the block takes longer than `seconds`.

    The block should have limits of its own; this is for what it cannot foresee.
    """
    # A thread and not SIGALRM: Python calls handlers in the main thread only, which may be blocked.
    last = threading.Timer(seconds, os._exit, [code])
    last.daemon = True
    with suppress(RuntimeError):  # the interpreter is ending, and starts no threads
        last.start()
    try:
        yield
    finally:
        last.cancel()
