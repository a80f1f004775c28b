"""A pipeline over processes: each one makes, loads and keeps the values of its own stages only."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import Results, environment, worker_module

CELLS = worker_module("own_stages").cells.cells


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Launches the worker once, at its first cell."""
    return functools.cache(lambda: Results("own_stages", 2, tmp_path_factory.mktemp("own_stages")))


@pytest.mark.parametrize("cell", CELLS)
def test_own_stages(cell, results):
    results().check(cell)


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
