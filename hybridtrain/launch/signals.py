"""Signals that end a command, ask a run to stop, or end a process that is blocked.

    before the processes have met    a signal ends the process silently, as in any program
    outside of training              `raise_on_signals`: the command ends with one line
    in training                      `stop_on_signals`: the run saves at the end of the step
    a second SIGTERM or Ctrl-C       `second_signal_ends`, also where the main thread is blocked

Python calls a signal handler in the main thread between two bytecode instructions, so never while
that thread is blocked in a collective. Python's C-level handler, however, runs at once and writes
the signal's number to a pipe (`signal.set_wakeup_fd`), which a thread reads.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from hybridtrain.launch.activity import end_process
from hybridtrain.launch.limits import say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""The signals that ask a run to stop. torchrun passes SIGTERM, SIGINT and SIGHUP on to its workers;
Slurm sends SIGUSR1 with `--signal=USR1@120`.
"""

_previous: dict[signal.Signals, Any] = {}


def raise_on_signals() -> None:
    """Makes a signal that would end the process raise a KeyboardInterrupt with its name.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not SIGINT, which raises
            _previous[number] = signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignores the signals of `raise_on_signals`, while an error is being reported before the end.

    A launcher sends SIGTERM to all remaining processes, including the one reporting the error.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _previous:
            signal.signal(number, signal.SIG_IGN)


def restore_signals() -> None:
    """Undoes `raise_on_signals`."""
    if threading.current_thread() is threading.main_thread():
        _restore(_previous)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    while handlers:
        number, handler = handlers.popitem()
        signal.signal(number, handler)


def signal_name(number: int) -> str:
    """Returns the name of a signal, also of a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # of the real-time signals, Python names the first and the last only
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal_name(number))


@contextmanager
def stop_on_signals(ask: Callable[[str], None], speaks: bool) -> Iterator[None]:
    """Makes a signal ask for a stop while the block runs; a second one ends the process at once.

    Only SIGTERM and Ctrl-C count as a second signal, in any combination; other signals only request
    a stop. Handlers can only be set in the main thread; in another thread this does nothing. A
    signal that the process ignores (SIGHUP under nohup) stays ignored.

    Args:
        ask: called with the name of the signal, in the signal's handler.
        speaks: whether to print what a second Ctrl-C does.

    Raises:
        KeyboardInterrupt: at a second Ctrl-C. If the main thread is blocked, the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    first: float | None = None

    def stop(number: int, frame: object) -> None:
        nonlocal first
        name = signal_name(number)
        if number in (signal.SIGINT, signal.SIGTERM):
            now = time.monotonic()
            # The handler runs when the main thread is not blocked; for the other case the thread of
            # `_watch_pipe` counts the same signals.
            if is_second(number, first, now):
                # Before the exception, because on its way out the engine would wait for its
                # threads.
                end_at_once()
                _restore(previous)
                signal.raise_signal(number)  # ends a script as it would without `fit`
                return
            if first is None and number == signal.SIGINT and speaks:
                _say_stopping()
            first = first or now
        ask(name)

    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        # None: a handler that was not set from Python, which could not be restored.
        if handler is not signal.SIG_IGN and handler is not None:
            previous[number] = signal.signal(number, stop)
    counted = [number for number in (signal.SIGINT, signal.SIGTERM) if number in previous]
    try:
        with second_signal_ends(counted) or nullcontext():
            yield
    finally:
        _restore(previous)


def _say_stopping() -> None:
    """Prints what a second Ctrl-C does, in a handler, which may interrupt a print."""
    if sys.__stderr__ is None:  # it was closed from the start, and 2 may be another file
        return
    with suppress(OSError):  # the Ctrl-C has also ended the reader, such as `| tee`
        if select.select([], [2], [], 0)[1]:  # a full pipe would block the handler
            os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")


# How long a block may take to end after a second signal, before the process exits.
_GRACE_S = 3.0
# Launchers pass on signals that their processes have already received: torchrun a Ctrl-C of the
# terminal, srun and timeout a SIGTERM to the whole process group.
_PASSED_ON_S = 2.0
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")


class _Block:
    """A block that a second signal ends.

    Attributes:
        numbers: the signals that count.
        first: the time of the first signal, in seconds; None before it.
        ends_at_once: whether a second signal's handler has called `end_at_once`.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = numbers
        self.first: float | None = None
        self.ends_at_once = False


_block: _Block | None = None
_write_end: int | None = None


def is_second(number: int, first: float | None, now: float) -> bool:
    """Returns whether a signal is a second one, rather than the first, passed on by a launcher.

    Args:
        number: the number of the signal.
        first: the time of the first signal, in seconds; None without one.
        now: the current time, in seconds.
    """
    if first is None:
        return False
    # A terminal's Ctrl-C without a launcher reaches the process once, so a second one is the
    # user's.
    passed_on = number == signal.SIGTERM or any(name in os.environ for name in _LAUNCHERS)
    return not passed_on or now - first >= _PASSED_ON_S


def second_signal_ends(
    numbers: Collection[int] | None = None,
) -> AbstractContextManager[None] | None:
    """Returns a block that a second signal ends, with the process, if it does not end in seconds.

    None outside of the main thread, and inside such a block.

    Args:
        numbers: the signals that count; None for Ctrl-C if it has Python's default handler, since a
            script's own handler may wait for the end of the block.
    """
    if _block is not None or threading.current_thread() is not threading.main_thread():
        return None
    return _second_signal_ends(numbers)


@contextmanager
def _second_signal_ends(numbers: Collection[int] | None) -> Iterator[None]:
    global _block
    if numbers is None:
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        numbers = [signal.SIGINT] * raises
    # A full pipe is no reason for a warning: two numbers in it are enough.
    previous = signal.set_wakeup_fd(_pipe(), warn_on_full_buffer=False)
    # One assignment, which the thread reads once per signal: it never sees half of a block.
    _block = _Block(numbers)
    try:
        yield
    finally:
        _block = None
        with suppress(ValueError, OSError):  # the fd of an event loop that was closed meanwhile
            signal.set_wakeup_fd(previous)


def end_at_once() -> None:
    """Marks the block as ended by a second signal, so that nothing waits for threads to end."""
    if _block is not None:
        _block.ends_at_once = True


def ends_at_once() -> bool:
    """Returns whether `end_at_once` was called in the current block."""
    return _block is not None and _block.ends_at_once


def _pipe() -> int:
    """Returns the write end of the pipe for signals, and starts the thread that reads it."""
    global _write_end
    if _write_end is None:
        # Never closed: the C-level handler may write to it at any time.
        read_end, _write_end = os.pipe()
        # `set_wakeup_fd` demands it: a handler must not block.
        os.set_blocking(_write_end, False)
        threading.Thread(target=_watch_pipe, args=(read_end,), name="signals", daemon=True).start()
        # A forked data worker inherits the pipe, but not the thread that reads it.
        os.register_at_fork(after_in_child=_forget)
    return _write_end


def _forget() -> None:
    """Detaches a forked process from the pipe, so that its signals do not reach the parent."""
    global _block, _write_end
    if _block is not None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
    _block = _write_end = None


def _watch_pipe(read_end: int) -> None:
    """Reads signal numbers from the pipe, and ends the process after a second signal in a block."""
    while number := os.read(read_end, 1)[0]:
        block, now = _block, time.monotonic()
        if block is None or number not in block.numbers:
            continue
        if not is_second(number, block.first, now):
            block.first = block.first or now
            continue
        # The main thread gets a moment to end the block itself by its KeyboardInterrupt.
        while _block is block and time.monotonic() < now + _GRACE_S:
            time.sleep(0.05)
        if _block is block:
            name = signal_name(number)
            say(f"\nended by a second signal, {name}, without saving")
            # In this thread: the main thread is blocked, or it would have left the block.
            end_process(128 + number, wait_for_save=0)
