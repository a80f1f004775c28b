"""The parts of a restart that the soak and the bench record."""

import json
import signal
import sys
import time

import psutil
import pytest
from support.launch import TESTS

sys.path.insert(0, str(TESTS.parent))
from scripts.soak import kill_tree, recovery

# Starts a worker, and another one when it has ended, as torchrun does.
LAUNCHER = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "worker.py"])
"""
# Logs what a run does on its way to the first step, a tenth of a second apart.
WORKER = """
import datetime, json, os, time
log = open("logs/rank_000.log", "a")
for words in (" INFO hybridtrain: data: digits", " INFO hybridtrain: run directory outputs/run"):
    time.sleep(0.1)
    print(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S},{0:03d}{words}", file=log, flush=True)
metrics = open("metrics.jsonl", "a")
while True:
    time.sleep(0.1)
    print(json.dumps({"time": time.time(), "pid": os.getpid()}), file=metrics, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_the_time_from_a_kill_to_the_next_step_is_recorded_in_parts(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    launcher = psutil.Popen([sys.executable, "launcher.py"], cwd=tmp_path)
    try:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.02)
        workers = launcher.children()
        workers[0].send_signal(signal.SIGKILL)
        killed = time.time()
        parts = recovery(launcher, workers, tmp_path, killed, limit_s=60)
    finally:
        kill_tree(launcher)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    # the first step of the run that was started again, not one from before the kill
    first = next(line["time"] for line in lines if line["pid"] != workers[0].pid)
    assert killed + total == pytest.approx(first)
    assert recovery(launcher, workers, tmp_path, killed) is None, "the launcher has ended"
