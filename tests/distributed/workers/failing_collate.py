"""A pipeline of three processes whose collate function drops most samples of the second batch.

Run by test_failing.py.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loss import cross_entropy
from hybridtrain.options import LoaderOptions

world = World.from_env(3, "cpu", timeout_s=60, engine="distributed")
data = TensorDataset(torch.arange(96.0).reshape(16, 6) / 96, torch.arange(16) % 3)
batches = 0


def collate(samples):
    """Keeps one sample of each batch after the first."""
    global batches
    batches += 1
    return default_collate(samples if batches == 1 else samples[:1])


net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model = HybridModel(net, world, chunks=2, split="uniform")
Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    cross_entropy,
    TrainLoader(data, 4, world, options=LoaderOptions(collate=collate)),
    steps=3,
).fit()
print("the end was reached")
world.close()
