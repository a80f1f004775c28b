"""Saving in the background, and the mark of the best checkpoint."""

import json
import os
import resource
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.checkpoint_files import content_of, writers
from support.training import assert_same, rich_net, trainer
from test_checkpoint_crash import Crash, power, prepare

from hybridtrain.checkpoint import CheckpointStore, NoSpaceError, step_of
from hybridtrain.checkpoint.host_copies import HostCopies
from hybridtrain.errors import CheckpointError, Interrupted
from hybridtrain.loop import Callback

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Gate:
    """A writer that waits until it is opened, so that a save is under way for sure."""

    def __init__(self):
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, file):
        self.begun.set()
        assert self.open.wait(30)
        file.write(b"slow.")


# --- in the background ----------------------------------------------------------------------------


def test_a_save_in_the_background_returns_before_it_is_written(tmp_path):
    store, gate = CheckpointStore(tmp_path, background=True), Gate()
    path = store.save(1, {"model.safetensors": gate})
    assert gate.begun.wait(30)
    assert store.steps() == []
    gate.open.set()
    store.wait()
    assert store.newest() == path


def test_the_next_save_waits_for_the_one_under_way(tmp_path):
    store, gate = CheckpointStore(tmp_path, keep=1, background=True), Gate()
    store.save(1, {"model.safetensors": gate})
    threading.Timer(0.1, gate.open.set).start()
    store.save(2, writers("secon"))
    store.wait()
    assert content_of(store.newest()) == "secon"
    assert store.steps() == [2]


def test_a_failure_is_logged_at_once_and_raised_by_the_next_save_and_by_wait(tmp_path, caplog):
    store = CheckpointStore(tmp_path, background=True)
    kept = store.save(1, writers("first"))

    def broken(file):
        raise ZeroDivisionError("mine")

    for finish in (lambda: store.save(3, writers("third")), store.wait):
        store.save(2, {"model.safetensors": broken})
        with pytest.raises(ZeroDivisionError, match="mine"):
            finish()
        assert "the checkpoint of step 2 was not saved: mine" in caplog.text
    store.wait()  # raised once
    assert list(tmp_path.iterdir()) == [kept]


def test_what_is_written_is_the_state_at_the_time_of_the_save(tmp_path):
    trainer(rich_net(), store=CheckpointStore(tmp_path / "plain"), checkpoint_every_steps=2).fit()
    store = CheckpointStore(tmp_path / "background", background=True)
    ours = trainer(rich_net(), store=store, checkpoint_every_steps=2)
    gate, save = Gate(), store.save
    store.save = lambda step, files, **_: save(
        step, {"gate": gate, **files} if step == 2 else files
    )
    record = ours.recorder.on_step
    # opened when training has gone on for a step
    ours.recorder.on_step = lambda run, samples: (
        record(run, samples),
        run.step == 3 and gate.open.set(),
    )
    ours.fit()
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "state.json"):
        files = [tmp_path / kind / "step_00000002" / name for kind in ("plain", "background")]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_copies_are_reused_and_those_of_tensors_that_are_gone_are_freed():
    copies, weight = HostCopies(), torch.ones(3)
    a, b = ("model", "a"), ("model", "b")
    first = copies.take({a: weight, b: weight * 2})
    weight.fill_(5)
    second = copies.take({a: weight, b: weight * 2})
    assert second[a].data_ptr() == first[a].data_ptr() != weight.data_ptr()
    assert second[b].tolist() == [10] * 3
    assert copies.take({a: torch.ones(4)})[a].shape == (4,)
    assert copies.nbytes == 4 * 4


def fails(store, kind=ZeroDivisionError):
    """Makes every save of `store` fail in the background."""
    save = store.save

    def broken(file):
        raise kind("mine")

    store.save = lambda step, files, **_: save(step, {**files, "last": broken})


def test_the_end_of_a_run_waits_for_the_last_save_and_raises_its_failure(tmp_path):
    store = CheckpointStore(tmp_path, background=True)
    ours = trainer(store=store, steps=1)
    fails(store)
    with pytest.raises(ZeroDivisionError, match="mine"):
        ours.fit()
    assert store.steps() == []


class Stops(Callback):
    """Raises an error in step 3."""

    def __init__(self, error):
        self._error = error

    def on_step(self, trainer, samples):
        if trainer.step == 3:
            raise self._error


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt, RuntimeError])
def test_an_exception_of_a_run_waits_for_the_save_under_way(error, tmp_path):
    store = CheckpointStore(tmp_path, background=True)
    ours = trainer(store=store, checkpoint_every_steps=2, callbacks=[Stops(error("stopped"))])
    with pytest.raises(error, match="stopped"):
        ours.fit()
    assert step_of(store.newest()) == 2


def test_the_error_of_a_run_is_not_hidden_by_that_of_its_last_save(tmp_path, caplog):
    store = CheckpointStore(tmp_path, background=True)
    ours = trainer(
        store=store, checkpoint_every_steps=2, callbacks=[Stops(RuntimeError("stopped"))]
    )
    fails(store)
    with pytest.raises(RuntimeError, match="stopped"):
        ours.fit()
    assert "the checkpoint of step 2 was not saved: mine" in caplog.text


def test_an_interruption_does_not_promise_a_checkpoint_that_was_not_written(tmp_path):
    store = CheckpointStore(tmp_path, background=True)
    ours = trainer(store=store, checkpoint_every_steps=2, callbacks=[Stops(Interrupted("saved"))])
    fails(store, CheckpointError)
    with pytest.raises(CheckpointError, match="mine"):
        ours.fit()


@pytest.mark.parametrize("event", ["killed", "power cut"])
@pytest.mark.quick_cases(1)
def test_a_crash_at_any_point_of_a_save_in_the_background_leaves_a_checkpoint(
    event, tmp_path, monkeypatch
):
    finished, last, outcomes = False, 0, set()
    while not finished:
        root = tmp_path / str(last)
        prepare(root, {50: "older", 100: "old.."})
        CheckpointStore(root).mark_best(50, 0.5)
        with power(root, last, monkeypatch) as line:
            store = CheckpointStore(root, keep=1, background=True)
            try:
                store.mark_best(200, 0.9)
                store.save(200, writers("new.."))
                store.wait()
                finished = True
            except Crash:
                finished = False
        if event == "power cut":
            line.cut(len(line.pending))
        after = CheckpointStore(root)
        found = after.newest()
        content = content_of(found)
        assert content == {100: "old..", 200: "new.."}[step_of(found)]
        assert content == "new.." or not finished
        # the best one is the old or the new one, and it is there
        best = content_of(after.best())
        assert best == {0.5: "older", 0.9: "new.."}[after.best_mark().value]
        outcomes.add((content, best))
        shutil.rmtree(root)
        last += 1
    assert outcomes == {("old..", "older"), ("new..", "older"), ("new..", "new..")}
    assert last > 20


# --- the best -------------------------------------------------------------------------------------


def test_the_best_checkpoint_is_never_pruned(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 7):
        store.save(step, writers(f"stp-{step}"))
        if step in (2, 3):
            store.mark_best(step, step / 10)
    assert store.steps() == [3, 5, 6]
    again = CheckpointStore(tmp_path, keep=1)  # as a new process
    assert again.best() == tmp_path / "step_00000003"
    assert (again.best_mark().step, again.best_mark().value) == (3, 0.3)
    again.save(7, writers("stp-7"))
    assert again.steps() == [3, 7]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 3, "value": 0.3}


def test_a_step_marked_before_it_is_saved_is_the_best_only_then(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    assert store.best() is None
    store.save(1, writers("first"))
    store.mark_best(1, 1.0)
    store.mark_best(2, 2.0)
    assert step_of(store.best()) == 1
    assert store.best_mark().step == 2
    store.save(2, writers("secon"))
    assert step_of(store.best()) == 2
    assert store.steps() == [2]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"step": "1", "value": 2}', "nonsense"])
def test_with_a_damaged_mark_nothing_is_removed(content, tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, writers("first"))
    (tmp_path / "best.json").write_text(content)
    store.save(2, writers("secon"))
    assert store.steps() == [1, 2]
    assert "best.json is damaged" in caplog.text
    with pytest.raises(CheckpointError, match=r"best\.json is damaged"):
        store.best()


def test_a_best_checkpoint_that_is_gone_is_an_error(tmp_path):
    store = CheckpointStore(tmp_path)
    shutil.move(store.save(1, writers("first")), tmp_path / "elsewhere")
    (tmp_path / "best.json").write_text('{"step": 1, "value": 0.5}')
    with pytest.raises(CheckpointError, match="step_00000001"):
        store.best()


# --- a full disk ----------------------------------------------------------------------------------


@contextmanager
def small_files():
    """A limit on the size of files, which a write meets as it meets a full disk.

    Only as long as it is needed: pytest's own output may be a file.
    """
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.quick_cases(1)
def test_a_run_survives_a_disk_that_is_full_for_a_while(background, tmp_path, caplog):
    whole = trainer(rich_net())
    whole.fit()
    store = CheckpointStore(tmp_path, background=background)
    ours = trainer(rich_net(), store=store, checkpoint_every_steps=2)
    record = ours.recorder.on_step

    def on_step(run, samples):
        record(run, samples)
        if run.step in (4, 8):
            store._thread and store._thread.join()
            limit(100 if run.step == 4 else 10**8)

    ours.recorder.on_step = on_step
    with small_files() as limit:
        ours.fit()
    assert store.steps() == [2, 8, 9]
    assert "no checkpoint of step 4" in caplog.text or background
    assert "step 4" in caplog.text
    assert_same(ours.model.state_dict(), whole.model.state_dict(), "weights")


@pytest.mark.parametrize("background", [False, True])
def test_a_last_save_without_space_is_an_error_and_older_ones_stay(background, tmp_path):
    store = CheckpointStore(tmp_path, background=background)
    ours = trainer(rich_net(), store=store, checkpoint_every_steps=4)
    record = ours.recorder.on_step

    def on_step(run, samples):
        record(run, samples)
        if run.step == 9:
            store._thread and store._thread.join()
            limit(100)

    ours.recorder.on_step = on_step
    with (
        small_files() as limit,
        pytest.raises(NoSpaceError, match="cannot save the checkpoint of step 9"),
    ):
        ours.fit()
    assert store.steps() == [4, 8]
    assert step_of(store.newest()) == 8


def test_a_directory_that_has_vanished_is_made_again(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    store = CheckpointStore(root)
    store.save(1, writers("first"))
    shutil.rmtree(tmp_path / "run")
    assert content_of(store.save(2, writers("secon"))) == "secon"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_ends_the_run_with_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="cannot save the checkpoint of step 1"):
        CheckpointStore(tmp_path / "checkpoints").save(1, writers("first"))
