"""One process: every cell of the matrix equals the unsplit model, bit for bit."""

import pytest
import torch
from matrix import Cell, cells, check_cell


@pytest.fixture(autouse=True)
def _one_intra_op_thread():
    # kernels that share work out over threads may add in another order
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cell", cells(more=80), ids=str)
def test_training_equals_the_unsplit_model(cell: Cell) -> None:
    check_cell(cell)
