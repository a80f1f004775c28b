"""The uncaught error of a script in several processes, told in all of them.

PyTorch tells the others of a closed connection alone. Here the process that fails says why in the
store first, and each of them ends with the same last line:

    error: rank 1 (stage 1, node2) failed: ArithmeticError: boom (in the forward of ...)

The traceback is printed by the process that has failed. `app.error_report` does the like for the
commands of the command line, which catches its errors itself.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from hybridtrain.errors import Interrupted
from hybridtrain.launch.cause import (
    exit_code,
    find_cause,
    in_one_line,
    is_broken_connection,
    store_gone,
)
from hybridtrain.launch.job import EXIT_STALLED, Failure
from hybridtrain.launch.torchrun_report import write_error_file
from hybridtrain.launch.watchdog import current

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
