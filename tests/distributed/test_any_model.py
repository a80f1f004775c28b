"""Two processes with a model that is no chain: traced, measured."""

from pathlib import Path

import pytest
from launch import cells_of, launched

SCRIPT = Path(__file__).parent / "workers" / "any_model.py"

results = launched(SCRIPT, nproc=2)


@pytest.mark.parametrize("cell", cells_of(SCRIPT))
def test_two_processes(cell, results):
    results.check(cell)
