"""Two processes: every cell of the matrix equals the unsplit model fed with both replicas' rows."""

from pathlib import Path

import pytest
from launch import cells_of, launched

SCRIPT = Path(__file__).parent / "workers" / "matrix_cells.py"

results = launched(SCRIPT, nproc=2)


@pytest.mark.parametrize("cell", cells_of(SCRIPT))
def test_two_replicas_train_as_the_unsplit_model(cell, results):
    results.check(cell)
