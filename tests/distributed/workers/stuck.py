"""A script at one of the heights, of which a rank does something wrong at some place.

    stuck.py FOLDER HEIGHT ENGINE KIND PLACE WHO STALL_S TIMEOUT_S

KIND: `stop`, it is stopped; `sleep`; `raise`; `alone` and `gather`, it calls a collective of
PyTorch or of the World that the others do not call; `slow`, each of its micro-batches takes
most of the limit, which is right. With `full:` in front, stderr is a full pipe that nobody reads.

PLACE: `start`, `first`, `between`, `step`, `optimizer`, `evaluate`, `save`, `end`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.nets import floats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import (
    Callback,
    EvalLoader,
    HybridModel,
    Loader,
    OptimizerStep,
    Session,
    Trainer,
    World,
)
from hybridtrain.checkpoint import CheckpointStore, save_run

folder, height, engine, kind, place, who, stall_s, timeout_s = sys.argv[1:]
FIRST, LATER = 1, 5  # the steps of `first` and `step`


class Now:
    """The step, whether the fault has been, and the world."""

    world: World | None = None
    step = 0
    done = False


unread: list[int] = []


def fill_stderr() -> None:
    """Makes stderr a full pipe."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    fcntl.fcntl(write_end, 1031, 4096)  # F_SETPIPE_SZ
    try:
        while True:
            os.write(write_end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write_end, True)
    os.dup2(write_end, 2)
    unread.append(read_end)  # or a write would fail


def fault(at: str) -> None:
    if at != place or os.environ["RANK"] != who or Now.done:
        return
    if kind == "slow":
        time.sleep(0.6 * float(stall_s))
        return
    Now.done = True
    if kind.endswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind.endswith("sleep"):
        time.sleep(10_000)
    elif kind.endswith("raise"):
        raise ArithmeticError("boom")
    elif kind == "gather":
        assert Now.world is not None
        Now.world.gather(None)
    elif kind == "alone":
        dist.all_reduce(torch.ones(1))


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            fault("evaluate" if Now.step else "")
        else:
            fault({FIRST: "first", LATER: "step"}.get(Now.step, ""))
        return super().forward(x)


def world() -> World:
    limits = {"stall_s": float(stall_s), "timeout_s": float(timeout_s)}
    Now.world = World.from_env(2, "cpu", engine=engine, **limits)
    return Now.world


def data(samples: int = 64) -> TensorDataset:
    return TensorDataset(floats(samples, 4), floats(samples, 4, seed=1))


def sgd(net: nn.Module) -> torch.optim.SGD:
    def before_step(*_: Any) -> None:
        if Now.step == LATER:
            fault("optimizer")

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(before_step)
    return optimizer


class Own:
    """A state of the user's, which all processes save."""

    def state_dict(self) -> dict[str, Any]:
        fault("save")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has nothing to load."""


def own(net: nn.Module) -> None:
    here = world()
    model = HybridModel(net, here, chunks=2)
    step = OptimizerStep(model, sgd(model))
    for batch in Loader(data(), batch_size=8, world=here).batches():
        Now.step += 1
        step.run([batch], F.mse_loss)
        if Now.step == LATER:
            fault("between")
    model.eval()
    for inputs, _ in EvalLoader(data(16), batch_size=8, world=here):
        model(inputs)
    save_run(step, folder, states={"own": Own()})
    fault("end")
    here.close()


def session(net: nn.Module) -> None:
    run = Session(world=world(), chunks=2)
    model, optimizer, train, evaluation = run.prepare(
        net,
        sgd(net),
        DataLoader(data(), batch_size=8),
        DataLoader(data(16), batch_size=8),
    )
    for inputs, targets in train:
        Now.step += 1
        run.forward_backward(inputs, targets, F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        if Now.step == LATER:
            fault("between")
    model.eval()
    for inputs, _ in evaluation:
        model(inputs)
    run.states["own"] = Own()
    run.save(folder)
    fault("end")
    run.close()


class Steps(Callback):
    def on_start(self, trainer: Any) -> None:
        Now.step += 1

    def on_step(self, trainer: Any, samples: int) -> None:
        if Now.step == LATER:
            fault("between")
        Now.step += 1

    def state_dict(self) -> dict[str, Any]:
        fault("save")
        return {}


def trainer(net: nn.Module) -> None:
    here = world()
    model = HybridModel(net, here, chunks=2)
    Trainer(
        model,
        sgd(model),
        F.mse_loss,
        Loader(data(), batch_size=8, world=here),
        epochs=1,
        evaluation=EvalLoader(data(16), batch_size=8, world=here),
        store=CheckpointStore(folder),
        checkpoint_every_steps=6,
        log_every=LATER,
        callbacks=[Steps()],
    ).fit()
    fault("end")
    here.close()


if kind.startswith("full"):
    fill_stderr()
fault("start")
torch.manual_seed(0)
heights: dict[str, Callable[[nn.Module], None]] = {
    "own": own,
    "session": session,
    "trainer": trainer,
}
heights[height](nn.Sequential(Layer(4, 4), nn.ReLU(), Layer(4, 4), nn.Linear(4, 4)))
print("the end was reached", flush=True)
