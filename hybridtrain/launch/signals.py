"""Signals: what ends a command at once, what asks a run to stop, and what ends one that is blocked.

    before the processes have met    a signal ends the process without a word, as in any program
    outside of training              `raise_on_signals`: the command ends with one line
    in training                      `stop_on_signals`: the run saves at the end of the step
    a second SIGTERM or Ctrl-C       `second_signal_ends`, also where the main thread is blocked

Python calls a signal's handler in the main thread, between two of its instructions: never while
that thread waits in a collective for a process whose layer does not return. What the system calls
at once writes the signal's number to a pipe (`signal.set_wakeup_fd`), and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hybridtrain.launch.activity import end_process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""The signals that ask a run to stop. torchrun passes SIGTERM, SIGINT and SIGHUP on to its workers;
Slurm sends SIGUSR1 if it is told to (`--signal=USR1@120`)."""

_previous: dict[signal.Signals, Any] = {}


def raise_on_signals() -> None:
    """Makes a signal raise a KeyboardInterrupt with its name, if it would have ended the process.

    Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:  # not SIGINT, which raises
            _previous[number] = signal.signal(number, _interrupt)


def ignore_signals() -> None:
    """Ignores the signals of `raise_on_signals`: an error is being reported, and then all ends.

    A launcher sends SIGTERM to the processes that are left, also to one that is about to say why.
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


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def stop_on_signals(ask: Callable[[str], None], speaks: bool) -> Iterator[None]:
    """Makes a signal ask for a stop while the block runs; a second one ends at once.

    The second SIGTERM or Ctrl-C, whichever the first was; the other signals only ask. Handlers can
    only be set in the main thread; in another one the signals keep their meaning. A signal that the
    process ignores (SIGHUP under nohup) stays ignored.

    Args:
        ask: given the name of the signal; runs in its handler.
        speaks: say on the terminal what a second Ctrl-C does.

    Raises:
        KeyboardInterrupt: at a second Ctrl-C. Where the main thread is blocked, the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    first: float | None = None

    def stop(number: int, frame: object) -> None:
        nonlocal first
        name = signal.Signals(number).name
        if number in (signal.SIGINT, signal.SIGTERM):
            now = time.monotonic()
            if is_second(number, first, now):
                end_at_once()
                _restore(previous)
                signal.raise_signal(number)  # which ends a script as it would without `fit`
                return
            if first is None and number == signal.SIGINT and speaks:
                # os.write: a handler may interrupt a print
                os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")
            first = first or now
        ask(name)

    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN and handler is not None:
            previous[number] = signal.signal(number, stop)
    counted = [number for number in (signal.SIGINT, signal.SIGTERM) if number in previous]
    try:
        with second_signal_ends(counted):
            yield
    finally:
        _restore(previous)


# How long a block may take to end after a second signal, before the process is ended.
_GRACE_S = 3.0
# Launchers pass on what their processes have got already: torchrun a Ctrl-C of the terminal, srun
# and timeout a SIGTERM that was for all.
_PASSED_ON_S = 2.0
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")


class _Block:
    """A block that a second signal ends.

    Attributes:
        numbers: the signals that count.
        first: when the first one came.
        ends_at_once: whether the handler of the second one has said so.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.numbers = numbers
        self.first: float | None = None
        self.ends_at_once = False


_block: _Block | None = None
_write_end: int | None = None


def is_second(number: int, first: float | None, now: float) -> bool:
    """Returns whether a signal is another one than the first, and not the same, passed on.

    Args:
        number: of the signal.
        first: when the first one came, in seconds; None: there was none.
        now: in seconds.
    """
    if first is None:
        return False
    passed_on = number == signal.SIGTERM or any(name in os.environ for name in _LAUNCHERS)
    return not passed_on or now - first >= _PASSED_ON_S


@contextmanager
def second_signal_ends(numbers: Collection[int] | None = None) -> Iterator[None]:
    """Ends the process if the block has not ended some seconds after a second signal.

    Only in the main thread, and only the outermost of such blocks.

    Args:
        numbers: the signals that count; None: Ctrl-C, if Python raises at it. A script's own
            handler of a signal may want to wait for the end of the block.
    """
    global _block
    if _block is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    if numbers is None:
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        numbers = [signal.SIGINT] * raises
    previous = signal.set_wakeup_fd(_pipe(), warn_on_full_buffer=False)
    _block = _Block(numbers)
    try:
        yield
    finally:
        _block = None
        with suppress(ValueError, OSError):  # an event loop that has been closed meanwhile
            signal.set_wakeup_fd(previous)


def end_at_once() -> None:
    """Says that a second signal has come: what waits for threads to end in order does not wait."""
    if _block is not None:
        _block.ends_at_once = True


def ends_at_once() -> bool:
    """Returns whether `end_at_once` was called in the block that runs."""
    return _block is not None and _block.ends_at_once


def _pipe() -> int:
    """Returns the end of the pipe for signals; a thread reads at the other end from now on."""
    global _write_end
    if _write_end is None:
        read_end, _write_end = os.pipe()
        os.set_blocking(_write_end, False)
        threading.Thread(target=_listen, args=(read_end,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget)
    return _write_end


def _forget() -> None:
    """Takes a forked process off its parent's pipe: its signals are not the parent's."""
    global _block, _write_end
    if _block is not None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
    _block = _write_end = None


def _listen(read_end: int) -> None:
    while number := os.read(read_end, 1)[0]:
        block, now = _block, time.monotonic()
        if block is None or number not in block.numbers:
            continue
        if not is_second(number, block.first, now):
            block.first = block.first or now
            continue
        while _block is block and time.monotonic() < now + _GRACE_S:
            time.sleep(0.05)
        if _block is block:
            name = signal.Signals(number).name
            os.write(2, f"\nended by a second signal, {name}, without saving\n".encode())
            end_process(128 + number, wait_for_save=0)
