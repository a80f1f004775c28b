"""A script of one process whose layer does not return: it is ended, by itself or by signals."""

import os
import signal
import time

import pytest
from support import forked
from support.launch import WORKERS, environment

HEIGHTS = ("trainer", "session", "smp", "own")
# where the layer stands still, and the stages of the model
ASLEEP, IN_C = ("asleep", 2), ("in C", 1)
PLACES = [ASLEEP, pytest.param(IN_C, marks=pytest.mark.thorough)]


@pytest.fixture
def scripts(tmp_path):
    """Starts a process for each height, whose layer stands still from now on.

    They are returned by the files of their outputs.
    """
    processes = {}

    def started(heights, place, stall_s):
        for height in heights:
            arguments = [height, *map(str, place), str(stall_s)]
            output = tmp_path / height
            output.touch()
            processes[output] = forked.start(
                WORKERS / "stands.py", arguments, environment(), output
            )
        for output, process in processes.items():
            while "it stands\n" not in output.read_text():
                assert process.is_alive(), output.read_text()
                time.sleep(0.05)
        return processes

    yield started
    forked.end(processes.values())


def ends_of(processes):
    """The exit codes, and what was printed."""
    for process in processes.values():
        process.join(60)
    return [(process.exitcode, output.read_text()) for output, process in processes.items()]


def send(number, processes):
    for output, process in processes.items():
        assert process.is_alive(), output.read_text()
        os.kill(process.pid, number)


@pytest.mark.parametrize("place", PLACES)
def test_stall_s_ends_a_script_of_one_process_at_every_height(place, scripts):
    for code, said in ends_of(scripts(HEIGHTS, place, 1)):
        assert code == 4, said
        assert "error: rank 0 has made no progress for 1 s in" in said
        assert "stands.py" in said


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_script_whose_layer_does_not_return(number, place, scripts):
    # SIGTERM alone ends a script without a Trainer, as it ends any of PyTorch
    heights = HEIGHTS if number == signal.SIGINT else ("trainer",)
    processes = scripts(heights, place, 0)
    send(number, processes)
    time.sleep(2.5)  # those within two seconds may be one, which a launcher has passed on
    send(number, processes)
    for code, said in ends_of(processes):
        # by the signal itself; or by the thread that waits for it, if the main thread is blocked
        assert code in (-number, 128 + number), said
        assert ("ended by a second signal" in said) is (code == 128 + number)


@pytest.mark.parametrize("place", PLACES)
def test_sigterm_ends_a_script_without_a_trainer_as_it_ends_any_of_pytorch(place, scripts):
    processes = scripts(HEIGHTS[1:], place, 0)
    send(signal.SIGTERM, processes)
    for code, said in ends_of(processes):
        assert code == -signal.SIGTERM, said


def test_a_signal_that_a_launcher_passes_on_is_not_a_second_one(scripts):
    process = scripts(["trainer"], ASLEEP, 0)
    send(signal.SIGTERM, process)
    time.sleep(0.3)
    send(signal.SIGTERM, process)
    time.sleep(5)
    send(signal.SIGTERM, process)
    ((code, said),) = ends_of(process)
    assert code == -signal.SIGTERM, said
