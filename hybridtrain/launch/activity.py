"""The record of what this process is doing, for the watchdog.

Written by the training loop and by the threads of the stages with plain attribute writes, without a
lock; read by the watchdog's thread. A reader may see a phase that has just ended, never half a one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridtrain.schedule import Action


class Lane:
    """One lane of the schedule: its action, and whether it waits for another lane.

    Attributes:
        action: the action (kind, stage, micro-batch) that is being executed; None between steps.
        waiting: True while it waits for what another stage sends.
    """

    __slots__ = ("action", "waiting")

    def __init__(self) -> None:
        self.action: Action | None = None
        self.waiting = False


class Activity:
    """The phase and the lanes of a process.

    Attributes:
        phase: what the training loop does, such as "step 12: data" or "evaluate"; None outside of
            a run: nobody then expects progress.
        steps: how many steps of a pipeline have begun, so that equal actions of two steps differ.
        lanes: one record per lane of the step that runs.
    """

    def __init__(self) -> None:
        self.phase: str | None = None
        self.steps = 0
        self.lanes: list[Lane] = []

    def now(self, phase: str | None) -> None:
        """Sets the phase; the part after ": " says which kind of work it is."""
        self.phase = phase

    def begin_step(self, lanes: int) -> list[Lane]:
        """Returns the records of a pipeline step's lanes, which its threads write to."""
        self.steps += 1
        if len(self.lanes) != lanes:
            self.lanes = [Lane() for _ in range(lanes)]
        return self.lanes


activity = Activity()
"""The record of this process."""
