"""Signals that ask a run to stop: it saves at the end of the step, instead of dying at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridtrain.launch.step_flags import StepFlags

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)
"""The signals that ask a run to stop. torchrun passes SIGTERM, SIGINT and SIGHUP on to its workers;
Slurm sends SIGUSR1 if it is told to (`--signal=USR1@120`)."""

# For one Ctrl-C a worker gets two SIGINTs: the terminal's, and torchrun's which passes its own on.
_ONE_CTRL_C_S = 2.0


@contextmanager
def stop_on_signals(flags: StepFlags) -> Iterator[None]:
    """Makes a signal set the flag "stop" while the block runs; a second Ctrl-C ends at once.

    Handlers can only be set in the main thread; in another one the signals keep their meaning. A
    signal that the process ignores (SIGHUP under nohup) stays ignored.

    Raises:
        KeyboardInterrupt: at a second Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {}
    first_interrupt: float | None = None

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signal.signal(number, handler)

    def stop(number: int, frame: object) -> None:
        nonlocal first_interrupt
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if first_interrupt is not None:
                if "TORCHELASTIC_RUN_ID" in os.environ and now - first_interrupt < _ONE_CTRL_C_S:
                    return
                restore()
                raise KeyboardInterrupt
            first_interrupt = now
            if flags.is_main:  # os.write: a handler may interrupt a print
                os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")
        flags.set("stop", reason=name)

    for number in STOP_SIGNALS:
        handler = signal.getsignal(number)
        if handler is not signal.SIG_IGN and handler is not None:
            previous[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
