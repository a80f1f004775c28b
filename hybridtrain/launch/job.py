"""The processes of a run: their ids on this host, and what they tell one another in their store.

That a process is alive, stopped or gone is read from the system by its id (`has_ended`). In the
store they say who they are, what they are doing, and which failure was the first (`Job`).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from hybridtrain.launch.activity import wait_until

if TYPE_CHECKING:
    from hybridtrain._base.torch_private import Store


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
    if not is_seen_from_here(process):
        return False
    if sys.platform != "linux":  # where another process may have got the id since
        try:
            os.kill(process.pid, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
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


EXIT_STALLED = 4
"""The exit code of a run that the watchdog has ended."""


@dataclass(frozen=True)
class Failure:
    """The failure that ends a run.

    Attributes:
        rank: the process that reports it.
        line: the failure in one line, for the launcher's report.
        exit_code: that of the process that reports it.
        time: of the report, in seconds of the clock.
        unresponsive: processes that must be killed, since they do not answer.
    """

    rank: int
    line: str
    exit_code: int = 1
    time: float = field(default_factory=time.time)
    unresponsive: tuple[ProcessId, ...] = ()


@dataclass(frozen=True)
class Report:
    """The last words of a process about itself.

    Attributes:
        what: what it is doing, in words.
        blame: 0: it waits for other processes; 1: it may do so; 2: it is busy itself.
        progress: how many steps have begun.
    """

    what: str
    blame: int
    progress: int = 0


class Job:
    """The facts that the processes of a run share; without a `store`, those of a single process.

    Every call may wait for the store, and so may another thread that uses the same store: each
    thread has a `Job` by `clone`.

    Raises:
        RuntimeError: from every method, if the store is not there any more.
    """

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        if store is None:
            from hybridtrain._base.torch_private import HashStore  # which imports torch

            store = HashStore()
        self._store = store

    def clone(self) -> Job:
        """Returns the same job with a connection that waits for nobody else's requests."""
        return Job(self._store.clone() if self.size > 1 else None, self.rank, self.size)

    def enter(self) -> list[ProcessId]:
        """Says who this process is; returns all, in the order of the ranks, once they are there."""
        self._store.set(f"process/{self.rank}", json.dumps(this_process()))
        keys = [f"process/{rank}" for rank in range(self.size)]
        return [ProcessId(*json.loads(self._store.get(key))) for key in keys]

    def say_place(self, place: str) -> None:
        """Says which part of the model this process has, as `stage 1`."""
        self._store.set(f"place/{self.rank}", place)

    def place(self, rank: int) -> str:
        """Returns what that process has said of its part; "" if it has the whole model."""
        return self._known(f"place/{rank}") or ""

    def leave(self) -> None:
        """Says that this process ends as it should."""
        self._store.set(f"left/{self.rank}", "")

    def end_together(self, seconds: float) -> None:
        """Returns in rank 0, which may have the store, when all others have called this.

        Or after so many seconds. PyTorch prints its stacks where a store goes away under a process.
        """
        self._store.set(f"ended/{self.rank}", "")
        if self.rank == 0:
            self._wait_for_all("ended", seconds)

    def say_heard(self) -> None:
        """Says that this process has heard of the failure that ends the run."""
        self._store.set(f"heard/{self.rank}", "")

    def wait_until_heard(self, seconds: float) -> None:
        """Returns when all other processes have called `say_heard`, or after so many seconds."""
        self.say_heard()
        self._wait_for_all("heard", seconds)

    def _wait_for_all(self, word: str, seconds: float) -> None:
        keys = [f"{word}/{rank}" for rank in range(self.size)]
        wait_until(lambda: self._store.check(keys), seconds)

    def has_left(self, rank: int) -> bool:
        """Returns whether that process has ended as it should."""
        return self._store.check([f"left/{rank}"])

    def beat(self, count: int) -> None:
        """Says that this process lives; `count` differs from the last time."""
        self._store.set(f"alive/{self.rank}", str(count))

    def beats(self, rank: int) -> int:
        """Returns the last `count` of that process; 0 before the first."""
        return int(self._known(f"alive/{rank}") or 0)

    def claim(self, failure: Failure) -> Failure:
        """Makes `failure` the one that ends the run, unless there is one; returns that one."""
        return _failure(self._store.compare_set("failure", "", json.dumps(asdict(failure))))

    def failure(self) -> Failure | None:
        """Returns the failure that ends the run, if there is one."""
        known = self._known("failure")
        return None if known is None else _failure(known)

    def ask_for_stacks(self, folder: str) -> bool:
        """Asks all processes for their stacks; returns whether this process is the first to ask.

        `folder` is for those without a run directory.
        """
        own = f"{self.rank} {folder}"
        return self._store.compare_set("stacks", "", own) == own.encode()

    def stacks_asked_for(self) -> str | None:
        """Returns the folder that a process has asked for all stacks in, if one has."""
        asked = self._known("stacks")
        return None if asked is None else asked.partition(" ")[2]

    def say_stop(self, work: str, reason: str) -> None:
        """Says that this process wants all to leave a work."""
        self._store.set(work, reason)

    def stop_said(self, work: str) -> str | None:
        """Returns why a process wants all to leave a work, if one does."""
        return self._known(work)

    def say(self, key: str, report: Report) -> None:
        """Publishes what this process is doing under `key`."""
        self._store.set(f"{key}/{self.rank}", json.dumps(asdict(report)))

    def said(self, key: str, ranks: Sequence[int]) -> dict[int, Report]:
        """Returns what the processes have published under `key`."""
        known = {rank: self._known(f"{key}/{rank}") for rank in ranks}
        return {rank: Report(**json.loads(text)) for rank, text in known.items() if text}

    def _known(self, key: str) -> str | None:
        """Returns the value of a key of the store; None: there is none, and nobody waits for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None


def _failure(text: str | bytes) -> Failure:
    values = json.loads(text)
    unresponsive = tuple(ProcessId(*process) for process in values.pop("unresponsive"))
    return Failure(**values, unresponsive=unresponsive)
