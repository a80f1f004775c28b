"""A checkpoint written by all processes together, each with its own files in one directory.

    rank 0          makes .tmp-100-<uuid>                --- its name --->  all
    each process    writes its files there, hashed and synced to the disk
                                              --- size and hash of each, or an error --->  rank 0
    rank 0          manifest, rename                     --- path, or an error --->  all

So every process sees the same outcome and raises the same error. One exception: if rank 0 itself
dies during the save, the others only see their connection fail, and the checkpoint may or may not
be published. The messages use their own process group, because a background save runs in a thread
while training communicates in other groups. They are point-to-point, not collective, so that rank 0
sees the death of another process at once and can still notify the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hybridtrain._base import objects
from hybridtrain._base.problem import Problem, first_problem
from hybridtrain.checkpoint.manifest import FileWriter, check_file_name
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError

T = TypeVar("T")
_Entries = dict[str, dict[str, Any]]


def worst(problems: list[Problem]) -> Problem | None:
    """Returns the problem to report, the lowest rank's; a full disk only if there is no other.

    A run may continue after a full disk, but not after any other problem.
    """
    others = [problem for problem in problems if problem.kind is not NoSpaceError]
    return first_problem(others or problems)


class JointSave:
    """The processes of a run that save together; one save at a time.

    Args:
        group: a gloo group of all processes, used only for saves.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._others = range(1, dist.get_world_size(group))
        self._failure: BaseException | None = None  # in this process

    def save(
        self,
        store: CheckpointStore,
        step: int,
        files: Mapping[str, FileWriter],
        *,
        prune: bool = True,
        background: bool | None = None,
    ) -> Path:
        """Publishes the checkpoint of `step` with the files of all processes; a collective call.

        Args:
            store: this process's store; all stores have the same directory.
            step: the number of completed optimizer steps.
            files: this process's files; names must be unique over all processes.
            prune: see `CheckpointStore.save`.
            background: see `CheckpointStore.save`.

        Returns:
            the checkpoint's directory.

        Raises:
            Exception: a process failed. The lowest failing rank raises its own error; the others
                raise one of the same type, with that rank in the message.
        """
        for name in files:
            check_file_name(name)
        # In each process's own thread for background saves: all messages are in the group of saves.
        return store.run(step, lambda: self._publish(store, step, files, prune), background)

    def _publish(
        self, store: CheckpointStore, step: int, files: Mapping[str, FileWriter], prune: bool
    ) -> Path:
        try:
            if self._rank == 0:
                name, problem = self._on_rank_0(store, step, files, prune)
            else:
                name, problem = self._on_another(store, step, files)
            if problem is not None:
                # Its own error with its traceback, where it happened.
                failure = self._failure if problem.rank == self._rank else None
                raise failure or problem.error()
            return store.root / name
        finally:
            self._failure = None  # its traceback keeps the caller's frames, and the model, alive

    def _on_rank_0(
        self, store: CheckpointStore, step: int, files: Mapping[str, FileWriter], prune: bool
    ) -> tuple[str, Problem | None]:
        # Every other process receives, sends and receives again, exactly once. So rank 0 sends,
        # receives and sends even after a failure, and ignores processes that it cannot reach.
        temporary, problems = self._attempt(lambda: store.begin(step))
        # None tells the others to write nothing, but to answer all the same.
        problems += self._tell(None if temporary is None else temporary.name)
        path = None
        try:
            entries: _Entries = {}
            if temporary is not None:
                written, failed = self._attempt(lambda: store.write(step, temporary, files))
                entries |= written or {}
                problems += failed
            # One that could not be told anything waits in its receive, and sends nothing.
            problems += self._collect(entries, {problem.rank for problem in problems})
            # After every process has synced its files: the manifest vouches for all of them.
            if temporary is not None and not problems:
                path, problems = self._attempt(
                    lambda: store.publish(step, temporary, entries, prune)
                )
        finally:
            # remove it before notifying the others, which may end the run then
            if temporary is not None and temporary.is_dir():
                shutil.rmtree(temporary, ignore_errors=True)
        outcome = path.name if path else "", worst(problems)
        self._tell(outcome)
        return outcome

    def _on_another(
        self, store: CheckpointStore, step: int, files: Mapping[str, FileWriter]
    ) -> tuple[str, Problem | None]:
        entries: _Entries | None = None
        problems: list[Problem] = []
        if (name := self._receive(0)) is not None:
            entries, problems = self._attempt(lambda: store.write(step, store.root / name, files))
        # Also after a failure: rank 0 waits for exactly one answer of each process.
        objects.send((entries or {}, worst(problems)), self._group, 0)
        # Waits until rank 0 has heard from all.
        outcome: tuple[str, Problem | None] = self._receive(0)
        return outcome

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, list[Problem]]:
        """Returns the result of `action`, or the problem that it raised."""
        try:
            return action(), []
        # Also an interrupt: the others would otherwise wait for this process's message.
        except BaseException as error:
            self._failure = error
            return None, [Problem.of(self._rank, error)]

    def _tell(self, value: object) -> list[Problem]:
        """Sends rank 0's `value` to all others; returns a problem for each unreachable one."""
        lost = []
        for rank in self._others:
            try:
                objects.send(value, self._group, rank)
            except RuntimeError as error:
                lost.append(Problem.of(rank, error))
        return lost

    def _receive(self, rank: int) -> Any:
        return objects.receive(self._group, rank)

    def _collect(self, entries: _Entries, lost: Container[int]) -> list[Problem]:
        """Adds the `entries` of the processes that are not `lost`; returns their problems."""
        problems = []
        for rank in self._others:
            if rank in lost:
                continue
            try:
                received, problem = self._receive(rank)
            except RuntimeError as error:  # the connection broke
                received, problem = {}, Problem.of(rank, error)
            entries |= received
            if problem is not None:
                problems.append(problem)
        return problems
