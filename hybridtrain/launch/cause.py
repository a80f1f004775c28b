"""An error in one line, and the failure of another process that it is a consequence of.

When a process fails, the others see a connection that is closed, or wait until a limit. The store
of the processes has the failure itself.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridtrain.errors import Rank0Error, Rank0UserError, UserError

if TYPE_CHECKING:
    from hybridtrain.launch.job import Failure
    from hybridtrain.launch.watchdog import Watchdog

# How long a process with a broken connection waits for the one that has caused it to say why.
_WAIT_FOR_CAUSE_S = 3.0
_WAIT_FOR_LOST_S = 0.3

_BROKEN_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "gloo/transport",
    "gloo::",
    "Application timeout caused pair closure",
    "remote process exited",
    "NCCL communicator was aborted",
    "Failed to recv",
    "Connection was likely closed",
)
_TIMED_OUT = ("Timed out waiting", "timed out after", "Wait timeout")


def in_one_line(error: BaseException) -> str:
    """Returns an error in one line, with its notes; any but a UserError with its type."""
    notes = list(getattr(error, "__notes__", []))
    if isinstance(error, UserError):
        return f"{error}{''.join(f' ({note})' for note in notes)}"
    if isinstance(error, KeyboardInterrupt):
        return (
            f"ended by {_signal_of(error)}; a run that has saved a checkpoint goes on with the "
            f"same command"
        )
    name = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    line = f"{name}: {first}" if first else name
    return line + (
        f" ({'; '.join(note.splitlines()[0] for note in notes if note)})" if notes else ""
    )


def exit_code(error: BaseException) -> int:
    """Returns the exit code that an error ends a process with."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.Signals[_signal_of(error)]
    return 1


def find_cause(error: BaseException, watchdog: Watchdog) -> Failure | None:
    """Returns the failure of another process that this error is a consequence of, if it is one.

    Raises:
        RuntimeError: the store is gone.
    """
    failure: Failure | None
    text = "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    copied = isinstance(error, (Rank0UserError, Rank0Error))
    broken = is_broken_connection(error)
    late = any(sign in text for sign in _TIMED_OUT)
    ended = isinstance(error, KeyboardInterrupt)  # perhaps by the launcher, as another has died
    if not (copied or broken or late or ended):
        return None
    deadline = time.monotonic() + (_WAIT_FOR_LOST_S if ended else _WAIT_FOR_CAUSE_S)
    while time.monotonic() < deadline:
        failure = watchdog.heard or watchdog.job.failure()
        if failure is not None:
            return failure
        if not copied and (failure := watchdog.lost_process(watchdog.job)) is not None:
            return watchdog.job.claim(failure)
        time.sleep(0.05)
    if late:
        failure = watchdog.explain_stall(watchdog.job, watchdog.timeout_s)
        return None if failure is None else watchdog.job.claim(failure)
    if broken:
        failure = _left(watchdog) or watchdog.process_gone(0.0)
        return None if failure is None else watchdog.job.claim(failure)
    return None


def is_broken_connection(error: BaseException) -> bool:
    """Returns whether an error is that of a connection to another process."""
    text = "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return any(sign in text for sign in _BROKEN_CONNECTION)


def store_gone(own: Failure, error: BaseException, watchdog: Watchdog) -> Failure:
    """Returns the failure that ends this process where the store, and rank 0, are gone.

    It is rank 0's end if the error is a broken connection.
    """
    if own.rank != 0 and is_broken_connection(error):
        return replace(own, line=watchdog.main_gone())
    return own


def _left(watchdog: Watchdog) -> Failure | None:
    """Returns the failure that a process is which has ended as it should, but too early."""
    from hybridtrain.launch.job import Failure  # with torch, which takes a second to import

    job = watchdog.job
    for rank in range(job.size):
        if rank != job.rank and job.has_left(rank):
            line = (
                f"{watchdog.short_name(job, rank)} has come to its end while rank {job.rank} "
                f"waited for it: every process has to take the same number of steps"
            )
            return Failure(job.rank, line, 1)
    return None


def _signal_of(error: KeyboardInterrupt) -> str:
    name = str(error)
    return name if name in signal.Signals.__members__ else "SIGINT"
