"""Two processes: every cell of the worker scripts, each with different data on each rank."""

import functools

import pytest
from support.launch import Results, worker_module

WORKERS = [
    "gradients", "heights", "loss_scaling", "matrix_cells", "shared_values", "sharded", "state",
    "traced",
]  # fmt: skip
CELLS = [(worker, cell) for worker in WORKERS for cell in worker_module(worker).cells.cells]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Launches each worker once, at its first cell."""
    return functools.cache(lambda worker: Results(worker, 2, tmp_path_factory.mktemp(worker)))


@pytest.mark.parametrize(("worker", "cell"), CELLS)
def test_two_processes(worker, cell, results):
    results(worker).check(cell)
