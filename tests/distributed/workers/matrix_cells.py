"""The cells of the exactness matrix on two replicas, with different rows and row counts."""

import sys

import torch
from support.launch import Cells
from support.matrix import cells as matrix_cells
from support.matrix import check_cell

torch.set_num_threads(1)
cells = Cells()

for cell in matrix_cells():

    @cells.add(str(cell))
    def _(world, cell=cell):
        check_cell(cell, world.rank, world.size)


if __name__ == "__main__":
    cells.main(sys.argv[1])
