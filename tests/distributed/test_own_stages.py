"""A pipeline over processes: each one makes, loads and keeps the values of its own stages only."""

import functools

import pytest
from support.launch import Results, worker_module

CELLS = worker_module("own_stages").cells.cells


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Launches the worker once, at its first cell."""
    return functools.cache(lambda: Results("own_stages", 2, tmp_path_factory.mktemp("own_stages")))


@pytest.mark.parametrize("cell", CELLS)
def test_own_stages(cell, results):
    results().check(cell)
