"""A script at one of the heights, of which a rank fails in its third step, or does other things."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from support.nets import floats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hybridtrain.smp as smp
from hybridtrain import HybridModel, Session, World

height, place, who = sys.argv[1:]
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
number = rank = 0


def fail(at: str) -> None:
    if (at, number, rank) == (place, 2, int(who)):
        raise ArithmeticError("boom")


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    fail("loss")
    return F.mse_loss(output, targets)


def with_smp() -> Callable[[], Any]:
    global rank, optimizer
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    rank = smp.rank()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(loss_of(model(x), y))

    return lambda: step(model, floats(4, 4), floats(4, 2))


def with_own_loop() -> Callable[[], Any]:
    global rank, optimizer, world
    world = block.enter_context(World.from_env(2, "cpu", engine="distributed"))
    rank = world.rank
    model = HybridModel(net, world, chunks=2)
    lr = 1.0 if (place, rank) == ("rate", int(who)) else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return lambda: model.train_step(floats(4, 4), floats(4, 2), loss_of)


def with_session() -> Callable[[], Any]:
    global rank, optimizer
    # two replicas, which have different samples
    session = block.enter_context(Session(world=World.from_env(1, "cpu")))
    rank = session.world.rank
    data = TensorDataset(floats(32, 4), floats(32, 2, seed=1))
    _, optimizer, loader = session.prepare(net, optimizer, DataLoader(data, batch_size=8))
    batches = iter(loader)
    return lambda: session.forward_backward(*next(batches), loss_of)


with ExitStack() as block:  # which must not leave the others before they know of the error
    step = {"smp": with_smp, "own": with_own_loop, "session": with_session}[height]()
    for number in range(4):
        optimizer.zero_grad()
        if (place, number, rank) == ("leaves", 2, int(who)):
            world.close()
            break
        step()
        optimizer.step()
        fail("between")
print("the end was reached")
