"""A script whose second replica has a batch more than the first."""

import torch
from torch import nn
from torch.nn import functional as F

import hybridtrain.smp as smp

smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})


@smp.step
def train_step(model, x, y):
    model.backward(F.cross_entropy(model(x), y))


model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 3)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2 + smp.dp_rank()):
    train_step(model, torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))
    optimizer.step()
