"""Signals that ask a run to stop: it saves at the end of the step, instead of dying at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridtrain.launch.second_signal import end_at_once, is_second, second_signal_ends
from hybridtrain.launch.step_flags import StepFlags

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)
"""The signals that ask a run to stop. torchrun passes SIGTERM, SIGINT and SIGHUP on to its workers;
Slurm sends SIGUSR1 if it is told to (`--signal=USR1@120`)."""


@contextmanager
def stop_on_signals(flags: StepFlags) -> Iterator[None]:
    """Makes a signal set the flag "stop" while the block runs; a second one ends at once.

    The second SIGTERM or Ctrl-C, whichever the first was; the other signals only ask. Handlers can
    only be set in the main thread; in another one the signals keep their meaning. A signal that the
    process ignores (SIGHUP under nohup) stays ignored.

    Raises:
        KeyboardInterrupt: at a second Ctrl-C. Where the main thread is blocked, the process ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    first: float | None = None

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        nonlocal first
        name = signal.Signals(number).name
        if number in (signal.SIGINT, signal.SIGTERM):
            now = time.monotonic()
            if is_second(number, first, now):
                end_at_once()
                restore()
                signal.raise_signal(number)  # which ends a script as it would without `fit`
                return
            if first is None and number == signal.SIGINT and flags.is_main:
                # os.write: a handler may interrupt a print
                os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")
            first = first or now
        flags.set("stop", reason=name)

    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN and handler is not None:
            previous[number] = signal.signal(number, stop)
    counted = [number for number in (signal.SIGINT, signal.SIGTERM) if number in previous]
    try:
        with second_signal_ends(counted):
            yield
    finally:
        restore()
