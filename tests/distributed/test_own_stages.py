"""A pipeline over processes: each one makes, loads and keeps the values of its own stages only."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import each_cell, environment


@each_cell({"own_stages": [2]})
def test_own_stages(worker, processes, cell, launched):
    launched(worker, processes).check(cell)


@pytest.mark.thorough
def test_no_process_has_the_memory_of_the_whole_model():
    """A small run of the benchmark: half of 53 million parameters in each of two processes.

    The shares are of weights and gradients. A process of the whole model would have 0.5 of them
    when it is constructed, and 1 when it is trained, beside what freed memory the C library keeps.
    """
    command = [sys.executable, "-m", "scripts.bench.big_model", "--processes=2"]
    done = subprocess.run(
        [*command, "--layers=4", "--width=1024", "--limits", "0.4", "0.9"],
        cwd=Path(__file__).parents[2],
        env=environment(),
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
