"""A script of one process whose layer does not return: it is ended, by itself or by signals."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.launch import TESTS, WORKERS, environment

HEIGHTS = ("trainer", "session", "smp", "own")
# where the layer stands still, and the stages of the model
ASLEEP, IN_C = ("asleep", 2), ("in C", 1)


def scripts(places, stall_s):
    """Starts a process for each (height, (how, stages)), whose layer stands still from now on."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    worker = str(WORKERS / "stands.py")
    processes = [
        subprocess.Popen(
            [sys.executable, worker, height, how, str(stages), str(stall_s)],
            env=environment({"PYTHONPATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for height, (how, stages) in places
    ]
    for process in processes:
        if process.stdout.readline() != "it stands\n":
            pytest.fail(process.communicate(timeout=60)[1])
    return processes


def ends_of(processes):
    """The exit codes, and what was printed as errors."""
    try:
        errors = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, errors, strict=True)]


@pytest.mark.parametrize("place", [ASLEEP, pytest.param(IN_C, marks=pytest.mark.thorough)])
def test_stall_s_ends_a_script_of_one_process_at_every_height(place):
    for code, errors in ends_of(scripts([(height, place) for height in HEIGHTS], 1)):
        assert code == 4, errors
        assert "error: rank 0 has stood still for 1 s in" in errors
        assert "stands.py" in errors


@pytest.mark.parametrize("place", [ASLEEP, IN_C])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_script_whose_layer_does_not_return(number, place):
    # SIGTERM alone ends a script without a Trainer, as it ends any of PyTorch
    heights = HEIGHTS if number == signal.SIGINT else ("trainer",)
    processes = scripts([(height, place) for height in heights], 0)
    for process in processes:
        process.send_signal(number)
    time.sleep(2.5)  # those within two seconds may be one, which a launcher has passed on
    for process in processes:
        assert process.poll() is None
        process.send_signal(number)
    for code, errors in ends_of(processes):
        # by the signal itself; or by the thread that waits for it, if the main thread is blocked
        assert code in (-number, 128 + number), errors
        assert ("ended by a second signal" in errors) is (code == 128 + number)


@pytest.mark.parametrize("place", [ASLEEP, pytest.param(IN_C, marks=pytest.mark.thorough)])
def test_sigterm_ends_a_script_without_a_trainer_as_it_ends_any_of_pytorch(place):
    processes = scripts([(height, place) for height in HEIGHTS if height != "trainer"], 0)
    for process in processes:
        process.terminate()
    for code, errors in ends_of(processes):
        assert code == -signal.SIGTERM, errors


def test_a_signal_that_a_launcher_passes_on_is_not_a_second_one():
    (process,) = scripts([("trainer", ASLEEP)], 0)
    process.terminate()
    time.sleep(0.3)
    process.terminate()
    time.sleep(5)
    assert process.poll() is None
    process.terminate()
    ((code, errors),) = ends_of([process])
    assert code == -signal.SIGTERM, errors
