"""The files of a checkpoint are byte for byte what they were, whoever writes them."""

import functools

import pytest
from support.launch import Results, worker_module

CELLS = worker_module("checkpoint_bytes").cells.cells


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return functools.cache(
        lambda processes: Results("checkpoint_bytes", processes, tmp_path_factory.mktemp("bytes"))
    )


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_checkpoint_bytes(cell, processes, results):
    results(processes).check(cell)
