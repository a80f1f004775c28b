"""The error that ends a process: in one line, told to the others, or traced to one of theirs.

When a process fails, PyTorch tells the others of a closed connection alone, or they wait until a
limit. Here the process that fails says why in the store first, and each of them ends with the same
last line:

    error: rank 1 (stage 1, node2) failed: ArithmeticError: boom (in the forward of ...)

The traceback is printed by the process that has failed. `cli.run.errors` does the like for the
commands of the command line, which catches its errors itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hybridtrain._base.problem import copied_problem
from hybridtrain.errors import Interrupted, UserError
from hybridtrain.launch.job import EXIT_STALLED, Failure

if TYPE_CHECKING:
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
    broken = is_broken_connection(error)
    copied = copied_problem(error) is not None and not broken
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
    job = watchdog.job
    for rank in range(job.size):
        if rank != job.rank and job.has_left(rank):
            line = (
                f"{watchdog.short_name(job, rank)} has come to its end while rank {job.rank} "
                f"waited for it: every process has to take the same number of steps"
            )
            return Failure(job.rank, line)
    return None


def _signal_of(error: KeyboardInterrupt) -> str:
    name = str(error)
    return name if name in signal.Signals.__members__ else "SIGINT"


# How long rank 0, which may have the store, stays for the others to hear of its failure.
_WAIT_FOR_OTHERS_S = 2.0

_before: Any = None


def tell_uncaught_errors() -> None:
    """Makes an uncaught error of this process known to the others; from now on."""
    global _before
    if sys.excepthook is not _report:
        _before, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error that ends this process, or the one that it is a consequence of."""
    from hybridtrain.launch.watchdog import current  # which imports this module

    watchdog = current()
    if watchdog is None or watchdog.job.size == 1:
        _before(kind, error, trace)
        return
    job, line = watchdog.job, in_one_line(error)
    said = f"{'' if isinstance(error, Interrupted) else ' failed'}: {line}"
    own = Failure(job.rank, f"rank {job.rank}{said}", exit_code(error))
    # known already: the store may be gone, and PyTorch prints its stacks where it is asked then
    cause = watchdog.heard if is_broken_connection(error) else None
    try:
        if cause is None:
            own = replace(own, line=f"{watchdog.short_name(job, job.rank)}{said}")
            cause = find_cause(error, watchdog)
        first = cause or job.claim(own)
    except RuntimeError:  # the launcher or rank 0 has ended, and the store with it
        first = watchdog.heard or store_gone(own, error, watchdog)
        cause = None if first is own else first
    watchdog.end_threads()  # a debugger may follow, and ends when its user wants it to
    if cause is None and (first == own or not first.line.endswith(said)):
        _before(kind, error, trace)
    with suppress(OSError, ValueError):  # the terminal is gone
        print(f"error: {first.line}", file=sys.stderr, flush=True)
    write_error_file(first.line, first.time + (first != own))
    if first.exit_code == EXIT_STALLED:
        watchdog.end(first)
    if first == own and job.rank == 0:
        with suppress(RuntimeError):
            job.wait_until_heard(_WAIT_FOR_OTHERS_S)


def write_error_file(line: str, at: float | None = None) -> None:
    """Leaves `line` where torchrun looks for the cause of a failure; it shows the earliest one.

    In the format of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`, which itself
    writes whole tracebacks only. Without torchrun nothing is written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    timestamp = str(int(time.time() if at is None else at))
    details = {"py_callstack": line, "timestamp": timestamp}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
