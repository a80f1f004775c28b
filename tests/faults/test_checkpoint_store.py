"""The checkpoint store: saving, keeping, replacing, and finding damage."""

import io
import os
import random
import re
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from support.checkpoint_files import content_of, writers

from hybridtrain.checkpoint import CheckpointStore, step_of, verify
from hybridtrain.checkpoint import store as store_module
from hybridtrain.errors import CheckpointError

# --- ordinary use -------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_found_with_its_content(tmp_path: Path) -> None:
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


def test_a_writer_cannot_seek_to_bypass_the_hash(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="seek"):
        store.save(1, {"model.pt": lambda f: print(f.seek(0))})
    assert list(tmp_path.iterdir()) == []


def test_an_exception_of_a_writer_is_passed_on_and_leaves_nothing(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointError, match="keep=0 must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_a_step_that_is_saved_again_is_replaced_under_its_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(7, writers("old.."))
    path = store.save(7, writers("new.."))
    assert path.name == "step_00000007"
    assert content_of(path) == "new.."
    assert list(tmp_path.iterdir()) == [path]


def test_the_next_save_removes_what_a_killed_run_left(tmp_path: Path) -> None:
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
@pytest.mark.quick_cases(1)
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


def test_a_directory_renamed_to_another_step_is_refused_but_other_names_are_allowed(
    tmp_path: Path,
) -> None:
    path = CheckpointStore(tmp_path).save(100, writers("moved"))
    best = path.rename(tmp_path / "best")
    verify(best)
    assert step_of(best) == 100
    with pytest.raises(CheckpointError, match=r"step 200.* step 100"):
        verify(best.rename(tmp_path / "step_00000200"))


@pytest.mark.parametrize(
    ("number", "message"),
    [(1, "format 1, .* format 2"), (9, "format 9, .* format 2")],
)
def test_another_format_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    monkeypatch.setattr(store_module, "FORMAT", number)
    path = CheckpointStore(tmp_path).save(1, writers("other"))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=message):
        verify(path)
    with pytest.raises(CheckpointError, match=message):
        CheckpointStore(tmp_path).newest()


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


def test_all_checkpoints_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        (store.save(step, writers("gone.")) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="step_00000001, step_00000002"):
        store.newest()


def test_a_reader_finds_the_checkpoint_that_replaces_the_one_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointStore(tmp_path, keep=1)
    writer.save(1, writers("first"))

    def verify_while_a_run_saves(path: Path) -> Any:
        if path.name == "step_00000001":
            writer.save(2, writers("secon"))
        return verify(path)

    monkeypatch.setattr(store_module, "verify", verify_while_a_run_saves)
    assert CheckpointStore(tmp_path).newest() == tmp_path / "step_00000002"


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a checkpoint: .*directory"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        step_of(tmp_path)
