"""One process: every cell of the matrix equals the unsplit model, bit for bit."""

import pytest
from support.matrix import Cell, cells, check_cell

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.mark.parametrize("cell", cells(more=80), ids=str)
def test_training_equals_the_unsplit_model(cell: Cell) -> None:
    check_cell(cell)
