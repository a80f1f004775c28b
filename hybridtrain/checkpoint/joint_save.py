"""A checkpoint that all processes write together, or read together.

`JointSave` is the writing, each its own files into one directory:

    rank 0          makes .tmp-100-<uuid>                --- its name --->  all
    each process    writes its files there, hashed and synced to the disk
                                              --- size and hash of each, or an error --->  rank 0
    rank 0          manifest, rename                     --- path, or an error --->  all

So every process knows the same outcome, and raises the same. Only where rank 0 itself ends on the
way have the others nothing but the error of their connection: its checkpoint may be published or
not. The messages have their own process group: in the background this runs in a thread while
training communicates in other groups. They go from process to process, not as a collective
operation, so that the end of one process is an error in rank 0 at once, and rank 0 can still tell
the others.

`Source` is the reading. The nodes of a run may share files or not. If all processes see the same
ones (`same_files`), each reads what it needs of them, memory-mapped. Otherwise rank 0 alone reads,
and sends one tensor at a time. Neither way does a process hold more of the model and the optimizer
than its own part, and one tensor.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from hybridtrain._base.files import make_directory
from hybridtrain._base.problem import Problem, first_problem
from hybridtrain.checkpoint.directory import TEMPORARY
from hybridtrain.checkpoint.manifest import FileWriter
from hybridtrain.checkpoint.store import CheckpointStore, NoSpaceError
from hybridtrain.checkpoint.tensor_files import broadcast_tree
from hybridtrain.errors import CheckpointError
from hybridtrain.world import World

T = TypeVar("T")
_Entries = dict[str, dict[str, Any]]


def worst(problems: list[Problem]) -> Problem | None:
    """Returns the problem that decides, the first rank's; a full disk only if there is no other.

    A run may go on after a full disk, but not after anything else.
    """
    others = [problem for problem in problems if problem.kind is not NoSpaceError]
    return first_problem(others or problems)


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
        self, store: CheckpointStore, step: int, files: Mapping[str, FileWriter], prune: bool
    ) -> Path:
        """Publishes the checkpoint of `step` with the files of all processes; all call it.

        Args:
            store: of this process; all have the same directory.
            step: the optimizer steps done.
            files: of this process; no two processes have one of the same name.
            prune: see `CheckpointStore.save`.

        Returns:
            its directory.

        Raises:
            Exception: a process has failed; the error of that one, or of the first of several. On
                the others it is of the same kind, with the rank in its message.
        """
        try:
            if self._rank == 0:
                name, problem = self._on_rank_0(store, step, files, prune)
            else:
                name, problem = self._on_another(store, step, files)
            if problem is not None:
                own = self._failure if problem.rank == self._rank else None
                raise own or problem.error()
            return store.root / name
        finally:
            self._failure = None  # its traceback holds the caller's frames, and with them the model

    def _on_rank_0(
        self, store: CheckpointStore, step: int, files: Mapping[str, FileWriter], prune: bool
    ) -> tuple[str, Problem | None]:
        # Each of the others receives, sends and receives again, once, whatever happens: so rank 0
        # sends, receives and sends also after a failure; what cannot be sent to a process that is
        # gone is ignored.
        temporary, problems = self._attempt(lambda: store.begin(step))
        problems += self._tell(None if temporary is None else temporary.name)
        path = None
        try:
            entries: _Entries = {}
            if temporary is not None:
                written, failed = self._attempt(lambda: store.write(step, temporary, files))
                entries |= written or {}
                problems += failed
            problems += self._collect(entries, {problem.rank for problem in problems})
            if temporary is not None and not problems:
                path, problems = self._attempt(
                    lambda: store.publish(step, temporary, entries, prune)
                )
        finally:
            # not published; removed before the others are told, since they may end the run then
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
        dist.send_object_list([(entries or {}, worst(problems))], group=self._group, group_dst=0)
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

    def _collect(self, entries: _Entries, lost: Container[int]) -> list[Problem]:
        """Adds the `entries` of the processes that are not `lost`; returns their problems."""
        problems = []
        for rank in self._others:
            if rank in lost:
                continue
            try:
                own, problem = self._receive(rank)
            except RuntimeError as error:  # its connection broke
                own, problem = {}, Problem.of(rank, error)
            entries |= own
            if problem is not None:
                problems.append(problem)
        return problems


# How long a file of another node may take to appear: NFS asks again after a few seconds.
_APPEARS_S = 5.0
_PIECES, _PIECE_BYTES = 16, 64 << 10


def hosts_without(root: Path, world: World) -> list[str]:
    """Returns the ranks and hosts that do not see the directory `root` of rank 0.

    A collective call; it makes the directory, and removes a file in it.

    Args:
        root: the directory, by the path that each process has.
        world: the processes.

    Raises:
        CheckpointError: rank 0 cannot make the directory or write to it; on every process.
    """
    if world.size == 1:
        return []

    def make() -> str:
        token = root / f"{TEMPORARY}seen-{uuid4().hex}"
        try:
            make_directory(root)
            token.touch()
        except OSError as error:
            raise CheckpointError(f"cannot write to {root}: {error}") from error
        return token.name

    name = world.broadcast(world.on_main(make))
    assert name is not None
    deadline = time.monotonic() + _APPEARS_S
    # False, not an error, where a process may not look
    while not (seen := os.path.exists(root / name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyones = world.gather((seen, socket.gethostname()))
    if world.is_main:
        (root / name).unlink(missing_ok=True)
    return [f"rank {rank} on {host}" for rank, (seen, host) in enumerate(everyones) if not seen]


def same_files(world: World, paths: Sequence[Path]) -> bool:
    """Returns whether all processes see the same files under rank 0's `paths`; a collective call.

    Files are the same that have the same size and the same bytes in 16 places.
    """
    if world.size == 1:
        return True
    expected = world.broadcast([(path, fingerprint(path)) for path in paths])
    own = all(found is not None and fingerprint(path) == found for path, found in expected)
    return all(world.gather(own))


def fingerprint(path: Path) -> tuple[int, int] | None:
    """Returns the size of a file and a checksum of some of its bytes; None if it is not there."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            crc32 = 0
            step = max(_PIECE_BYTES, (size - _PIECE_BYTES) // (_PIECES - 1))
            for place in range(0, size, step):
                file.seek(place)
                crc32 = zlib.crc32(file.read(_PIECE_BYTES), crc32)
            return size, crc32
    except OSError:
        return None


class Source:
    """The files of a state; all calls are collective ones.

    Args:
        world: the processes.
        shared: each of them reads the files; False: rank 0 sends what it reads.
    """

    def __init__(self, world: World, shared: bool) -> None:
        self.world = world
        self.shared = shared or world.size == 1

    def read(self, action: Callable[[], T]) -> T | None:
        """Returns what `action` opens: on every process, or on rank 0 alone.

        Raises:
            Exception: that of rank 0, or of the first process that fails, on every process.
        """
        if not self.shared:
            return self.world.on_main(action)
        # rank 0 first: what is wrong with the files is said once
        own = self.world.on_main(action)
        return self.world.on_all(lambda: action() if own is None else own)

    def tree(
        self, tree: Any, move: Callable[[KeyPath, Tensor], Tensor] = lambda _, value: value
    ) -> Any:
        """Returns a tree that `read` gave, on every process, with copies of its tensors `move`d."""
        if not self.shared:
            return broadcast_tree(self.world, tree, move)

        def own(path: KeyPath, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            moved = move(path, value)
            # not the memory of the file
            return moved.clone() if moved is value else moved

        return tree_map_with_path(own, tree)

    def sent(
        self, given: Mapping[str, Tensor], state: Mapping[str, Any], left_out: Container[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what rank 0 sends, where it alone reads, of the tensors that this process has.

        Args:
            given: what `read` gave, by name; some may be missing.
            state: of the model, the same names on every process.
            left_out: names that are not wanted.
        """
        if self.shared:
            return
        names = self.world.broadcast(set(given))
        for name, tensor in state.items():
            if name in left_out or name not in names:
                continue
            if self.world.is_main:
                value = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(given[name])
            elif tensor.is_meta:  # of another stage
                value = torch.empty(tensor.shape, dtype=tensor.dtype)
            else:
                value = tensor.cpu().contiguous()  # no copy of a contiguous CPU tensor
            self.world.broadcast_tensor(value)
            if not self.world.is_main and not tensor.is_meta:
                yield name, value
