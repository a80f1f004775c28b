"""Pipelines over two processes: the cells of the exactness matrix, and what is special to them."""

import sys
from dataclasses import replace

import torch
from support.launch import Cells
from support.matrix import cells as matrix_cells
from support.matrix import check_cell

torch.set_num_threads(1)
cells = Cells()

for cell in {replace(cell, nb_part=2): None for cell in matrix_cells()}:

    @cells.add(str(cell))
    def _(world, cell=cell):
        check_cell(cell, engine="distributed")


if __name__ == "__main__":
    cells.main(sys.argv[1])
