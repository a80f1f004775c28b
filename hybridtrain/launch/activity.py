"""The record of what this process is doing, for the watchdog.

Written by the training loop and by the threads of the stages with plain attribute writes, without a
lock; read by the watchdog's thread. A reader may see work that has just ended, never half of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hybridtrain.schedule import Action


WAIT_FOR_SAVE_S = 20.0
"""Seconds that a process waits before it ends while a checkpoint is being written.

torchrun kills its workers after 30 s."""


class Phase(StrEnum):
    """A kind of work that a run does; the watchdog has a limit for each."""

    SETUP = "setup"
    DATA = "data"
    TRAIN = "train"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    SAVE = "save"


class Work(NamedTuple):
    """Work of the training loop: a phase, and the step that it is of, if any."""

    phase: Phase
    step: int | None = None

    def __str__(self) -> str:
        return self.phase.value if self.step is None else f"step {self.step}: {self.phase.value}"


class LaneActivity:
    """The activity of a lane, which is a device's list of actions in a schedule.

    Attributes:
        action: the action (kind, stage, micro-batch) that is running; None between steps.
        waiting: True while the action waits for a message from another stage.
    """

    __slots__ = ("action", "waiting")

    def __init__(self) -> None:
        self.action: Action | None = None
        self.waiting = False

    def begin(self, action: Action) -> None:
        """Records that the lane executes `action`."""
        self.action = action

    def wait(self, waiting: bool) -> None:
        """Records that the lane begins or ends waiting for another lane."""
        self.waiting = waiting

    def end(self) -> None:
        """Records that the lane has finished its step."""
        self.action, self.waiting = None, False


class Activity:
    """The work and the lanes of a process.

    Attributes:
        work: what the training loop does; None outside of a run: nobody then expects progress.
        steps: how many steps of a pipeline have begun, so that equal actions of two steps differ.
        lanes: one record per lane of the step that runs.
        entered: by phase, the `steps` when it began first; since the last setup.
        evaluations: how many have begun, since the last setup.
    """

    def __init__(self) -> None:
        self.work: Work | None = None
        self.steps = 0
        self.lanes: list[LaneActivity] = []
        self.entered: dict[Phase, int] = {}
        self.evaluations = 0
        self._saves = 0
        self._saves_change = threading.Lock()

    def now(self, phase: Phase, step: int | None = None) -> None:
        """Notes that the work of `phase`, of a step, begins."""
        self.set(Work(phase, step))

    def set(self, work: Work | None) -> None:
        """Notes that this process does `work` from now on."""
        if work is None or work.phase is Phase.SETUP:
            self.entered = {}  # what follows is another run's
            self.evaluations = 0
        else:
            self.entered.setdefault(work.phase, self.steps)
            if work.phase is Phase.EVALUATE and not self.is_in(Phase.EVALUATE):
                self.evaluations += 1
        self.work = work

    def is_in(self, phase: Phase) -> bool:
        """Returns whether the work is of this phase."""
        work = self.work
        return work is not None and work.phase is phase

    def during(self, phase: Phase, step: int) -> AbstractContextManager[None]:
        """Notes that the block does the work of `phase`; afterwards it is what it was before."""
        return _During(self, Work(phase, step))

    def forget(self, phase: Phase) -> None:
        """Takes a phase for one that has not begun: what was done was a trial of it."""
        self.entered.pop(phase, None)
        self.evaluations = 0

    def step(self, trains: bool) -> AbstractContextManager[None]:
        """Sets a phase while a pipeline runs, if no `Trainer` or evaluation has set one.

        The watchdog then expects progress within a step of any script, but not between steps.
        """
        if self.work is not None and not self.is_in(Phase.SETUP):
            return _NOTED
        return self.during(Phase.TRAIN if trains else Phase.EVALUATE, self.steps + 1)

    def catching_up(self) -> None:
        """Notes a setup during a run, while a data set reads up to where it was."""
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
        wait_until(lambda: not self._saves, seconds)

    def begin_step(self, lanes: int) -> list[LaneActivity]:
        """Returns the records of the step's lanes, which the stages' threads write."""
        self.steps += 1
        if len(self.lanes) != lanes:
            self.lanes = [LaneActivity() for _ in range(lanes)]
        return self.lanes


# One for all steps that a run has noted already.
_NOTED = nullcontext()


class _During(AbstractContextManager[None]):
    """See `Activity.during`; a class, since each step enters one."""

    __slots__ = ("_activity", "_before", "_work")

    def __init__(self, activity: Activity, work: Work) -> None:
        self._activity, self._work = activity, work

    def __enter__(self) -> None:
        self._before = self._activity.work
        self._activity.set(self._work)

    def __exit__(self, *error: object) -> None:
        self._activity.work = self._before  # not by `set`: the next step is one of the same run


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Waits until `holds()` is true, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


activity = Activity()
"""The record of this process."""


def end_process(code: int, wait_for_save: float = WAIT_FOR_SAVE_S) -> None:
    """Ends this process without waiting for its threads and connections.

    Args:
        code: the exit code.
        wait_for_save: seconds to wait for a checkpoint that is being written.
    """
    activity.wait_for_save(wait_for_save)
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)
