"""The turns of one device: its actions pass one at a time, in the order of its lane.

    lane          F0@0     F1@0     B0@0     F2@0 ...
    trip 0        [2]      -> F0@1
    trip 1        [1]...   [2]      -> F1@1
    device        [1]................[2]      [3]

[1] Whoever runs an action waits for its turn, [2] runs it, and [3] passes the turn on. Each action
has a lock of its own, so that only the thread with the next action wakes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hybridtrain.schedule import Action


class Stopped(BaseException):
    """Ends an action that waits, because another one has failed.

    A BaseException, because an `except Exception` in a model's forward must not catch it.
    """


class Turns:
    """The turns of a device in one step.

    Args:
        actions: the actions of the device, in order.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._next = 0
        self._stopped = False
        self._locks = {action: threading.Lock() for action in actions}
        for action in actions[1:]:
            self._locks[action].acquire()

    def wait(self, action: Action) -> None:
        """Waits until the actions before `action` have passed.

        Raises:
            Stopped: the step has failed.
        """
        if not self._stopped:
            self._locks[action].acquire()
        if self._stopped:
            raise Stopped

    def leave(self) -> None:
        """Passes the turn on to the next action."""
        self._next += 1
        if self._next < len(self._actions):
            try:
                self._locks[self._actions[self._next]].release()
            except RuntimeError as error:  # `stop` has released it
                raise Stopped from error

    def stop(self) -> None:
        """Ends all waits, present and future."""
        self._stopped = True  # before a thread wakes, which then sees it
        for lock in self._locks.values():
            if lock.locked():
                try:
                    lock.release()
                except RuntimeError:  # released meanwhile by `leave`
                    continue
