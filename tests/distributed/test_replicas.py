"""Two processes: replicas with data of their own equal one process on the global batch."""

from pathlib import Path

import pytest
from launch import cells_of, launched

SCRIPT = Path(__file__).parent / "workers" / "replicas.py"

results = launched(SCRIPT, nproc=2)


@pytest.mark.parametrize("cell", cells_of(SCRIPT))
def test_two_processes(cell, results):
    results.check(cell)
