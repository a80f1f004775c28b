"""One process: every cell of the matrix equals the unsplit model, bit for bit."""

import pytest
from support.cases import thorough
from support.matrix import FIRST, Cell, cells, check_cell, random_cells

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.mark.parametrize("cell", [*cells()[:FIRST], *thorough(cells()[FIRST:])], ids=str)
def test_training_equals_the_unsplit_model(cell: Cell) -> None:
    check_cell(cell)


@pytest.mark.thorough
@pytest.mark.parametrize("cell", sorted({*random_cells(80)} - {*cells()}, key=str), ids=str)
def test_training_equals_the_unsplit_model_in_more_combinations(cell: Cell) -> None:
    check_cell(cell)
