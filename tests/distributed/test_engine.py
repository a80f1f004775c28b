"""Two processes: ties, skips, deferred norms and loss scaling over replicas with their own data."""

from pathlib import Path

import pytest
from launch import cells_of, launched

SCRIPT = Path(__file__).parent / "workers" / "engine.py"

results = launched(SCRIPT, nproc=2)


@pytest.mark.parametrize("cell", cells_of(SCRIPT))
def test_two_replicas(cell, results):
    results.check(cell)
