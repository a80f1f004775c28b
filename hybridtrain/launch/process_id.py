"""Process IDs, to check whether another process of this host is alive or stopped."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NamedTuple


class ProcessId(NamedTuple):
    """The identity of a process.

    Attributes:
        host: the host name.
        pid: the process id.
        started: the start time, because the system reuses ids.
        namespace: the pid namespace, because containers do not see each other's processes.
    """

    host: str
    pid: int
    started: str
    namespace: str = ""


def process_state(pid: int) -> tuple[str, str] | None:
    """Returns the state letter and the start time of a process; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # After the last parenthesis, because the command's name before it may hold spaces and
            # parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    # `starttime`, field 22 of proc(5), in clock ticks since boot: fields 1 and 2 are cut off.
    return fields[0], fields[19]


def this_process() -> ProcessId:
    """Returns the id of this process."""
    state = process_state(os.getpid())
    return ProcessId(
        os.uname().nodename, os.getpid(), state[1] if state else "", process_namespace()
    )


def process_namespace() -> str:
    """Returns the pid namespace of this process; "" if it cannot be read.

    Two containers can have the same host name, and different processes with the same id.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_seen_from_here(process: ProcessId) -> bool:
    """Returns whether a process is on this host and in this container."""
    return process.host == os.uname().nodename and process.namespace == process_namespace()


def has_ended(process: ProcessId) -> bool:
    """Returns whether a process has ended; False if it is on another host or in a container."""
    if not is_seen_from_here(process):
        return False
    if sys.platform != "linux":  # without a start time, a new process with this id is not noticed
        try:
            os.kill(process.pid, 0)
        except OSError as error:
            # A PermissionError means that there is a process.
            return isinstance(error, ProcessLookupError)
        return False
    state = process_state(process.pid)
    # A zombie counts as ended: its launcher has not reaped it yet, but it runs no more.
    return state is None or state[1] != process.started or state[0] in "ZX"


def is_stopped(process: ProcessId) -> bool:
    """Returns whether a process of this host is stopped, for example by SIGSTOP."""
    if sys.platform != "linux" or not is_seen_from_here(process):
        return False
    state = process_state(process.pid)
    return state is not None and state[1] == process.started and state[0] in "Tt"


def kill(process: ProcessId) -> None:
    """Kills a process of this host, even if it is stopped."""
    # Checked right before the kill: the system may have given the ID to another process.
    if is_seen_from_here(process) and not has_ended(process):
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def end_with_parent(always: bool = False, number: signal.Signals = signal.SIGTERM) -> None:
    """Requests a signal from the system when the parent process dies.

    A torchrun killed by SIGKILL cannot end its workers. Does nothing without torchrun, unless
    `always` is True, and on systems other than Linux. Linux means the thread that has started this
    process: the signal also comes when that thread ends.
    """
    if sys.platform == "linux" and (always or "TORCHELASTIC_RUN_ID" in os.environ):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)
