"""Reports the error that ends a run in all processes, with its cause.

When a process fails, the others only see a closed connection, or wait until a timeout. Here the
failing process first publishes the reason in the store, and every process ends with the same last
line:

    error: rank 1 (stage 1, node2) failed: ArithmeticError: boom (in the forward of ...)

The failing process prints the traceback. `cli.run.errors` does the same for the command line, which
catches its errors itself.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from hybridtrain._base.problem import copied_problem
from hybridtrain.errors import Interrupted, UserError
from hybridtrain.launch.error_file import write_error_file
from hybridtrain.launch.process_store import EXIT_STALLED, Failure
from hybridtrain.launch.watchdog import Watchdog, current

# How long a process with a broken connection waits for the failing process to publish the reason.
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
    """Returns an error in one line, with its notes; starts with its type unless a UserError."""
    notes = list(getattr(error, "__notes__", []))
    if isinstance(error, UserError):
        return f"{error}{''.join(f' ({note})' for note in notes)}"
    if isinstance(error, KeyboardInterrupt):
        return (
            f"ended by {_signal_of(error)}; rerun the same command to continue from a saved "
            "checkpoint"
        )
    name = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0]
    line = f"{name}: {first}" if first else name
    return line + (
        f" ({'; '.join(note.splitlines()[0] for note in notes if note)})" if notes else ""
    )


def exit_code(error: BaseException) -> int:
    """Returns the exit code for a process that ends with this error."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.Signals[_signal_of(error)]
    return 1


def find_cause(error: BaseException, watchdog: Watchdog) -> Failure | None:
    """Returns the failure of another process that caused this error; None if there is none.

    Raises:
        RuntimeError: the store is gone.
    """
    failure: Failure | None
    text = "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    is_broken = is_broken_connection(error)
    is_copy = copied_problem(error) is not None and not is_broken
    has_timed_out = any(sign in text for sign in _TIMED_OUT)
    # perhaps by the launcher, because another process has died
    is_interrupted = isinstance(error, KeyboardInterrupt)
    if not (is_copy or is_broken or has_timed_out or is_interrupted):
        return None
    deadline = time.monotonic() + (_WAIT_FOR_LOST_S if is_interrupted else _WAIT_FOR_CAUSE_S)
    while time.monotonic() < deadline:
        failure = watchdog.known_failure or watchdog.store.failure()
        if failure is not None:
            return failure
        if not is_copy and (failure := watchdog.lost_process(watchdog.store)) is not None:
            return watchdog.store.claim(failure)
        time.sleep(0.05)
    if has_timed_out:
        failure = watchdog.explain_stall(watchdog.store, watchdog.timeout_s)
        return None if failure is None else watchdog.store.claim(failure)
    if is_broken:
        failure = _left(watchdog) or watchdog.process_gone(0.0)
        return None if failure is None else watchdog.store.claim(failure)
    return None


def is_broken_connection(error: BaseException) -> bool:
    """Returns whether an error is a broken connection to another process."""
    text = "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return any(sign in text for sign in _BROKEN_CONNECTION)


def store_gone(failure: Failure, error: BaseException, watchdog: Watchdog) -> Failure:
    """Returns the failure to report when the store, which rank 0 may host, is gone.

    For a broken connection the message says that rank 0 is gone.
    """
    if failure.rank != 0 and is_broken_connection(error):
        return replace(failure, line=watchdog.main_gone())
    return failure


def _left(watchdog: Watchdog) -> Failure | None:
    """Returns a failure about a process that ended normally, but too early, or None."""
    store = watchdog.store
    for rank in range(store.size):
        if rank != store.rank and store.has_left(rank):
            line = (
                f"{watchdog.short_name(store, rank)} finished while rank {store.rank} was waiting "
                "for it: all processes must run the same number of steps"
            )
            return Failure(store.rank, line)
    return None


def _signal_of(error: KeyboardInterrupt) -> str:
    name = str(error)
    return name if name in signal.Signals.__members__ else "SIGINT"


# How long rank 0, which may host the store, waits for the others to read its failure.
_WAIT_FOR_OTHERS_S = 2.0

_before: Any = None


def tell_uncaught_errors() -> None:
    """Installs an exception hook that reports an uncaught error to the other processes."""
    global _before
    if sys.excepthook is not _report:
        _before, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the error that ends this process, or the failure that caused it."""
    watchdog = current()
    if watchdog is None or watchdog.store.size == 1:
        _before(kind, error, trace)
        return
    store, line = watchdog.store, in_one_line(error)
    text = f"{'' if isinstance(error, Interrupted) else ' failed'}: {line}"
    failure = Failure(store.rank, f"rank {store.rank}{text}", exit_code(error))
    # without a store request: if the store is gone, PyTorch prints stacks on a request
    cause = watchdog.known_failure if is_broken_connection(error) else None
    try:
        if cause is None:
            failure = replace(failure, line=f"{watchdog.short_name(store, store.rank)}{text}")
            cause = find_cause(error, watchdog)
        first = cause or store.claim(failure)
    except RuntimeError:  # the launcher or rank 0 has ended, so the store is gone
        first = watchdog.known_failure or store_gone(failure, error, watchdog)
        cause = None if first is failure else first
    watchdog.end_threads()  # a debugger may be starting, and must not be killed
    if cause is None and (first == failure or not first.line.endswith(text)):
        _before(kind, error, trace)
    with suppress(OSError, ValueError):  # the terminal is gone
        print(f"error: {first.line}", file=sys.stderr, flush=True)
    write_error_file(first.line, first.time + (first != failure))
    if first.exit_code == EXIT_STALLED:
        watchdog.end(first)
    if first == failure and store.rank == 0:
        with suppress(RuntimeError):
            store.wait_for_acknowledgements(_WAIT_FOR_OTHERS_S)
