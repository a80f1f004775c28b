"""Signals outside of training: the command ends at once, with one line.

Imports no torch, so that a command can begin with it; see `launch.signals` for those of training.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP")


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Makes a signal raise a KeyboardInterrupt with its name while the block runs.

    So the process that gets it can say what has ended it: a launcher sends SIGTERM to the processes
    that are left when one has died. A signal that is ignored or handled already stays so.
    """
    previous: dict[signal.Signals, Any] = {}

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        for name in _NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
