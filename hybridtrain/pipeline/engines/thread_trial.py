"""The choice between a thread for each stage and one for all, by trials of which is faster.

Threads compute side by side in PyTorch's kernels, which run without the interpreter's lock. Stages
so small that a step is Python for the most part do not: their threads hand that lock to one another
at every operation, and one thread that takes all actions has them done in half the time.

The results are the same to the bit: each stage takes its actions in the same order, in a thread
with as many intra-op threads.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque

from hybridtrain.schedule import Schedule

_log = logging.getLogger(__name__)

# Steps that are compared, of each kind.
_COMPARED = 3
# The first steps allocate memory and find out what later ones know.
_WARM_UP = 2
# One thread is not tried where an action takes longer than this in its lane's thread, its waiting
# included: a trial would cost more than the lock does.
_LONGEST_ACTION_S = 1e-3
# What must be won to change, or noise would decide.
_GAIN = 0.9
# Steps between two trials; it doubles while they have the same outcome.
_FIRST_PAUSE, _LONGEST_PAUSE = 50, 3200


class ThreadTrial:
    """Chooses between a thread for each lane and one thread for all, by the times of steps.

    Args:
        tells: whether the first choice of one thread is logged.
    """

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._chosen = self._next = False
        self._times = {one: deque[float](maxlen=_COMPARED) for one in (False, True)}
        self._pause = _FIRST_PAUSE
        self._until_trial = _WARM_UP + _COMPARED

    def one_thread_for(self, recorded: bool) -> bool:
        """Returns whether the next step runs in one thread.

        Args:
            recorded: its timeline is shown to the user, so it is not one of a trial.
        """
        return self._chosen if recorded else self._next

    def took(self, seconds: float, schedule: Schedule) -> None:
        """Notes the time of a step that was not recorded, and chooses for the next one."""
        lanes = len(schedule.lanes)
        of_action = seconds * lanes / sum(map(len, schedule.lanes))  # as if all lanes were busy
        self._times[self._next].append(of_action)
        if self._next is not self._chosen:
            self._look_at_trial()
        elif self._chosen and of_action > lanes * _LONGEST_ACTION_S:
            self._choose(False)  # they have become long
        else:
            self._until_trial -= 1
            if self._until_trial <= 0 and self._may_try():
                self._next = not self._chosen
                self._times[self._next].clear()

    def _may_try(self) -> bool:
        return self._chosen or statistics.median(self._times[False]) < _LONGEST_ACTION_S

    def _look_at_trial(self) -> None:
        tried, present = self._times[self._next], statistics.median(self._times[self._chosen])
        if len(tried) == _COMPARED:
            wins = statistics.median(tried) < _GAIN * present
            self._choose(self._next if wins else self._chosen)
        elif min(tried) > 2 * present:  # no need to go on
            self._choose(self._chosen)

    def _choose(self, one_thread: bool) -> None:
        changes = one_thread is not self._chosen
        self._pause = _FIRST_PAUSE if changes else min(2 * self._pause, _LONGEST_PAUSE)
        self._until_trial = self._pause
        self._chosen = self._next = one_thread
        if changes and one_thread and self._tells:
            self._tells = False
            each, all_in_one = (statistics.median(self._times[one]) for one in (False, True))
            _log.info(
                "the stages are so small that one thread for all is faster than one for each: a "
                "step takes %.0f%% of the time",
                100 * all_in_one / each,
            )
