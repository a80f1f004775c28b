"""What the checkpoint store promises, with the power cut, the process killed and bits flipped."""

import io
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from hybridtrain.checkpoint import store as store_module
from hybridtrain.checkpoint.store import CheckpointStore, step_of, verify
from hybridtrain.errors import CheckpointError

REPOSITORY = Path(store_module.__file__).parents[2]


def writers(content: str, size: int = 300) -> dict[str, Callable[[BinaryIO], None]]:
    """Two files with `content` in them: which save they come from can be read back."""

    def write(file: BinaryIO) -> None:
        # In several pieces, so that there are crash points in the middle of a file.
        for _ in range(3):
            file.write(content.encode() * size)

    return {"model.pt": write, "state.json": write}


def content_of(path: Path) -> str:
    """What the checkpoint was saved with; both files must come from the same save."""
    contents = {(path / name).read_text()[:5] for name in ("model.pt", "state.json")}
    assert len(contents) == 1
    return contents.pop()


# --- ordinary use -------------------------------------------------------------------------------


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "deep" / "checkpoints")
    assert store.newest() is None
    assert store.steps() == []
    store.save(20, writers("twent"))
    path = store.save(100, writers("hundr"))
    assert path == tmp_path / "deep" / "checkpoints" / "step_00000100"
    assert store.newest() == path
    assert store.steps() == [20, 100]
    assert step_of(path) == 100
    assert content_of(path) == "hundr"
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "model.pt",
        "state.json",
    ]


def test_a_file_of_torch_save_loads_again(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights = {"encoder.weight": torch.arange(70_000.0)}
    path = CheckpointStore(tmp_path).save(1, {"model.pt": lambda f: torch.save(weights, f)})
    verify(path)
    loaded = torch.load(path / "model.pt", weights_only=True)
    assert torch.equal(loaded["encoder.weight"], weights["encoder.weight"])


def test_text_can_be_written_through_a_wrapper_that_closes_its_file(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        with io.TextIOWrapper(file, encoding="utf-8") as text:
            text.write("é" * 5)

    path = CheckpointStore(tmp_path).save(1, {"notes.txt": write})
    verify(path)
    assert (path / "notes.txt").read_text(encoding="utf-8") == "é" * 5


def test_a_writer_cannot_go_back_behind_the_hash(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="seek"):
        store.save(1, {"model.pt": lambda f: print(f.seek(0))})
    assert list(tmp_path.iterdir()) == []


def test_an_exception_of_a_writer_comes_out_and_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    kept = store.save(1, writers("first"))

    def broken(file: BinaryIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        store.save(2, {**writers("secon"), "last.pt": broken})
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("name", ["", "manifest.json", "../up", "a/b", ".hidden"])
def test_a_file_name_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        CheckpointStore(tmp_path).save(1, {name: lambda f: None})


def test_the_modes_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        path = CheckpointStore(tmp_path / "checkpoints").save(1, writers("first"))
    finally:
        os.umask(previous)
    modes = {p.name: oct(stat.S_IMODE(p.stat().st_mode)) for p in (path, *path.iterdir())}
    assert modes == {
        path.name: "0o750",
        "model.pt": "0o640",
        "state.json": "0o640",
        "manifest.json": "0o640",
    }


# --- keeping and replacing ----------------------------------------------------------------------


def test_keep_leaves_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        store.save(step, writers(f"stp-{step}"))
    assert store.steps() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def test_keep_never_removes_later_steps_nor_the_one_just_saved(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        CheckpointStore(tmp_path).save(step, writers("first"))
    store = CheckpointStore(tmp_path, keep=1)
    store.save(150, writers("again"))  # the run went back to step 100
    assert store.steps() == [150, 200, 300]
    store.save(400, writers("again"))
    assert store.steps() == [400]


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.keep"):
        CheckpointStore(tmp_path, keep=0)


def test_a_step_that_is_saved_again_is_replaced_under_its_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(7, writers("old.."))
    path = store.save(7, writers("new.."))
    assert path.name == "step_00000007"
    assert content_of(path) == "new.."
    assert list(tmp_path.iterdir()) == [path]


def test_what_dead_runs_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".tmp-5-0123").mkdir()
    (tmp_path / ".tmp-5-0123" / "model.pt").write_bytes(b"half")
    path = CheckpointStore(tmp_path).save(6, writers("six.."))
    assert list(tmp_path.iterdir()) == [path]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path, **_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, writers("old.."))
    monkeypatch.setattr(shutil, "rmtree", busy)
    assert content_of(store.save(1, writers("new.."))) == "new.."
    assert content_of(store.save(2, writers("two.."))) == "two.."
    assert store.steps() == [2]
    assert "busy" in caplog.text


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "state.json", "manifest.json"])
def test_every_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = CheckpointStore(tmp_path).save(100, writers("bits."))
    file = path / name
    intact = file.read_bytes()
    bits = range(8 * len(intact))
    if name != "manifest.json":
        bits = random.Random(0).sample(bits, 60)  # the manifest's every bit
    for bit in bits:
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(file))):
            verify(path)
    file.write_bytes(intact)
    verify(path)


@pytest.mark.parametrize("name", ["model.pt", "state.json", "manifest.json"])
def test_a_file_cut_short_or_missing_is_found_and_named(tmp_path: Path, name: str) -> None:
    path = CheckpointStore(tmp_path).save(100, writers("short"))
    size = (path / name).stat().st_size
    for length in (size - 1, size // 2, 0):
        os.truncate(path / name, length)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            verify(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=re.escape(name)):
        verify(path)


def test_a_directory_renamed_to_another_step_is_found_but_may_have_any_other_name(
    tmp_path: Path,
) -> None:
    path = CheckpointStore(tmp_path).save(100, writers("moved"))
    best = path.rename(tmp_path / "best")
    verify(best)
    assert step_of(best) == 100
    with pytest.raises(CheckpointError, match="named for step 200 but holds step 100"):
        verify(best.rename(tmp_path / "step_00000200"))


def test_a_format_of_the_future_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "FORMAT", 9)
    path = CheckpointStore(tmp_path).save(1, writers("futur"))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 9"):
        verify(path)


def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    good = store.save(1, writers("good."))
    bad = store.save(2, writers("bad.."))
    os.truncate(bad / "model.pt", 10)
    assert store.newest() == good
    assert str(bad / "model.pt") in caplog.text
    assert "10 bytes" in caplog.text


def test_checkpoints_that_are_all_damaged_never_mean_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (store.save(step, writers("gone.")) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="step_00000001, step_00000002"):
        store.newest()


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*no such directory"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        step_of(tmp_path)


# --- every crash point --------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class Power:
    """Counts what the store does to the disk, stops the world at the n-th call, and can then
    lose what was not yet synchronised, as a power cut does.

    A file written since its last fsync loses its second half, a directory the names it got
    since; the root's renames are undone from the last one back, as many as the caller says.
    """

    def __init__(self, root: Path, last: int) -> None:
        self.root = root
        self.calls = 0
        self.last = last
        self.synced = {path.stat().st_ino for path in root.rglob("*")}
        self.pending: list[tuple[str, str]] = []  # renames in the root since its last fsync

    def tick(self) -> None:
        """Before each call: from the n-th on nothing reaches the disk any more."""
        self.calls += 1
        if self.calls > self.last:
            raise Crash

    def synchronised(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        self.synced.add(inode)
        if inode == self.root.stat().st_ino:
            self.pending.clear()

    def renamed(self, source: Path, target: Path) -> None:
        self.pending.append((str(source), str(target)))

    def made(self, path: Path, *_: Any, **__: Any) -> None:
        # An inode number may have belonged to something removed.
        self.synced.discard(path.stat().st_ino)

    def written(self, path: Path) -> None:
        self.synced -= {path.stat().st_ino, path.parent.stat().st_ino}

    def cut(self, undo: int) -> None:
        for source, target in reversed(self.pending[len(self.pending) - undo :]):
            os.rename(target, source)
        for directory in self.root.glob("step_*"):
            for file in directory.iterdir():
                if file.stat().st_ino not in self.synced:
                    os.truncate(file, file.stat().st_size // 2)
                if directory.stat().st_ino not in self.synced:
                    file.unlink()


@contextmanager
def power(root: Path, last: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    """Count the disk calls within, and crash at the one after `last`."""
    line = Power(root, last)

    def watch(name: str, seen: Callable[..., None] = lambda *_, **__: None) -> Any:
        original = getattr(os, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            line.tick()
            result = original(*args, **kwargs)
            seen(*args, **kwargs)
            return result

        return watched

    write = store_module._HashingFile.write

    def watched_write(self: Any, data: Any, /) -> int:
        line.tick()
        count = write(self, data)
        self._file.flush()  # what was written before the crash is in the file
        line.written(Path(self._file.name))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(store_module._HashingFile, "write", watched_write)
        patch.setattr(os, "fsync", watch("fsync", line.synchronised))
        patch.setattr(os, "rename", watch("rename", line.renamed))
        patch.setattr(os, "mkdir", watch("mkdir", line.made))
        for name in ("unlink", "rmdir", "open"):
            patch.setattr(os, name, watch(name))
        yield line


def prepare(root: Path, steps: dict[int, str]) -> None:
    """Save the checkpoints that are there before the crash."""
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
def test_a_crash_at_any_point_leaves_a_checkpoint_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, situation: str, event: str
) -> None:
    before, keep, step = SITUATIONS[situation]
    outcomes = set()
    last = 0
    while True:
        # Killed: all that was done stays. A power cut undoes 0, 1, 2 ... of the last renames.
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
                # What there was before, or the new one, also when both are the same step.
                content = content_of(found)
                assert step_of(found) >= max(before, default=0)
                assert content in {"new..", before.get(step_of(found))}
                assert content == "new.." or not finished
                outcomes.add(content)

            # The next run goes on as if nothing had been, and cleans up.
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

SAVING_FOR_EVER = """
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


def python(source: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_killed_process_leaves_a_checkpoint_to_load(tmp_path: Path) -> None:
    dice = random.Random(0)
    reached = -1
    for _ in range(15):
        with python(SAVING_FOR_EVER, str(tmp_path)) as process:
            assert process.stdout is not None
            started = [int(process.stdout.readline()) for _ in range(2)]  # one step more each time
            time.sleep(dice.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            finished = [int(line) for line in process.stdout.read().splitlines()]
        assert process.returncode == -signal.SIGKILL
        reached = max([reached, *started, *finished])
        newest = CheckpointStore(tmp_path).newest()
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
def test_a_full_disk_is_told_and_costs_no_older_checkpoint(tmp_path: Path, write: str) -> None:
    root = tmp_path / "checkpoints"
    older = CheckpointStore(root).save(1, writers("older", size=5_000))
    save = f"CheckpointStore(Path(sys.argv[1]), keep=1).save(2, {{'model.pt': {write}}})"
    with python(FULL_DISK.format(save=save), str(root)) as process:
        message = process.communicate()[0]
    assert process.returncode == 0
    assert str(root) in message
    assert "step 2" in message
    assert re.search(r"needs [\d.]+ MB or more", message)
    assert re.search(r"[\d,.]+ MB free", message)
    assert list(root.iterdir()) == [older]
    verify(older)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a directory should be")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "checkpoints"))):
        CheckpointStore(tmp_path / "checkpoints").save(1, writers("first"))
