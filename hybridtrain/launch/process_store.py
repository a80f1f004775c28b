"""The store through which the processes of a run exchange facts.

Each process publishes its ID, its part of the model, signs of life and its current work here. The
first failure of the run is also recorded here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hybridtrain.launch.activity import wait_until
from hybridtrain.launch.process_id import ProcessId, this_process

if TYPE_CHECKING:
    from hybridtrain._base.torch_private import Store


EXIT_STALLED = 4
"""The exit code of a run that the watchdog ended."""


@dataclass(frozen=True)
class Failure:
    """The failure that ends a run.

    Attributes:
        rank: the rank of the process that reports it.
        line: the failure in one line, for the launcher's report.
        exit_code: the exit code of the process that reports it.
        time: the time of the report, in seconds since the epoch.
        unresponsive: processes that do not answer and must be killed.
    """

    rank: int
    line: str
    exit_code: int = 1
    time: float = field(default_factory=time.time)
    unresponsive: tuple[ProcessId, ...] = ()


@dataclass(frozen=True)
class Report:
    """A process's report about its current work.

    Attributes:
        what: the current work, as text.
        blame: 0 if it waits for other processes, 1 if it may wait for them, 2 if it is in a
            collective call of the user's own, 3 if it is busy.
        progress: the number of steps begun.
        idle_s: seconds since it last moved.
    """

    what: str
    blame: int
    progress: int = 0
    idle_s: float = 0.0


@dataclass(frozen=True)
class Sign:
    """A process's sign of life.

    Attributes:
        count: differs from that of the sign before.
        overdue_s: seconds without progress beyond the limit of its current work; negative before
            the limit, `-inf` without one.
    """

    count: int
    overdue_s: float


class ProcessStore:
    """The facts that the processes of a run share.

    A call may block while the store is busy with another thread's request on the same connection,
    so each thread needs its own `clone`.

    Args:
        store: the store of the processes; None for a single process.
        rank: the rank of this process.
        size: the number of processes.

    Raises:
        RuntimeError: from every method, if the store is gone.
    """

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        if store is None:
            from hybridtrain._base.torch_private import HashStore  # imports torch

            store = HashStore()
        self._store = store
        self._places: dict[int, str] = {}  # this process's own, also known to its clones

    def clone(self) -> ProcessStore:
        """Returns a `ProcessStore` with a separate connection, for another thread."""
        # A single process has nobody to exchange facts with: its clone begins with an empty store.
        store = self._store.clone() if self.size > 1 else None
        clone = ProcessStore(store, self.rank, self.size)
        clone._places = self._places
        return clone

    def enter(self) -> list[ProcessId]:
        """Publishes this process's id, waits for all processes, and returns their ids by rank."""
        self.beat(0, -math.inf)  # before the other key, so that `signs` never waits
        self._store.set(f"process/{self.rank}", json.dumps(this_process()))
        keys = [f"process/{rank}" for rank in range(self.size)]
        return [ProcessId(*json.loads(self._store.get(key))) for key in keys]

    def set_place(self, place: str) -> None:
        """Publishes the part of the model that this process has, such as `stage 1`."""
        self._places[self.rank] = place
        self._store.set(f"place/{self.rank}", place)

    def place(self, rank: int) -> str:
        """Returns the part of the model that a process has; "" if it has the whole model.

        For this process itself it makes no request.
        """
        if rank == self.rank:
            return self._places.get(rank, "")
        return self._value(f"place/{rank}") or ""

    def leave(self) -> None:
        """Publishes that this process ends normally."""
        # Before this process ends: whoever sees that it has ended, and then no `left`, knows that
        # it died.
        self._store.set(f"left/{self.rank}", "")
        self.acknowledge_failure()  # it has no need to know of one

    def end_together(self, seconds: float) -> None:
        """Waits, in rank 0, until all processes have called this, at most `seconds`.

        Rank 0 may host the store, and PyTorch prints stacks in a process that loses its store.
        """
        self._store.set(f"ended/{self.rank}", "")
        if self.rank == 0:
            keys = [f"ended/{rank}" for rank in range(self.size)]
            wait_until(lambda: self._store.check(keys), seconds)

    def acknowledge_failure(self) -> None:
        """Publishes that this process knows of the failure that ends the run."""
        self._store.set(f"heard/{self.rank}", "")

    def have_acknowledged(self, ranks: Sequence[int]) -> bool:
        """Returns whether these processes have called `acknowledge_failure`, or have left."""
        return not ranks or self._store.check([f"heard/{rank}" for rank in ranks])

    def has_left(self, rank: int) -> bool:
        """Returns whether a process has ended normally."""
        return self._store.check([f"left/{rank}"])

    def beat(self, count: int, overdue_s: float) -> None:
        """Publishes a sign of life, see `Sign`."""
        self._store.set(f"alive/{self.rank}", f"{count} {overdue_s:.2f}")

    def signs(self, ranks: Sequence[int]) -> list[Sign]:
        """Returns the last signs of life of these processes, in one request."""
        # One request, since a process makes it every two seconds for all ranks.
        texts = self._store.multi_get([f"alive/{rank}" for rank in ranks]) if ranks else []
        values = [text.decode().split() for text in texts]
        return [Sign(int(count), float(overdue)) for count, overdue in values]

    def claim(self, failure: Failure) -> Failure:
        """Records `failure` as the end of the run unless there is one; returns the recorded one."""
        # With an empty expected value the store sets only a key that is absent, and returns the
        # value that it then has: of all processes, exactly one wins.
        return _failure(self._store.compare_set("failure", "", json.dumps(asdict(failure))))

    def failure(self) -> Failure | None:
        """Returns the failure that ends the run; None if there is none."""
        text = self._value("failure")
        return None if text is None else _failure(text)

    def request_stacks(self, folder: str) -> bool:
        """Requests the stacks of all processes; returns whether this process is the first to ask.

        Args:
            folder: the folder in which processes without a run directory write their stacks.
        """
        request = f"{self.rank} {folder}"
        return self._store.compare_set("stacks", "", request) == request.encode()

    def requested_stacks(self) -> str | None:
        """Returns the folder of a request for stacks; None if no process has requested them."""
        request = self._value("stacks")
        return None if request is None else request.partition(" ")[2]

    def request_stop(self, work: str, reason: str) -> None:
        """Publishes that this process wants all processes to stop this work."""
        self._store.set(work, reason)

    def stop_reason(self, work: str) -> str | None:
        """Returns why a process wants all processes to stop this work; None if none does."""
        return self._value(work)

    def publish(self, key: str, text: str) -> None:
        """Publishes a text of this process under `key`."""
        self._store.set(f"{key}/{self.rank}", text)

    def publish_first(self, key: str, text: str) -> str:
        """Publishes a text under `key` unless a process has done so; returns the first one's."""
        return self._store.compare_set(key, "", text).decode()

    def published(self, key: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Returns the texts that these processes, or all, have published under `key`, by rank."""
        ranks = range(self.size) if ranks is None else ranks
        texts = {rank: self._value(f"{key}/{rank}") for rank in ranks}
        return {rank: text for rank, text in texts.items() if text}

    def publish_report(self, key: str, report: Report) -> None:
        """Publishes this process's report under `key`."""
        self.publish(key, json.dumps(asdict(report)))

    def reports(self, key: str, ranks: Sequence[int]) -> dict[int, Report]:
        """Returns the reports that the processes have published under `key`, by rank."""
        texts = self.published(key, ranks)
        return {rank: Report(**json.loads(text)) for rank, text in texts.items()}

    def _value(self, key: str) -> str | None:
        """Returns the value of a key, or None without waiting if the key is not set."""
        # No key is ever deleted, so a key that was there is there, and `get` does not wait.
        return self._store.get(key).decode() if self._store.check([key]) else None


def _failure(text: str | bytes) -> Failure:
    values = json.loads(text)
    unresponsive = tuple(ProcessId(*process) for process in values.pop("unresponsive"))
    # Equal to the failure that was published, also its time: JSON keeps all digits of a float.
    # Callers compare it with their own to learn who was first.
    return Failure(**values, unresponsive=unresponsive)
