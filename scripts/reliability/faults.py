"""A model, data and an optimizer with a fault, for the runs of this folder's scripts.

The environment variable FAULT says which: `kind:phase:rank`, such as `exception:forward:1`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

from hybridtrain.data.splits import DataSplits

# In which call of its phase a fault happens: in the first step (the data of one is read ahead), or
# in the fourth, since a run that stands still in its first steps is given more time, and a signal
# ends a process at once that has not begun to train. An evaluation has had a batch of four
# micro-batches before the first step.
_FIRST = {"setup": 1, "save": 1, "data": 14, "forward": 4, "backward": 4, "optimizer": 3}
_LATER = {"setup": 1, "save": 1, "data": 56, "forward": 14, "backward": 14, "optimizer": 4}
_FIRST["evaluate"] = _LATER["evaluate"] = 8

KIND, PHASE, RANK = (os.environ.get("FAULT", "none:none:0") + ":").split(":")[:3]
CALLS: dict[str, int] = {}


def fault(phase: str) -> None:
    """Does the fault, if this is its phase, rank and call."""
    CALLS[phase] = CALLS.get(phase, 0) + 1
    if phase != PHASE or os.environ.get("RANK", "0") != RANK:
        return
    if CALLS[phase] != (_LATER if KIND in ("sleep", "stop", "interrupt") else _FIRST).get(phase, 4):
        return
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    if KIND == "exception":
        raise ArithmeticError(f"boom in {phase}")
    if KIND == "exit":
        os._exit(7)
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "3":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "terminate":
        os.kill(os.getppid(), signal.SIGTERM)  # the launcher, which tells all its processes
        time.sleep(1)
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)
    if KIND == "segfault":
        ctypes.string_at(0)
    if KIND == "sleep":
        time.sleep(10_000)
    if KIND == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        torch.ones(2**28)
    if KIND == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        fault("backward")
        return gradient


class Faulty(nn.Module):
    """The identity, with the faults of a forward, a backward and an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`."""
        fault("forward" if self.training else "evaluate")
        if KIND == "nan" and CALLS["forward"] >= _FIRST["forward"] and self.training:
            x = x * float("nan")
        return _Backward.apply(x)


class FaultyLoss(nn.CrossEntropyLoss):
    """Cross entropy, with the fault of a loss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the loss."""
        fault("loss")
        return super().forward(input, target)


class FaultySGD(SGD):
    """SGD with the fault of an optimizer step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does a step."""
        fault("optimizer")
        if KIND == "disk":
            fault("save")
        super().step(closure)


class FaultyData(Dataset[tuple[Tensor, int]]):
    """128 random samples of 16 values and 4 classes; only those of the training have the fault."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._trains:
            fault("data")
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


def model() -> nn.Module:
    """Returns five layers; the fault is in the fourth, on the second of two stages."""
    fault("setup")
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), Faulty(), nn.Linear(64, 4)
    )


def data() -> DataSplits:
    """Returns the training and evaluation data."""
    return DataSplits(train=FaultyData(trains=True), eval=FaultyData(trains=False), collate=None)
