"""The cells of the exactness matrix on two replicas, with different rows and row counts."""

import copy
import sys

import torch
from support.launch import Cells
from support.matrix import FIRST, check_cell
from support.matrix import cells as matrix_cells
from torch import nn

from hybridtrain import HybridModel, World

torch.set_num_threads(1)
cells = Cells()
# with fp32, bf16 and most kinds of recomputation; the matrix in one process has every value
QUICK = ("linear", "stateful", "padded")

for number, cell in enumerate(matrix_cells()):

    @cells.add(str(cell), thorough=number >= FIRST or cell.case not in QUICK)
    def _(world, cell=cell):
        check_cell(cell, world.rank, world.size)


class UsesALaterWeight(nn.Module):
    """The first stage uses a weight that a layer of the last stage has."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.last(self.middle(self.first(x @ self.last.weight).tanh()).tanh())


@cells.add("a weight of a later stage is averaged over the replicas")
def _(world):
    torch.manual_seed(0)
    net = UsesALaterWeight()
    plain = copy.deepcopy(net)
    x = torch.randn(4 * world.size, 8)
    of_rank = x.chunk(world.size)[world.rank]
    pipes = World.from_env(nb_part=2, devices="cpu")
    model = HybridModel(net, pipes, chunks=1, example_inputs=of_rank)
    model.train_step(of_rank, of_rank * 2, nn.functional.mse_loss)
    nn.functional.mse_loss(plain(x), x * 2).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).grad, parameter.grad)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
