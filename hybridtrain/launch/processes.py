"""Processes by their ids: alive, stopped or gone. Linux only; elsewhere all count as alive."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process.

    Attributes:
        host: the host's name.
        pid: its id.
        started: when it started, since ids are used again.
        namespace: of process ids: a container's processes are not seen from another one.
    """

    host: str
    pid: int
    started: str
    namespace: str = ""


def process_state(pid: int) -> tuple[str, str] | None:
    """Returns the state letter of a process and when it started; None if there is no such one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


def this_process() -> ProcessId:
    """Returns the id of this process."""
    state = process_state(os.getpid())
    return ProcessId(
        os.uname().nodename, os.getpid(), state[1] if state else "", process_namespace()
    )


def process_namespace() -> str:
    """Returns the namespace that this process's ids are of; "" where it cannot be read.

    Two containers can share a host's name, and have different processes of the same id.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_seen_from_here(process: ProcessId) -> bool:
    """Returns whether a process is of this host and of this container, so that its id counts."""
    return process.host == os.uname().nodename and process.namespace == process_namespace()


def has_ended(process: ProcessId) -> bool:
    """Returns whether a process of this host has ended; False of one that is not seen from here."""
    if sys.platform != "linux" or not is_seen_from_here(process):
        return False
    state = process_state(process.pid)
    return state is None or state[1] != process.started or state[0] in "ZX"


def is_stopped(process: ProcessId) -> bool:
    """Returns whether a process of this host is stopped, as by SIGSTOP."""
    if sys.platform != "linux" or not is_seen_from_here(process):
        return False
    state = process_state(process.pid)
    return state is not None and state[1] == process.started and state[0] in "Tt"


def kill(process: ProcessId) -> None:
    """Ends a process of this host at once, also one that is stopped."""
    if is_seen_from_here(process) and not has_ended(process):
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def end_with_parent(always: bool = False) -> None:
    """Asks the system for a SIGTERM when the process that started this one dies.

    torchrun cannot end its workers when it is killed by SIGKILL. Does nothing without torchrun,
    unless `always`, and where the system cannot do it.
    """
    if sys.platform == "linux" and (always or "TORCHELASTIC_RUN_ID" in os.environ):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
