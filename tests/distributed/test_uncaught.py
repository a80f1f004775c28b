"""The uncaught error of a script's process is what all its processes say."""

import os
import socket
import subprocess
import sys

import pytest
from support.launch import TESTS, WORKERS, environment

HOST = os.uname().nodename


def last_words(*arguments):
    """What two processes of a script print as errors; no launcher ends one after the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared = {**size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKERS / "uncaught.py"), *arguments],
            env=environment({**shared, "RANK": rank, "LOCAL_RANK": rank}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("height", "place", "who", "name", "where"),
    [
        ("smp", "loss", 1, "rank 1 (stage 1, {})", " (in the forward of micro-batch 0 on stage 1"),
        ("own", "between", 0, "rank 0 (stage 0, {})", ""),
        ("session", "loss", 1, "rank 1", " (in the forward of micro-batch 0 on stage 0"),
    ],
)
def test_an_uncaught_error_is_the_last_line_of_every_process(height, place, who, name, where):
    found = last_words(height, place, str(who))
    for rank, (code, output, errors) in enumerate(found):
        assert code == 1, errors
        assert "the end was reached" not in output
        last = errors.splitlines()[-1]
        assert last.startswith(f"error: {name.format(HOST)} failed: ArithmeticError: boom{where}")
        assert "peer" not in errors
        assert ("Traceback" in errors) is (rank == who)


def test_a_process_that_leaves_too_early_is_named():
    (code, _, errors), (_, output, _) = last_words("own", "leaves", "1")
    assert "the end was reached" in output
    assert code == 1
    assert errors.splitlines()[-1] == (
        f"error: rank 1 (stage 1, {HOST}) has come to its end while rank 0 waited for it: every "
        f"process has to take the same number of steps"
    )
