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
from types import TracebackType
from typing import Any

from hybridtrain._base.problem import copied_problem
from hybridtrain.errors import Interrupted, UserError
from hybridtrain.launch.error_file import write_error_file
from hybridtrain.launch.limits import (
    PRINT_S,
    STORE_S,
    TimedOut,
    is_stuck,
    say,
    try_to_write,
    within,
)
from hybridtrain.launch.process_store import EXIT_STALLED, Failure
from hybridtrain.launch.watchdog import Watchdog, current

# How long a process with a broken connection waits for the failing process to publish the reason.
_WAIT_FOR_CAUSE_S = 3.0
_WAIT_FOR_LOST_S = 0.3

# By text, because gloo and NCCL raise plain RuntimeErrors for everything.
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
_TIMED_OUT = ("Timed out waiting", "timed out after", "Wait timeout", "wait timeout after")


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
    is_broken = is_broken_connection(error)
    # Another process has raised the original, and is about to publish it.
    is_copy = copied_problem(error) is not None and not is_broken
    has_timed_out = _has_timed_out(error)
    # perhaps by the launcher, because another process has died
    is_interrupted = isinstance(error, KeyboardInterrupt)
    # Any other error is this process's own.
    if not (is_copy or is_broken or has_timed_out or is_interrupted):
        return None
    # Short after an interrupt: a user may be waiting for the prompt.
    deadline = time.monotonic() + (_WAIT_FOR_LOST_S if is_interrupted else _WAIT_FOR_CAUSE_S)
    while time.monotonic() < deadline:
        # Known first: the store may end with a rank 0 that has seen this process's acknowledgement.
        failure = watchdog.known_failure or watchdog.store.failure()
        if failure is not None:
            return failure
        # With a copy, the process of the original may have printed it and ended already: that end
        # is no failure of its own.
        if not is_copy and (failure := watchdog.lost_process(watchdog.store)) is not None:
            return watchdog.store.claim(failure)
        time.sleep(0.05)
    if has_timed_out:
        # Only now: stacks are written once per run, and a published cause says more.
        failure = watchdog.explain_stall(watchdog.store, watchdog.timeout_s)
        # None: another process collects the stacks and will publish the failure.
        return None if failure is None else watchdog.store.claim(failure)
    if is_broken:
        # In this order, because `process_gone` watches signs of life for five seconds.
        failure = _left(watchdog) or watchdog.process_gone()
        return None if failure is None else watchdog.store.claim(failure)
    return None


def is_broken_connection(error: BaseException) -> bool:
    """Returns whether an error is a broken connection to another process."""
    return any(sign in _text_of(error) for sign in _BROKEN_CONNECTION)


def _has_timed_out(error: BaseException) -> bool:
    return any(sign in _text_of(error) for sign in _TIMED_OUT)


def _text_of(error: BaseException) -> str:
    return "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def first_failure(
    failure: Failure, error: BaseException, watchdog: Watchdog
) -> tuple[Failure, bool]:
    """Returns the failure that ends the run, and whether it has caused this error.

    It is what caused the error, or an earlier failure of another process, or `failure`. Publishes
    `failure` if it is the first, and that this process knows of it. Waits for the store at most
    `STORE_S`.

    Args:
        failure: of this process, because of `error`.
        error: the error that ends this process.
        watchdog: the watchdog of this process.

    Raises:
        RuntimeError: the store is gone, or does not answer.
    """

    def decide() -> tuple[Failure, bool]:
        cause = find_cause(error, watchdog)
        first = cause or watchdog.store.claim(failure)
        watchdog.store.acknowledge_failure()
        return first, cause is not None

    # Its store would not answer until the limit.
    if watchdog.main_is_stopped:
        raise TimedOut("rank 0, which serves the store, is stopped")
    # On the main thread's connection, which is free: this thread waits meanwhile.
    return within(STORE_S, decide)


def store_gone(failure: Failure, error: BaseException, watchdog: Watchdog) -> Failure:
    """Returns the failure to report when the store, which rank 0 may host, is gone or stopped.

    For a broken connection or a collective call that has timed out the message is about rank 0.
    """
    if failure.rank != 0 and (is_broken_connection(error) or _has_timed_out(error)):
        return watchdog.store_gone()
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


_before: Any = None


def tell_uncaught_errors() -> None:
    """Installs an exception hook that reports an uncaught error to the other processes."""
    global _before
    # Installed twice, `_before` would be this hook, and call itself.
    if sys.excepthook is not _report:
        _before, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints the error that ends this process, or the failure that caused it.

    The interpreter then ends the process. If it could not, because a pipe is full or the store does
    not answer, the process ends here.
    """
    watchdog = current()
    if watchdog is None or watchdog.store.size == 1:
        _before(kind, error, trace)
        return
    store, line = watchdog.store, in_one_line(error)
    text = f"{'' if isinstance(error, Interrupted) else ' failed'}: {line}"
    name = watchdog.short_name(store, store.rank)
    failure = Failure(store.rank, f"{name}{text}", exit_code(error))
    answers = True
    # without a store request: if the store is gone, PyTorch prints stacks on a request
    known = watchdog.known_failure if is_broken_connection(error) else None
    first, is_cause = known or failure, known is not None
    if known is None:
        try:
            first, is_cause = first_failure(failure, error, watchdog)
        except RuntimeError as gone:  # the launcher or rank 0 has ended, or does not answer
            answers = not isinstance(gone, TimedOut)
            first = watchdog.known_failure or store_gone(failure, error, watchdog)
            is_cause = first is not failure
    # Before anything is printed: its threads print the cause, of which this error is a consequence.
    watchdog.await_end()
    watchdog.end_threads()  # a debugger may be starting, and must not be killed
    # A failure of another rank with the same text is the same error on all ranks: one of them
    # prints the traceback.
    if not is_cause and (first == failure or not first.line.endswith(text)):
        _show(kind, error, trace)
    with suppress(OSError, RuntimeError):
        # One second later for a failure of another process: torchrun reports the earliest error.
        within(PRINT_S, write_error_file, first.line, first.time + (first != failure))
    say(f"error: {first.line}")
    # In these cases the interpreter's end would wait for the stuck collective, the full pipe or the
    # store.
    if first.exit_code == EXIT_STALLED or is_stuck() or not answers:
        stalled = first.exit_code == EXIT_STALLED
        watchdog.exit_code = EXIT_STALLED if stalled else failure.exit_code
        watchdog.end(first)
    # Last: the interpreter now ends, and with rank 0 the store.
    watchdog.wait_for_readers()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Calls the hook that was there before this module's."""
    if _only_prints(_before):
        try_to_write(lambda: _before(kind, error, trace))
    else:  # in this thread and without a limit, because it may start a debugger
        _before(kind, error, trace)


def _only_prints(hook: Any) -> bool:
    """Returns whether an exception hook is Python's, or PyTorch's around it."""
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        # init_process_group's, which puts the rank in front of each line
        inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        return all(_only_prints(function) for function in inside if callable(function))
    return hook is sys.__excepthook__
