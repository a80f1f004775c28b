"""A script at one of the heights whose layer does not return: asleep, or in a call of C."""

import ctypes
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from support.nets import floats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hybridtrain.smp as smp
from hybridtrain import HybridModel, Session, World
from hybridtrain.data import TrainLoader
from hybridtrain.loop import Trainer

height, how, nb_part, stall_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


class Stands(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Stands.calls += 1
        if Stands.calls > 20:
            if how == "in C":  # no signal ends the call: another thread gets it
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            print("it stands", flush=True)
            wait = ctypes.CDLL(None).sleep if how == "in C" else time.sleep
            wait(10_000)
        return x


net = nn.Sequential(nn.Linear(4, 4), Stands(), nn.Linear(4, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = TensorDataset(floats(64, 4), floats(64, 4, seed=1))


def world() -> World:
    return World.from_env(nb_part, "cpu", stall_s=stall_s)


def with_trainer() -> Callable[[], Any]:
    here = world()
    model = HybridModel(net, here)
    loader = TrainLoader(data, batch_size=8, world=here)
    return Trainer(model, optimizer, F.mse_loss, loader, epochs=20).fit


def with_session() -> Callable[[], Any]:
    session = Session(world=world())
    _, own, loader = session.prepare(net, optimizer, DataLoader(data, batch_size=8))

    def loop() -> None:
        for _ in range(20):
            for inputs, targets in loader:
                session.forward_backward(inputs, targets, F.mse_loss)
                own.step()
                own.zero_grad()

    return loop


def with_smp() -> Callable[[], Any]:
    own = {"devices": "cpu", "engine": "local", "stall_s": stall_s}
    smp.init({"pipeline_parallel_degree": nb_part, "microbatches": 2, "hybridtrain": own})
    model = smp.DistributedModel(net)

    @smp.step
    def step(model: Any, x: Tensor, y: Tensor) -> None:
        model.backward(F.mse_loss(model(x), y))

    return lambda: [step(model, floats(8, 4), floats(8, 4)) for _ in range(20)]


def with_own_loop() -> Callable[[], Any]:
    model = HybridModel(net, world())
    return lambda: [model.train_step(floats(8, 4), floats(8, 4), F.mse_loss) for _ in range(40)]


heights = {
    "trainer": with_trainer,
    "session": with_session,
    "smp": with_smp,
    "own": with_own_loop,
}
heights[height]()()
print("the end was reached")
