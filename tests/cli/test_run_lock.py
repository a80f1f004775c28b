"""One writer in a run directory: the lock names its owner, and knows a dead one."""

import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from hybridtrain.cli.run import lock as run_lock
from hybridtrain.cli.run.lock import RunLock
from hybridtrain.errors import UserError

FORK = multiprocessing.get_context("fork")  # another process without the imports of PyTorch


def hold(folder: Path, held: Event) -> None:
    RunLock(folder).acquire()
    held.set()
    signal.pause()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[ForkProcess]:
    """Another process, which holds the lock of `tmp_path`."""
    held = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(60)
    yield process
    process.kill()
    process.join()


def rewrite(folder: Path, **changes: object) -> None:
    """Makes the owner in the lock's file another one."""
    path = folder / "run.lock"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def owner(folder: Path) -> int:
    """Returns the process that the lock names."""
    pid: int = json.loads((folder / "run.lock").read_text())["pid"]
    return pid


def test_a_second_writer_is_refused_with_the_name_of_the_first(
    tmp_path: Path, other: ForkProcess
) -> None:
    for attempt in (RunLock(tmp_path).acquire, RunLock(tmp_path).check):
        with pytest.raises(UserError) as caught:
            attempt()
        message = str(caught.value)
        assert f"{tmp_path}: process {other.pid} on {os.uname().nodename}" in message
        assert "set another run_name=" in message
        assert "\n" not in message


def test_the_lock_of_a_killed_process_is_taken_over_at_once_with_a_notice(
    tmp_path: Path, other: ForkProcess, caplog: pytest.LogCaptureFixture
) -> None:
    other.kill()  # it stays a zombie until it is waited for, as under a launcher
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    with caplog.at_level(logging.WARNING), RunLock(tmp_path):
        assert f"from process {other.pid} on " in caplog.text
        assert "that process is gone" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_another_process_with_the_number_of_a_dead_one_is_not_its_owner(
    tmp_path: Path, other: ForkProcess
) -> None:
    rewrite(tmp_path, began="1")
    with RunLock(tmp_path):
        assert owner(tmp_path) == os.getpid()


def test_the_lock_is_given_back_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug"), RunLock(tmp_path):
        raise ValueError("a bug")
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]
        with pytest.raises(UserError, match=f"process {os.getpid()} on"):
            RunLock(tmp_path).acquire()


def test_the_owner_on_another_host_is_dead_when_it_gives_no_sign(
    tmp_path: Path, other: ForkProcess
) -> None:
    rewrite(tmp_path, host="far-away", pid=1, job="Slurm job 7")
    with pytest.raises(UserError, match=r"process 1 on far-away, Slurm job 7, .*is dead, wait"):
        RunLock(tmp_path).acquire()
    old = run_lock.STALE_S + 10
    path = tmp_path / "run.lock"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - old))
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize(
    ("now", "takes_over"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RUN_ID": "other", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_restart_of_the_same_job_on_another_host_takes_over(
    now: dict[str, str],
    takes_over: bool,
    tmp_path: Path,
    other: ForkProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrite(tmp_path, host="far-away", job="torchrun abc", attempt=0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    if takes_over:
        with RunLock(tmp_path):
            pass
    else:
        with pytest.raises(UserError, match="far-away, torchrun abc"):
            RunLock(tmp_path).acquire()


def test_of_many_that_find_a_dead_owner_one_gets_the_lock(
    tmp_path: Path, other: ForkProcess
) -> None:
    rewrite(tmp_path, pid=2**22 + 1)
    dead = (tmp_path / "run.lock").read_text()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places between any two lines
    try:
        for _ in range(30):
            (tmp_path / "run.lock").write_text(dead)
            locks = [RunLock(tmp_path) for _ in range(8)]
            assert sorted(outcomes_of(locks)) == ["got"] + ["refused"] * 7
            for lock in locks:
                lock.release()
            assert not list(tmp_path.iterdir())
    finally:
        sys.setswitchinterval(interval)


def outcomes_of(locks: list[RunLock]) -> list[str]:
    """What each lock gets if all are acquired at once."""
    outcomes: list[str] = []
    start = threading.Barrier(len(locks))

    def compete(lock: RunLock) -> None:
        start.wait()
        try:
            lock.acquire()
            outcomes.append("got")
        except UserError:
            outcomes.append("refused")

    threads = [threading.Thread(target=compete, args=[lock]) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("content", ["dead", "damaged"])
def test_a_process_that_died_while_it_took_over_does_not_hold_the_lock(
    content: str, tmp_path: Path, other: ForkProcess
) -> None:
    rewrite(tmp_path, pid=2**22 + 1)
    owner = json.loads((tmp_path / "run.lock").read_text())
    guard = tmp_path / f".run.lock.after-{owner['key']}"
    guard.write_text(json.dumps({**owner, "key": "taker"}) if content == "dead" else "{")
    os.utime(guard, (0, 0))
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_being_taken_over_is_not_taken_over_twice(
    tmp_path: Path, other: ForkProcess
) -> None:
    taker = json.loads((tmp_path / "run.lock").read_text())
    rewrite(tmp_path, pid=2**22 + 1, key="gone")
    (tmp_path / ".run.lock.after-gone").write_text(json.dumps(taker))
    with pytest.raises(UserError, match=f"{tmp_path}: process {other.pid} on"):
        RunLock(tmp_path).acquire()


def test_a_lock_without_sense_is_nobodys_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    path.write_text("{")
    os.utime(path, (0, 0))
    with RunLock(tmp_path):
        assert owner(tmp_path) == os.getpid()


def test_a_lock_without_sense_says_that_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.lock"
    path.write_text("{")
    with pytest.raises(UserError, match=r"run\.lock is damaged, .*run_name="):
        RunLock(tmp_path).acquire()
    os.utime(path, (0, 0))
    with RunLock(tmp_path):
        assert "from an unknown process (the lock is damaged): no heartbeat" in caplog.text
