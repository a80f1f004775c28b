"""A script that takes an optimizer step in its step: rank 1 must end both processes."""

import torch
from torch import nn
from torch.nn import functional as F

import hybridtrain.smp as smp

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x, y):
    model.backward(F.cross_entropy(model(x), y))
    optimizer.step()


train_step(model, torch.ones(4, 4), torch.tensor([0, 1, 2, 0]))
