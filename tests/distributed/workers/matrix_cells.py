"""The cells of the exactness matrix on two replicas, with different rows and row counts."""

import sys

import torch
from support.launch import Cells
from support.matrix import FIRST, check_cell
from support.matrix import cells as matrix_cells

torch.set_num_threads(1)
cells = Cells()

for number, cell in enumerate(matrix_cells()):

    @cells.add(str(cell), thorough=number >= FIRST)
    def _(world, cell=cell):
        check_cell(cell, world.rank, world.size)

    @cells.add(f"forward-{cell}", thorough=number >= 3)
    def _(world, cell=cell):
        check_cell(cell, world.rank, world.size, engine="forward")


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
