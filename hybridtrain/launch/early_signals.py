"""Signals outside of training: the command ends at once, with one line; see `launch.signals` for
those of training.

They are caught once the processes have met, so that a process can say what has ended it: a launcher
sends SIGTERM to the processes that are left when one has died. Before that they end the process
without a word, also where it is blocked.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

_NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP")
_previous: dict[signal.Signals, Any] = {}


def catch() -> None:
    """Makes a signal raise a KeyboardInterrupt with its name, if it would have ended the process.

    Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for name in _NAMES:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            _previous[number] = signal.signal(number, _interrupt)


def ignore() -> None:
    """Ignores the signals of `catch` from now on: an error is being reported, and then all ends.

    A launcher sends SIGTERM to the processes that are left, also to one that is about to say why.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _previous:
            signal.signal(number, signal.SIG_IGN)


def restore() -> None:
    """Undoes `catch`."""
    if threading.current_thread() is threading.main_thread():
        while _previous:
            number, handler = _previous.popitem()
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
