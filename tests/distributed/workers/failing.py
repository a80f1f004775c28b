"""Both ranks, or one of them, fail in the second step. Run by test_failing.py."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from hybridtrain import HybridModel, World


class Faulty(nn.Module):
    fail = False

    def forward(self, x):
        if self.fail:
            raise ArithmeticError("boom")
        return x


def main(who: str) -> None:
    world = World.from_env(nb_part=2, devices="cpu", timeout_s=60)
    torch.manual_seed(world.rank)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Faulty(), nn.Linear(4, 2))
    model = HybridModel(net, world, chunks=2)
    model.train_step(torch.randn(5, 4), torch.randn(5, 2), F.mse_loss)
    net[2].fail = who in ("all", str(world.rank))
    model.train_step(torch.randn(5, 4), torch.randn(5, 2), F.mse_loss)
    print("the end was reached")


if __name__ == "__main__":
    main(sys.argv[1])
