"""Time limits for what a process waits for while it joins the others or ends.

A pipe that nobody reads, a stopped process that serves the store, or a disk that does not answer
blocks the thread that needs it for as long as it lasts. So a process that joins or ends leaves such
calls to another thread, and continues without it after the limit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PRINT_S = 2.0
"""Seconds that a process waits for its terminal, a pipe or a small file while it ends."""

VERDICT_S = 5.0
"""Seconds that rank 0 waits, before it ends, for the others to read why the run ends."""

STORE_S = 20.0
"""Seconds that a process that ends waits for the store to answer."""


class TimedOut(RuntimeError):
    """A call has not returned within its limit; its thread still waits.

    A RuntimeError like those of a store that is gone, because it means the same to a caller.
    """


def within(seconds: float, action: Callable[..., T], *args: Any) -> T:
    """Returns `action(*args)`, which runs in another thread.

    Raises:
        TimedOut: it has not returned within `seconds`.
        Exception: its own.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action(*args))
        except BaseException as error:
            errors.append(error)

    # Daemon, so that a call that never returns does not keep the interpreter from ending.
    thread = threading.Thread(target=run, name="limited", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, and starts no threads
        return action(*args)
    thread.join(seconds)
    if errors:
        raise errors.pop()
    # Not `thread.is_alive()`: a result that comes between the limit and this line still counts.
    if not results:
        raise TimedOut(f"no answer within {seconds:g} s")
    return results[0]


_stuck = False


def say(text: str) -> None:
    """Prints a line on stderr, or gives up if nobody reads it."""
    try_to_write(lambda: print(text, file=sys.stderr, flush=True))


def try_to_write(write: Callable[[], object]) -> None:
    """Writes to the streams of this process, or gives up if nobody reads them.

    A stream may be closed, or be a full pipe: then `is_stuck` is True, and nothing more is written.
    """
    global _stuck
    if _stuck:
        return
    try:
        within(PRINT_S, write)
    except TimedOut:
        # The thread that still waits holds the stream's lock, so the next write would wait as well.
        _stuck = True
    except Exception:  # the terminal is gone, the disk is full, or a stream is None or the script's
        pass


def is_stuck() -> bool:
    """Returns whether a stream was found to be a full pipe.

    The interpreter would wait for it at its end.
    """
    return _stuck
