"""A checkpoint that all processes write together, each its own files into one directory.

    rank 0          makes .tmp-100-<uuid>                --- its name --->  all
    each process    writes its files there, hashed and synced to the disk
                                              --- size and hash of each, or an error --->  rank 0
    rank 0          manifest, rename                     --- path, or an error --->  all

So every process knows the same outcome, and raises the same. The messages have a process group of
their own: in the background this runs in a thread while training communicates in other groups. They
go from process to process, not as a collective operation, so that the end of one process is an
error in rank 0 at once, and rank 0 can still tell the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hybridtrain.checkpoint.manifest import Writer
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError
from hybridtrain.errors import CheckpointError, UserError
from hybridtrain.world import World

T = TypeVar("T")
_Entries = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """An exception of one process, as the others are told of it."""

    rank: int
    kind: str
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Problem:
        """Returns the problem that `error` on `rank` is."""
        if isinstance(error, NoSpaceError):
            return cls(rank, "space", str(error))
        if isinstance(error, UserError):
            return cls(rank, "user", str(error))
        return cls(rank, "other", f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        """Returns the exception for a process that it did not happen in."""
        if self.kind == "space":
            return NoSpaceError(f"rank {self.rank}: {self.message}")
        if self.kind == "user":
            return CheckpointError(f"rank {self.rank}: {self.message}")
        return RuntimeError(f"rank {self.rank} failed: {self.message}")


def worst(problems: list[Problem]) -> Problem | None:
    """Returns the problem that decides: a full disk only if that is all there is."""
    return min(problems, key=lambda each: (each.kind == "space", each.rank), default=None)


def on_each(world: World, action: Callable[[], T]) -> T:
    """Returns what `action` returns, on every process; a collective call.

    Raises:
        Exception: that of the first process in which it fails; on the others one of its kind.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    own = None if failure is None else Problem.of(world.rank, failure)
    problem = worst([each for each in world.gather(own) if each is not None])
    try:
        if problem is not None:
            if failure is not None and problem.rank == world.rank:
                raise failure
            raise problem.error()
    finally:
        del failure  # its traceback holds the caller's frames
    return result


class JointSave:
    """The processes of a run that save together; one save at a time.

    Args:
        group: a gloo group of all processes that nothing else uses at the same time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._others = range(1, dist.get_world_size(group))
        self._failure: BaseException | None = None  # of this process

    def run(
        self, store: CheckpointStore, step: int, writers: Mapping[str, Writer], prune: bool
    ) -> Path:
        """Publishes the checkpoint of `step` with the files of all processes; all call it.

        Args:
            store: of this process; all have the same directory.
            step: the optimizer steps done.
            writers: this process's files; no two processes have one of the same name.
            prune: see `CheckpointStore.save`.

        Returns:
            its directory.

        Raises:
            Exception: a process has failed; the error of that one, or of the first of several. On
                the others it is of the same kind, with the rank in its message.
        """
        try:
            if self._rank == 0:
                name, problem = self._on_rank_0(store, step, writers, prune)
            else:
                name, problem = self._on_another(store, step, writers)
            if problem is not None:
                own = self._failure if problem.rank == self._rank else None
                raise own or problem.error()
            return store.root / name
        finally:
            self._failure = None  # its traceback holds the caller's frames, and with them the model

    def _on_rank_0(
        self, store: CheckpointStore, step: int, writers: Mapping[str, Writer], prune: bool
    ) -> tuple[str, Problem | None]:
        temporary, problems = self._attempt(lambda: store.begin(step))
        problems += self._tell(temporary and temporary.name)
        path = None
        try:
            files: _Entries = {}
            if temporary is not None:
                written, failed = self._attempt(lambda: store.write(step, temporary, writers))
                files |= written or {}
                problems += failed
            problems += self._collect(files, {problem.rank for problem in problems})
            if temporary is not None and not problems:
                path, problems = self._attempt(lambda: store.publish(step, temporary, files, prune))
        finally:
            if temporary is not None and temporary.is_dir():  # not published
                shutil.rmtree(temporary, ignore_errors=True)
        outcome = path.name if path else "", worst(problems)
        self._tell(outcome)
        return outcome

    def _on_another(
        self, store: CheckpointStore, step: int, writers: Mapping[str, Writer]
    ) -> tuple[str, Problem | None]:
        files: _Entries | None = None
        problems: list[Problem] = []
        if (name := self._receive(0)) is not None:
            files, problems = self._attempt(lambda: store.write(step, store.root / name, writers))
        dist.send_object_list([(files or {}, worst(problems))], group=self._group, group_dst=0)
        outcome: tuple[str, Problem | None] = self._receive(0)
        return outcome

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, list[Problem]]:
        """Returns what `action` returns, or the problem that it has had."""
        try:
            return action(), []
        except BaseException as error:
            self._failure = error
            return None, [Problem.of(self._rank, error)]

    def _tell(self, value: object) -> list[Problem]:
        """Sends rank 0's `value` to all others; returns the problems of those that are gone."""
        lost = []
        for rank in self._others:
            try:
                dist.send_object_list([value], group=self._group, group_dst=rank)
            except RuntimeError as error:
                lost.append(Problem.of(rank, error))
        return lost

    def _receive(self, rank: int) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self._group, group_src=rank)
        return received[0]

    def _collect(self, files: _Entries, lost: Container[int]) -> list[Problem]:
        """Adds the `files` of the processes that are not `lost`; returns their problems."""
        problems = []
        for rank in self._others:
            if rank in lost:
                continue
            try:
                entries, problem = self._receive(rank)
            except RuntimeError as error:  # its connection broke
                entries, problem = {}, Problem.of(rank, error)
            files |= entries
            if problem is not None:
                problems.append(problem)
        return problems
