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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridtrain.checkpoint.manifest import Writer
from hybridtrain.checkpoint.save_errors import Problem, worst

if TYPE_CHECKING:
    from hybridtrain.checkpoint.store import CheckpointStore

_Entries = dict[str, dict[str, Any]]


class JointSave:
    """The processes of a run that save together; one save at a time.

    Args:
        group: a gloo group of all processes that nothing else uses at the same time.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._others = range(1, dist.get_world_size(group))

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
        save = self._on_rank_0 if self._rank == 0 else self._on_another
        return save(store, step, writers, prune)

    def _on_rank_0(
        self, store: CheckpointStore, step: int, writers: Mapping[str, Writer], prune: bool
    ) -> Path:
        temporary: Path | None = None
        failure: BaseException | None = None
        files: _Entries = {}
        try:
            temporary = store.begin(step)
        except BaseException as error:
            failure = error
        lost = self._tell(temporary and temporary.name)
        try:
            if temporary is not None:
                try:
                    files |= store.write(step, temporary, writers)
                except BaseException as error:
                    failure = error
            problems = [*lost, *self._collect(files, lost)]
            if failure is not None:
                problems.append(Problem.of(0, failure))
            path = None
            if temporary is not None and not problems:
                try:
                    path = store.publish(step, temporary, files, prune)
                except BaseException as error:
                    failure = error
                    problems.append(Problem.of(0, error))
        finally:
            if temporary is not None and temporary.is_dir():  # not published
                shutil.rmtree(temporary, ignore_errors=True)
        problem = worst(problems)
        self._tell((path and path.name, problem))
        try:
            return _outcome(path, problem, 0, failure)
        finally:
            del failure  # its traceback would hold the caller's frames, and with them the model

    def _on_another(
        self, store: CheckpointStore, step: int, writers: Mapping[str, Writer], prune: bool
    ) -> Path:
        del prune  # rank 0 does it
        failure: BaseException | None = None
        files: _Entries = {}
        if (name := self._listen()) is not None:
            try:
                files = store.write(step, store.root / name, writers)
            except BaseException as error:
                failure = error
        own = None if failure is None else Problem.of(self._rank, failure)
        dist.send_object_list([(files, own)], group=self._group, group_dst=0)
        published, problem = self._listen()
        path = None if published is None else store.root / published
        try:
            return _outcome(path, problem, self._rank, failure)
        finally:
            del failure

    def _tell(self, value: object) -> list[Problem]:
        """Sends rank 0's `value` to all others; returns the problems of those that are gone."""
        lost = []
        for rank in self._others:
            try:
                dist.send_object_list([value], group=self._group, group_dst=rank)
            except RuntimeError as error:
                lost.append(Problem.of(rank, error))
        return lost

    def _listen(self) -> Any:
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self._group, group_src=0)
        return received[0]

    def _collect(self, files: _Entries, lost: list[Problem]) -> list[Problem]:
        """Adds the other processes' `files`; returns their problems."""
        problems = []
        for rank in sorted(set(self._others) - {problem.rank for problem in lost}):
            received: list[Any] = [None]
            try:
                dist.recv_object_list(received, group=self._group, group_src=rank)
            except RuntimeError as error:  # its connection broke
                problems.append(Problem.of(rank, error))
                continue
            entries, problem = received[0]
            files |= entries
            if problem is not None:
                problems.append(problem)
        return problems


def _outcome(
    path: Path | None, problem: Problem | None, rank: int, failure: BaseException | None
) -> Path:
    """Returns `path`, or raises what has decided; this process's own error as it was raised."""
    try:
        if problem is not None:
            raise failure if failure is not None and problem.rank == rank else problem.error()
        if failure is not None:
            raise failure
    finally:
        del failure
    assert path is not None
    return path
