"""Both ranks, or one of them, fail in the second step. Run by the tests of failures."""

import sys

import torch
from support.engine import Faulty
from support.nets import floats
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain import HybridModel, World


class Grows(nn.Module):
    """Its output has one more column each time."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4

    def forward(self, x: Tensor) -> Tensor:
        self.width += 1
        return torch.cat([x, x.new_zeros(len(x), self.width)], 1)


def main(who: str, engine: str) -> None:
    sizes = who == "sizes"
    net = nn.Sequential(
        nn.Linear(4, 4),
        Grows() if sizes else nn.Linear(4, 4),
        nn.Softmax(1) if sizes else Faulty(),
        nn.Softmax(1) if sizes else nn.Linear(4, 2),
    )
    world = World.from_env(2, "cpu", timeout_s=600, engine=engine)
    model = HybridModel(net, world, chunks=2)
    seed = world.data_parallel_rank
    batch = floats(5, 4, seed=seed), None if sizes else floats(5, 2, seed=10 + seed)

    def loss(output: Tensor, targets: Tensor | None) -> Tensor:
        return output[:, :2].square().mean() if sizes else F.mse_loss(output, targets)

    model.train_step(*batch, loss)
    if who in ("all", str(world.rank)):
        net[2].fail_at("forward", 0)
    model.train_step(*batch, loss)
    print("the end was reached")


if __name__ == "__main__":
    main(*sys.argv[2:])  # the first one is for the output
