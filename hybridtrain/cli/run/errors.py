"""A command's result on stdout, and the error that ends it on stderr.

All ranks together report an error once, briefly: the first process that fails reports it; the
others, which fail with the same error or a broken connection, stay quiet. A user error is one line.
Any other exception is shown with the frames of the user's files only; the rank's log has all
frames.

A result is one line of JSON. A run continues when nobody reads the two streams any more, and when
a pipe is full (`lasting_streams`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hybridtrain import __version__
from hybridtrain._base.problem import copied_problem
from hybridtrain._base.text_table import printable
from hybridtrain.cli.run.colour import with_red_error
from hybridtrain.errors import (
    DataError,
    Interrupted,
    UserError,
    WorldError,
)
from hybridtrain.launch import (
    EXIT_STALLED,
    Failure,
    Launch,
    current,
    detect,
    end_process,
    exit_code,
    first_failure,
    ignore_signals,
    in_one_line,
    launcher_serves_store,
    restore_signals,
    say,
    store_gone,
    tell_failure,
    within,
    write_error_file,
)

# Before the processes have joined, rank 0 reports at once. The others report after this time if the
# launcher has not ended them by then, because rank 0 then did not fail.
_WAIT_FOR_RANK_0_S = 4.0
# How long rank 0 of an interrupted run waits for the others to end.
_WAIT_FOR_ENDS_S = 2.0

# Seconds that a command waits for the reader of a full pipe before it drops what it prints.
STDERR_S = 10.0
STDOUT_S = 600.0

# of `\\U0001f600`, in place of a character that the encoding of stderr does not have
_MOST_BYTES_OF_A_CHARACTER = 10

_PACKAGE = Path(__file__).parents[2]
_OWN_MODELS = tuple(str(_PACKAGE / name) for name in ("models", "data"))
_FOLDED = ("torch", "hydra", "omegaconf", "safetensors")


def report(error: BaseException) -> int:
    """Prints the error that ends this command, unless another rank did, and returns the exit code.

    With several processes, it ends this one instead of returning, because other threads may be
    waiting for processes that have ended.
    """
    ignore_signals()
    text, line, code = describe(error)
    launch = _launch()
    rank, size = (0, 1) if launch is None else (launch.rank, launch.size)
    watchdog = current()
    if watchdog is None or watchdog.store.size == 1:
        if size > 1:
            _keep_code(code)
        at = time.time()
        _write_to_log(error)
        if watchdog is None and launch is not None and size > 1:
            if copied_problem(error) is None:
                _report_before_meeting(launch, text, line, at)
        else:
            _say(text, line, at)
        if watchdog is not None:
            watchdog.close()
            restore_signals()
        if size > 1:
            if watchdog is not None:
                end_process(code)
            os._exit(code)  # the sooner the launcher sees it, the sooner it ends the others
        return code
    if threading.current_thread() is threading.main_thread():
        # the launcher sends it because another process ended, which we are about to report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if watchdog.exit_code != EXIT_STALLED:
        watchdog.exit_code = code
    _write_to_log(error)
    name = watchdog.short_name(watchdog.store, rank)
    if isinstance(error, DataError) and copied_problem(error) is None:
        # a file may be missing on one node only
        text, line = f"{text}, on {name}", f"{line}, on {name}"
    failure = Failure(rank, line if isinstance(error, UserError) else f"{name}: {line}", code)
    try:
        first, _ = first_failure(failure, error, watchdog)
    except RuntimeError:  # the launcher or rank 0 has ended, or does not answer
        if rank != 0 and isinstance(error, UserError):
            end_process(code)  # rank 0 reports the same error
        first = store_gone(failure, error, watchdog)
        if first is not failure:
            failure, text = first, f"error: {first.line}"
    watchdog.await_end()
    if first is failure or first == failure:
        _say(text, failure.line, failure.time, on=f"on {name}")
    elif first.rank == rank:  # this process detected a failure of another one
        _say(f"error: {first.line}", first.line, first.time)
    else:
        write_error_file(first.line, first.time + 1)
    if isinstance(error, KeyboardInterrupt) and first is not failure:
        # the launcher ended this process because another failed; srun returns the largest code
        watchdog.exit_code = code = first.exit_code
    _keep_code(code)
    if first.exit_code == EXIT_STALLED:
        watchdog.exit_code = EXIT_STALLED
    if code == Interrupted.exit_code:
        with suppress(RuntimeError):
            within(_WAIT_FOR_ENDS_S, watchdog.store.end_together, _WAIT_FOR_ENDS_S)
    watchdog.end(first)
    return code


def report_and_go_on(error: BaseException) -> int:
    """Prints the error of one of several runs; returns its exit code."""
    text, _, code = describe(error)
    _write_to_log(error)
    print(with_red_error(printable(text), sys.stderr), file=sys.stderr, flush=True)
    return code


def _report_before_meeting(launch: Launch, text: str, line: str, at: float) -> None:
    """Prints an error from before this process joined the others, unless rank 0 does.

    torchrun ends all processes when one fails. Slurm does not by default, nor does a shell, so
    without torchrun this process notifies the others.
    """
    if launch.rank == 0:
        _say(text, line, at)
    said = None
    if not launcher_serves_store(os.environ) and launch.problem is None:
        said = tell_failure(launch, os.environ, line, _WAIT_FOR_RANK_0_S)
    elif launch.rank != 0:
        time.sleep(_WAIT_FOR_RANK_0_S)
    if launch.rank != 0 and (said is None or line not in said):
        _say(text, line, at)


def _keep_code(code: int) -> None:
    """Makes this process exit with `code` even if the launcher ends it in the meantime."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))


def describe(error: BaseException) -> tuple[str, str, int]:
    """Returns an error as text, as one line, and the exit code for it."""
    line, code = in_one_line(error), exit_code(error)
    if isinstance(error, Interrupted):  # requested, so not an error
        return line, line, code
    if isinstance(error, (UserError, KeyboardInterrupt)):
        return f"error: {line}", line, code
    return _short_traceback(error), line, code


def _short_traceback(error: BaseException) -> str:
    """Returns the traceback of the user's own frames, or of all frames if there are none."""
    log = _log_file()
    frames = traceback.extract_tb(error.__traceback__)
    users_frames = [frame for frame in frames if _is_the_users(frame.filename)]
    if any(note.startswith("in layer") for note in getattr(error, "__notes__", [])):
        users_frames = users_frames or [frames[-1]]  # the notes name a PyTorch module
    if not users_frames or log is None:
        return "".join(traceback.format_exception(error)).rstrip()
    lines = [f"Traceback in your files (full traceback in {log}):"]
    lines += [part.rstrip() for part in traceback.format_list(users_frames)]
    lines += [part.rstrip() for part in traceback.format_exception_only(error)]
    return "\n".join(lines)


def _is_the_users(path: str) -> bool:
    if path.startswith(_OWN_MODELS):
        return True
    parts = Path(path).parts
    if "site-packages" in parts:  # of the interpreter, or of a virtual environment anywhere
        package = parts[parts.index("site-packages") + 1]
        return package not in (*_FOLDED, _PACKAGE.name)
    return not path.startswith((str(_PACKAGE), str(Path(os.__file__).parent) + os.sep, "<"))


def _say(text: str, line: str, at: float, on: str = "") -> None:
    """Prints the text last, and writes the line to torchrun's error file."""
    write_error_file(line, at)
    one_line = text == line or text.startswith("error: ")
    shown = printable(text if one_line or not on else f"{text}\n{on}")
    say(with_red_error(shown, sys.stderr))


def _launch() -> Launch | None:
    try:
        return detect(os.environ)
    except WorldError:  # possibly the reported error itself
        return None


def _log_file() -> str | None:
    """Returns the log file of this rank, if the run has one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            return os.path.relpath(handler.baseFilename)
    return None


def _write_to_log(error: BaseException) -> None:
    """Writes the full traceback to the log file of this rank, not to the terminal."""
    details: tuple[type[BaseException], BaseException, TracebackType | None]
    details = type(error), error, error.__traceback__
    record = logging.LogRecord(__name__, logging.ERROR, __file__, 0, "ended by", None, details)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class LastingStream:
    """A text stream that goes silent where a write would raise, or would block for too long.

    A run continues when its terminal closes, when `| head` exits, and when nobody reads a full
    pipe. What a full pipe cannot take is dropped until somebody reads it again.

    Args:
        stream: the stream.
        patience_s: seconds to wait for the reader of a full pipe.

    Attributes:
        broken: whether the stream has no reader any more.
        dropped: the number of characters that a full pipe has not taken.
    """

    def __init__(self, stream: TextIO, patience_s: float) -> None:
        self._stream = stream
        self._patience_s = patience_s
        self._pipe = _pipe_of(stream)
        self._is_full = False
        self.broken = False
        self.dropped = 0

    def write(self, text: str) -> int:
        """Writes `text`, or nothing if the stream is broken."""
        if not self.broken:
            try:
                if self._pipe is None:
                    self._stream.write(text)
                else:
                    self._write_to_pipe(self._pipe, text)
            except (OSError, ValueError) as error:  # ValueError: it is closed
                if isinstance(error, UnicodeError):
                    raise
                self.broken = True
        return len(text)

    def _write_to_pipe(self, pipe: int, text: str) -> None:
        # A pipe that is ready takes so many bytes without blocking. Each piece is flushed, so that
        # the buffer is empty, and the interpreter does not wait for the reader at its end.
        step = select.PIPE_BUF // _MOST_BYTES_OF_A_CHARACTER
        for start in range(0, len(text), step):
            wait_s = 0 if self._is_full else self._patience_s
            self._is_full = not select.select([], [pipe], [], wait_s)[1]
            if self._is_full:
                self.dropped += len(text) - start
                return
            self._stream.write(text[start : start + step])
            self._stream.flush()

    def flush(self) -> None:
        """Flushes the stream, if it is not broken."""
        if not self.broken and self._pipe is None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self.broken = True

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        return not self.broken and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stream":  # `copy` asks an empty object for it
            raise AttributeError(f"'LastingStream' object has no attribute {name!r}")
        return getattr(self._stream, name)


def _pipe_of(stream: TextIO) -> int | None:
    """Returns the file descriptor of a stream that is a pipe, else None."""
    try:
        descriptor = stream.fileno()
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError):  # a file in memory, or closed
        return None


@contextmanager
def lasting_streams() -> Iterator[LastingStream]:
    """Replaces stdout and stderr by `LastingStream`s until the end of the block; yields stdout's.

    What is printed on stderr is also in the log of a run. What is printed on stdout is the result
    of a command, and its reader may be a person who turns the pages.
    """
    _open_closed_streams()
    before = sys.stdout, sys.stderr
    streams = LastingStream(before[0], STDOUT_S), LastingStream(before[1], STDERR_S)
    sys.stdout, sys.stderr = streams
    try:
        yield streams[0]
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
            if stream.broken:
                _lead_nowhere(stream)


def _open_closed_streams() -> None:
    """Lets the streams whose descriptors were closed at the start (`>&-`) lead nowhere.

    Python has None for them, and the next file that is opened would get what C++ code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # as they are numbered
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def print_result(values: Mapping[str, Any]) -> None:
    """Prints one line of JSON, the only output on stdout; NaN is `null`."""
    print(json_line(values), flush=True)


def json_line(values: Mapping[str, Any]) -> str:
    """Returns one line of JSON; see `finite`."""
    return json.dumps(finite(values), allow_nan=False, default=str)


def finite(value: Any) -> Any:
    """Returns a tree with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lead_nowhere(stream: LastingStream) -> None:
    """Keeps the interpreter from failing at exit when it flushes a broken stream."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # the stream has no file descriptor


def versions() -> dict[str, str]:
    """Returns the versions needed in a bug report, by name."""
    python = ".".join(map(str, sys.version_info[:3]))
    others = {name: version(name) for name in ("torch", "hydra-core")}
    return {"hybridtrain": __version__, **others, "Python": python}
