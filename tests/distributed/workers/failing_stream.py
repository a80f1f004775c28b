"""A pipeline of four processes over a stream that only the first one cannot read to the end.

Run by test_failing.py.
"""

import sys

import torch
from torch import nn
from torch.utils.data import IterableDataset

from hybridtrain import EvalLoader, HybridModel, Trainer, World
from hybridtrain.data import StreamLoader
from hybridtrain.loss import cross_entropy

_, failing = sys.argv[1:]
world = World.from_env(4, "cpu", timeout_s=60, engine="distributed")


class Samples(IterableDataset):
    """22 samples, of which the first process reads 15 if it fails."""

    def __init__(self, fails: bool) -> None:
        self.last = 15 if fails and world.rank == 0 else 22

    def __iter__(self):
        drawn = torch.Generator().manual_seed(0)
        for number in range(22):
            if number == self.last:
                raise ArithmeticError("boom")
            yield torch.randn(6, generator=drawn), number % 3


net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
model = HybridModel(net, world, chunks=2, split="uniform")
Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    cross_entropy,
    StreamLoader(Samples(failing == "train"), 5, world),
    evaluation=EvalLoader(Samples(failing == "evaluation"), 5, world),
    steps=6,
    eval_every=2,
).fit()
print("the end was reached")
world.close()
