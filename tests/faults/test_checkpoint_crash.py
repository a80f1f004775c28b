"""The checkpoint store under power cuts, killed processes and a full disk."""

import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.checkpoint_files import content_of, writers
from support.launch import environment

from hybridtrain.checkpoint import CheckpointStore, step_of, verify
from hybridtrain.checkpoint import manifest as manifest_module
from hybridtrain.errors import CheckpointError

# --- every crash point --------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class Power:
    """Counts the store's disk calls, crashes at the n-th, and can then lose unsynchronised data.

    In a power cut, a file written since its last fsync loses its second half, a directory the
    names it got since; the root's last renames are undone, as many as the caller says.
    """

    def __init__(self, root: Path, last: int) -> None:
        self.root = root
        self.calls = 0
        self.last = last
        self.synced = {path.stat().st_ino for path in root.rglob("*")}
        self.pending: list[tuple[str, str]] = []  # renames in the root since its last fsync
        self.replaced: dict[str, bytes] = {}  # the files that they replaced

    def tick(self) -> None:
        """Crashes from the n-th call on, before it reaches the disk."""
        self.calls += 1
        if self.calls > self.last:
            raise Crash

    def synchronised(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        self.synced.add(inode)
        if inode == self.root.stat().st_ino:
            self.pending.clear()

    def before_rename(self, source: Path, target: Path) -> None:
        if Path(target).is_file():
            self.replaced[str(target)] = Path(target).read_bytes()

    def renamed(self, source: Path, target: Path) -> None:
        self.pending.append((str(source), str(target)))

    def made(self, path: Path, *_: Any, **__: Any) -> None:
        # an inode number may have belonged to something removed
        self.synced.discard(path.stat().st_ino)

    def written(self, path: Path) -> None:
        self.synced -= {path.stat().st_ino, path.parent.stat().st_ino}

    def cut(self, undo: int) -> None:
        for source, target in reversed(self.pending[len(self.pending) - undo :]):
            os.rename(target, source)
            if target in self.replaced:
                Path(target).write_bytes(self.replaced[target])
        for file in self.root.glob("*.json"):
            if file.stat().st_ino not in self.synced and str(file) not in self.replaced:
                os.truncate(file, file.stat().st_size // 2)
        for directory in self.root.glob("step_*"):
            for file in directory.iterdir():
                if file.stat().st_ino not in self.synced:
                    os.truncate(file, file.stat().st_size // 2)
                if directory.stat().st_ino not in self.synced:
                    file.unlink()


@contextmanager
def power(root: Path, last: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    """Counts the disk calls inside, and crashes at the one after `last`."""
    line = Power(root, last)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def watch(
        name: str, seen: Callable[..., None] = nothing, before: Callable[..., None] = nothing
    ) -> Any:
        original = getattr(os, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            line.tick()
            before(*args, **kwargs)
            result = original(*args, **kwargs)
            seen(*args, **kwargs)
            return result

        return watched

    write = manifest_module.HashingFile.write

    def watched_write(self: Any, data: Any, /) -> int:
        line.tick()
        count = write(self, data)
        self._file.flush()  # what was written before the crash is in the file
        line.written(Path(self._file.name))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(manifest_module.HashingFile, "write", watched_write)
        patch.setattr(os, "fsync", watch("fsync", line.synchronised))
        patch.setattr(os, "rename", watch("rename", line.renamed, line.before_rename))
        patch.setattr(os, "mkdir", watch("mkdir", line.made))
        for name in ("unlink", "rmdir", "open"):
            patch.setattr(os, name, watch(name))
        yield line


def prepare(root: Path, steps: dict[int, str]) -> None:
    """Saves the checkpoints of before the crash."""
    root.mkdir()
    for step, content in steps.items():
        CheckpointStore(root).save(step, writers(content))


SITUATIONS = {
    # name: (on disk before, keep, the step saved)
    "first": ({}, None, 100),
    "next": ({100: "old.."}, None, 200),
    "again": ({100: "old.."}, None, 100),
    "again-among-others": ({50: "older", 100: "old.."}, 2, 100),
    "prune": ({50: "older", 100: "old.."}, 1, 200),
    "prune-many": ({10: "older", 50: "older", 100: "old.."}, 2, 200),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("event", ["killed", "power cut"])
@pytest.mark.quick_cases(2)
def test_a_crash_at_any_point_leaves_a_checkpoint_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str, event: str
) -> None:
    before, keep, step = SITUATIONS[situation]
    outcomes = set()
    last = 0
    while True:
        # killed: what was done stays; a power cut undoes 0, 1, 2 ... of the last renames
        undo = 0
        while True:
            root = tmp_path / f"{last}-{undo}"
            prepare(root, before)
            with power(root, last, monkeypatch) as line:
                try:
                    CheckpointStore(root, keep).save(step, writers("new.."))
                    finished = True
                except Crash:
                    finished = False
            pending = len(line.pending)
            if event == "power cut":
                line.cut(undo)

            found = CheckpointStore(root).newest()
            if found is None:
                assert not before
                assert not finished
            else:
                # the old one or the new one, also when both are of the same step
                content = content_of(found)
                assert step_of(found) >= max(before, default=0)
                assert content in {"new..", before.get(step_of(found))}
                assert content == "new.." or not finished
                outcomes.add(content)

            # the next run saves as usual, and cleans up
            path = CheckpointStore(root, keep=1).save(300, writers("after"))
            assert CheckpointStore(root).newest() == path
            assert list(root.iterdir()) == [path]
            shutil.rmtree(root)
            undo += 1
            if event == "killed" or undo > pending:
                break
        if finished:
            break
        last += 1
    assert last > 10, "there are more disk calls than this in one save"
    assert "new.." in outcomes
    assert not before or before[max(before)] in outcomes


def test_the_same_step_can_be_saved_again_after_a_crash_at_any_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished, last = False, 0
    while not finished:
        root = tmp_path / str(last)
        prepare(root, {100: "old.."})
        with power(root, last, monkeypatch):
            try:
                CheckpointStore(root).save(100, writers("new.."))
                finished = True
            except Crash:
                last += 1
        path = CheckpointStore(root).save(100, writers("again"))
        assert path.name == "step_00000100"
        assert content_of(path) == "again"
        assert list(root.iterdir()) == [path]


# --- real processes -----------------------------------------------------------------------------

SAVE_FOREVER = """
import sys
from pathlib import Path
from hybridtrain.checkpoint.store import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), keep=2)
step = max(store.steps(), default=0)
while True:
    # Every step twice, so that the kill also meets the moment of replacing one.
    for content in (b"first", b"again"):
        names = ("model.pt", "state.json")
        store.save(step, {name: lambda f: f.write(content * 40_000) for name in names})
    print(step, flush=True)
    step += 1
"""

FULL_DISK = """
import resource, sys
from pathlib import Path
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.errors import CheckpointError

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    {save}
except CheckpointError as error:
    print(error)
"""


@contextmanager
def python(folder: Path, source: str, root: Path) -> Iterator[tuple[BaseProcess, Path]]:
    """Runs `source` with `root` as its argument; gives the process and the file of its output."""
    script, output = folder / "script.py", folder / "output.txt"
    script.write_text(source)
    output.write_text("")
    process = forked.start(script, [str(root)], environment(), output)
    try:
        yield process, output
    finally:
        forked.end([process])


def test_a_killed_process_leaves_a_checkpoint_to_load(tmp_path: Path) -> None:
    dice = random.Random(0)
    root = tmp_path / "checkpoints"
    reached = -1
    for _ in range(15):
        # a random number of steps, and at least one more than in the round before
        steps = dice.randint(2, 12)
        with python(tmp_path, SAVE_FOREVER, root) as (process, output):
            while output.read_text().count("\n") < steps and process.is_alive():
                time.sleep(0.001)
            assert process.is_alive(), output.read_text()
            process.kill()
            process.join()
            finished = [int(line) for line in output.read_text().splitlines()]
        reached = max([reached, *finished])
        newest = CheckpointStore(root).newest()
        assert newest is not None
        assert step_of(newest) >= reached
        content_of(newest)
    assert reached >= 15


@pytest.mark.parametrize(
    "write",
    [
        "lambda f: f.write(bytes(900_000))",
        # torch.save turns the system's error into one about file positions.
        "lambda f: __import__('torch').save(__import__('torch').zeros(250_000), f)",
        # all of it fits into the write buffer and only fails when that is emptied
        "lambda f: [f.write(bytes(50)) for _ in range(2_100)]",
    ],
    ids=["plain", "torch.save", "buffered"],
)
def test_a_full_disk_is_reported_and_keeps_older_checkpoints(tmp_path: Path, write: str) -> None:
    root = tmp_path / "checkpoints"
    older = CheckpointStore(root).save(1, writers("older", size=5_000))
    save = f"CheckpointStore(Path(sys.argv[1]), keep=1).save(2, {{'model.pt': {write}}})"
    with python(tmp_path, FULL_DISK.format(save=save), root) as (process, output):
        process.join(60)
        message = output.read_text()
    assert process.exitcode == 0, message
    assert str(root) in message
    assert "step 2" in message
    assert re.search(r"[\d.]+ MB; ", message)
    assert re.search(r"[\d,.]+ MB free", message)
    assert list(root.iterdir()) == [older]
    verify(older)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "checkpoints"))):
        CheckpointStore(tmp_path / "checkpoints").save(1, writers("first"))
