"""The watchdog: which processes have ended, how long what may take, what an end waits for."""

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn.functional as F
from support.forward_nets import Net, batch, pipeline
from torch import nn

from hybridtrain._base.torch_private import HashStore
from hybridtrain.checkpoint import CheckpointStore
from hybridtrain.launch import (
    Failure,
    Phase,
    ProcessStore,
    Watchdog,
    activity,
    end_process,
    has_ended,
    process_id,
    this_process,
    watchdog,
    within,
)
from hybridtrain.launch.activity import Activity
from hybridtrain.launch.process_id import is_stopped, kill
from hybridtrain.launch.process_store import EXIT_STALLED, Report
from hybridtrain.launch.watchdog import report, summary, write_stacks
from hybridtrain.schedule import Action


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def ends(monkeypatch):
    def end(code):
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0)
    monkeypatch.setattr(watchdog, "_GRACE_INTERRUPTED_S", 0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


def test_a_process_of_another_container_is_never_taken_for_one_of_this_host(monkeypatch):
    # the pid of nobody here, and this process's own pid
    gone = this_process()._replace(pid=2**22 + 1, namespace="pid:[1]")
    same = this_process()._replace(namespace="pid:[1]")
    killed = []
    monkeypatch.setattr(process_id.os, "kill", lambda pid, number: killed.append(pid))
    assert not has_ended(gone)
    assert not has_ended(same)
    assert not is_stopped(same)
    kill(same)
    assert not killed
    assert has_ended(this_process()._replace(pid=2**22 + 1))


def test_each_run_of_a_process_may_take_longer_in_its_first_steps():
    record = Activity()
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600, record)
    record.steps = 50  # of a run before, or of a user's own calls
    for again in range(2):
        record.now(Phase.SETUP)
        record.steps += 100  # an evaluation before the first step
        record.now(Phase.TRAIN, 1)
        assert watch._progress.limit(record.work) == 40, again
        record.steps += 3
        record.now(Phase.TRAIN, 4)
        assert watch._progress.limit(record.work) == 10
        record.now(Phase.EVALUATE, 4)
        assert watch._progress.limit(record.work) == 40


@pytest.mark.parametrize("background", [False, True])
def test_an_end_waits_for_the_checkpoint_that_is_being_written(tmp_path, ends, background):
    store = CheckpointStore(tmp_path, background=background)
    begun, go_on = threading.Event(), threading.Event()

    def write(file):
        begun.set()
        go_on.wait(20)
        file.write(b"weights")

    saving = threading.Thread(target=store.save, args=(3, {"model": write}))
    saving.start()
    assert begun.wait(20)
    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(Ended):
        end_process(1)
    assert store.steps() == [3]
    saving.join()
    store.wait()


def test_a_stopped_data_worker_ends_with_its_process(ends):
    worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(Ended):
        end_process(1)
    worker.join(20)
    assert worker.exitcode == -signal.SIGKILL


def test_a_process_that_stands_at_a_breakpoint_does_not_stand_still(ends, monkeypatch):
    at_breakpoint, looked = threading.Event(), threading.Event()
    record, ended = Activity(), []
    record.now(Phase.TRAIN, 9)
    watch = Watchdog(ProcessStore(None, 0, 1), 0.01, 600, record)
    monkeypatch.setattr(watch, "_end", lambda failure: ended.append(failure) or watch._ended.set())
    monkeypatch.setattr(watchdog, "_TICK_S", 0.01)
    found = watchdog.stands_in_debugger
    monkeypatch.setattr(watchdog, "stands_in_debugger", lambda: found() and (looked.set() or True))
    prompt = compile("at_breakpoint.wait(20)", "/usr/lib/python3/bdb.py", "exec")
    debugger = threading.Thread(target=exec, args=(prompt, {"at_breakpoint": at_breakpoint}))
    debugger.start()
    watching = threading.Thread(target=watch._run)
    watching.start()
    assert looked.wait(20)
    assert ended == []
    at_breakpoint.set()
    watching.join(20)
    assert [failure.exit_code for failure in ended] == [EXIT_STALLED]


def test_a_save_that_stands_still_is_not_waited_for(ends):
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600)
    watch.exit_code = EXIT_STALLED
    with activity.saving():
        activity.now(Phase.SAVE, 3)
        with pytest.raises(Ended):
            watch.end(Failure(0, "rank 0 has made no progress", EXIT_STALLED))
    activity.set(None)


class Gone:
    def write(self, text=""):
        raise BrokenPipeError

    flush = write


@pytest.mark.parametrize("stream", [Gone(), None], ids=["gone", "closed from the start"])
def test_the_watchdog_ends_a_run_whose_terminal_is_gone(ends, monkeypatch, stream):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(Ended, match="4"):
        Watchdog(ProcessStore(None, 0, 1), 10, 600)._end(Failure(0, "stalled", EXIT_STALLED))


def test_a_failure_of_the_watchdog_itself_is_logged(caplog):
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600, record=None)
    watch._watch()
    assert "watchdog failed" in caplog.text


@pytest.mark.parametrize("code", [75, 143])
def test_a_process_that_is_late_to_an_interruption_ends_with_its_code(ends, code):
    with pytest.raises(Ended, match=str(code)):
        Watchdog(ProcessStore(None, 0, 1), 10, 600)._follow(Failure(1, "interrupted", code))


@pytest.mark.parametrize("tells", [True, False])
def test_a_blocked_process_of_a_script_says_what_ends_it_and_a_command_does_not(
    ends, capsys, tells
):
    dog = Watchdog(ProcessStore(None, 0, 1), 10, 600)
    dog.prints_failures = tells
    with pytest.raises(Ended):
        dog._follow(Failure(1, "rank 1 failed: boom", 1))
    assert capsys.readouterr().err == "error: rank 1 failed: boom\n" * tells


def test_a_process_ends_of_a_failure_also_where_the_store_has_gone(ends, monkeypatch):
    def gone(job):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(ProcessStore, "acknowledge_failure", gone)
    with pytest.raises(Ended):
        Watchdog(ProcessStore(None, 0, 1), 10, 600)._follow(Failure(1, "rank 1 failed: boom", 1))


def test_what_a_process_was_doing_last_is_said_in_words_of_its_schedule():
    record = Activity()
    assert summary(record) == "in 'no phase of training'"
    record.now(Phase.TRAIN, 3)
    lanes = record.begin_step(2)
    lanes[0].begin(Action("B", 0, 5))
    lanes[0].wait(True)
    lanes[1].begin(Action("F", 1, 2))
    assert summary(record) == "in the forward of micro-batch 2 on stage 1 (step 3: train)"
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600, record)
    watch.store.publish_report("doing", Report(summary(record), 0))
    assert watch._last_seen(watch.store, 0).endswith(f" {summary(record)}")


def test_a_layer_that_stands_still_is_named_by_stage_micro_batch_and_line():
    stands, go_on = threading.Event(), threading.Event()
    go_on.set()

    class Stands(nn.Linear):
        def forward(self, x):
            stands.set()
            go_on.wait(20)
            return super().forward(x)

    net = Net()
    net.c = Stands(8, 8)
    model = pipeline(net, split=[2, 2], self_check=False)
    stands.clear()  # it has run to find where the model may be cut
    go_on.clear()
    step = threading.Thread(target=model.train_step, args=(*batch(), F.mse_loss))
    step.start()
    try:
        assert stands.wait(20)
        seen = report(activity)
        # the other device computes the next micro-batch, and then waits
        limit = time.monotonic() + 20
        while "stage 0" in seen.what and time.monotonic() < limit:
            seen = report(activity)
    finally:
        go_on.set()
        step.join()
    assert seen.what.startswith("in the forward of micro-batch 0 on stage 1 (step ")
    assert f'File "{__file__}", line ' in seen.what
    assert seen.what.endswith("in forward")
    assert seen.blame == 3
    assert "micro-batch" not in report(activity).what


def test_each_micro_batch_of_a_comparison_with_plain_pytorch_is_progress(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = watchdog.Progress(activity, 10)
    compared = activity.compared
    progress.look()
    pipeline(Net(), split=[2, 2]).train_step(*batch(), F.mse_loss)
    assert activity.compared >= compared + 2
    progress.look()
    now[0], activity.compared = 4.0, activity.compared + 1
    progress.look()
    assert progress.idle_s() == 0


def test_the_first_evaluation_as_a_whole_may_take_longer():
    record = Activity()
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600, record)
    for limit in (40, 10):
        record.now(Phase.TRAIN, 50)
        record.steps += 50
        record.now(Phase.EVALUATE, 50)
        record.steps += 20  # done with its part, it waits for the first batch of another one
        assert watch._progress.limit(record.work) == limit


def test_rank_0_ends_after_the_others_have_read_why():
    store = HashStore()
    others = [ProcessStore(store, rank, 3) for rank in (1, 2)]
    for other in others:
        other.beat(0, -math.inf)
        store.set(f"process/{other.rank}", json.dumps(this_process()))
    watch = Watchdog(ProcessStore(store, 0, 3), 10, 600)
    waiting = threading.Thread(target=watch.wait_for_readers, daemon=True)
    waiting.start()
    others[0].acknowledge_failure()
    waiting.join(0.3)
    assert waiting.is_alive()
    others[1].leave()  # it ends normally, and reads nothing
    waiting.join(20)
    assert not waiting.is_alive()


def test_a_call_is_left_to_its_thread_after_the_limit():
    never = threading.Event()
    with pytest.raises(RuntimeError, match="no answer within"):
        within(0.05, never.wait)
    never.set()
    assert within(20, sum, [1, 2]) == 3
    with pytest.raises(ZeroDivisionError):
        within(20, divmod, 1, 0)


def test_the_name_of_this_process_takes_no_request_to_the_store(monkeypatch):
    watch = Watchdog(ProcessStore(None, 0, 1), 10, 600)
    watch.store.set_place("stage 1")
    monkeypatch.setattr(watch.store, "_store", None)
    name = watch.short_name(watch.store, 0)
    assert name == f"rank 0 (stage 1, {os.uname().nodename})"


def test_rank_0_of_an_interrupted_run_ends_after_the_others_but_does_not_wait_for_ever() -> None:
    store = HashStore()
    first, second = ProcessStore(store, 0, 2), ProcessStore(store, 1, 2)
    ended: list[int] = []

    def end() -> None:
        first.end_together(60)
        ended.append(0)

    waiting = threading.Thread(target=end, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert ended == []
    second.end_together(60)  # returns at once
    waiting.join(20)
    assert ended == [0]
    ProcessStore(HashStore(), 0, 2).end_together(0.1)  # the other one is gone


def test_stacks_are_not_written_to_where_a_link_of_another_user_leads(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (tmp_path / "rank_0.txt").symlink_to(victim)
    write_stacks(tmp_path / "rank_0.txt")
    assert victim.read_text() == "mine"
    assert "write_stacks" in (tmp_path / "rank_0.txt").read_text()


def test_the_stacks_of_each_run_without_a_directory_are_in_a_folder_of_a_new_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    lines = []
    for _ in range(2):
        watches = [Watchdog(ProcessStore(None, 0, 1), 10, 600) for _ in range(2)]
        store = HashStore()
        for rank, watch in enumerate(watches):
            watch.store._store, watch.store.rank = store, rank
        lines += [stall.line for w in watches if (stall := w.explain_stall(w.store, 10.0))]
        watches[1]._answer(watches[1].store, Path(watches[1].store.requested_stacks()))
    folders = list(tmp_path.iterdir())
    assert len(folders) == len(lines) == 2
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == {"rank_0.txt", "rank_1.txt"}
        assert sum(f"are in {folder} (" in line for line in lines) == 1
