"""A script of one process whose layer does not return: it is ended, by itself or by signals."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.launch import TESTS, WORKERS, environment

HEIGHTS = ("trainer", "session", "smp", "own")


def started(height, how, nb_part, stall_s):
    """A process of the script, whose layer stands still from now on."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    script = [str(WORKERS / "stands.py"), height, how, str(nb_part), str(stall_s)]
    process = subprocess.Popen(
        [sys.executable, *script],
        env=environment({"PYTHONPATH": path}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.stdout.readline() != "it stands\n":
        pytest.fail(process.communicate(timeout=60)[1])
    return process


def end_of(process):
    """The exit code, and what was printed as errors."""
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize(("how", "nb_part"), [("asleep", 1), ("asleep", 2), ("in C", 1)])
@pytest.mark.parametrize("height", HEIGHTS)
def test_stall_s_ends_a_script_of_one_process_at_every_height(height, how, nb_part):
    code, errors = end_of(started(height, how, nb_part, 1))
    assert code == 4, errors
    assert "error: rank 0 has stood still for 1 s in" in errors
    assert "stands.py" in errors


@pytest.mark.parametrize(("how", "nb_part"), [("asleep", 2), ("in C", 1)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("height", HEIGHTS)
def test_a_second_signal_ends_a_script_whose_layer_does_not_return(height, number, how, nb_part):
    process = started(height, how, nb_part, 0)
    process.send_signal(number)
    if number == signal.SIGINT or height == "trainer":
        # those within two seconds may be one, which a launcher has passed on
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(number)
    code, errors = end_of(process)
    # by the signal itself; or by the thread that watches for it, where the main thread is blocked
    assert code in (-number, 128 + number), errors
    assert ("ended by a second signal" in errors) is (code == 128 + number)


def test_a_signal_that_a_launcher_passes_on_is_not_a_second_one():
    process = started("trainer", "asleep", 2, 0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    time.sleep(5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    code, errors = end_of(process)
    assert code != 0, errors
