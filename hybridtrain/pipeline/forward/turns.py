"""The turns of one device: its actions pass one at a time, in the order of its lane.

    lane          F0@0     F1@0     B0@0     F2@0 ...
    trip 0        [1] F0@0 [3]
    trip 1        [2]......F1@0 [3]
    a worker                        [4] B0@0 [3]

An action begins at once if it is its turn [1]. Otherwise a forward that has begun waits in its
thread [2], because Python cannot leave a function and take it up elsewhere. Other actions are put
down, and whoever passes the turn on [3] runs them next, or hands them to a free thread [4].
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, TypeVar

from hybridtrain.schedule import Action

T = TypeVar("T")


class Stopped(BaseException):
    """Ends an action that waits, because another one has failed.

    A BaseException, because an `except Exception` in a model's forward must not catch it.
    """


class Turns(Generic[T]):
    """The turns of a device in one step.

    Args:
        actions: the actions of the device, in order.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions
        self._next = 0
        self._stopped = False
        self._mutex = threading.Lock()
        self._waiting: dict[Action, threading.Lock] = {}
        self._put_down: dict[Action, T] = {}

    def wait(self, action: Action) -> None:
        """Waits until the actions before `action` have passed.

        Raises:
            Stopped: the step has failed.
        """
        with self._mutex:
            if self._is_turn(action):
                return
            turn = self._waiting[action] = threading.Lock()  # so that only its thread wakes
            turn.acquire()
        # Outside of the mutex, which `leave` needs to pass the turn on.
        turn.acquire()
        # Without the mutex: `stop` sets it before it releases the lock.
        if self._stopped:
            raise Stopped

    def has_come(self, action: Action, task: T) -> bool:
        """Returns whether it is the turn of `action`; if not, puts down `task` until it is.

        Raises:
            Stopped: the step has failed.
        """
        with self._mutex:
            if self._is_turn(action):
                return True
            self._put_down[action] = task
            return False

    def _is_turn(self, action: Action) -> bool:
        if self._stopped:
            raise Stopped
        # Each action occurs once in a step, so no other one can be taken for it.
        return self._actions[self._next] == action

    def leave(self) -> T | None:
        """Passes the turn on to the next action; returns its task if that was put down.

        Raises:
            Stopped: the step has failed.
        """
        with self._mutex:
            if self._stopped:
                raise Stopped
            self._next += 1
            if self._next == len(self._actions):
                return None
            action = self._actions[self._next]
            turn = self._waiting.pop(action, None)
            task = self._put_down.pop(action, None)
        if turn is not None:
            # Outside of the mutex: the thread that wakes may soon need it.
            turn.release()
        return task

    def stop(self) -> None:
        """Ends all waits, present and future."""
        with self._mutex:
            self._stopped = True
            # Taken out under the mutex, so that no `leave` releases one of them for a second time.
            turns = list(self._waiting.values())
            self._waiting.clear()
            self._put_down.clear()
        for turn in turns:
            turn.release()
