"""A model, data and an optimizer with a fault, and a training of them at each level of the API.

The environment variable FAULT says which: `kind:phase:rank`, such as `exception:forward:1`. The
command line names the parts as faults.model and so on; a script of another level is

    python scripts/reliability/faults.py LEVEL ENGINE STALL_S STEPS
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hybridtrain import (
    Callback,
    EvalLoader,
    HybridModel,
    Loader,
    OptimizerStep,
    Session,
    Trainer,
    TrainerOptions,
    World,
)
from hybridtrain.checkpoint import CheckpointStore, save_run
from hybridtrain.data.splits import DataSplits

KIND, PHASE, RANK = (os.environ.get("FAULT", "none:none:0") + ":").split(":")[:3]
# with a full pipe in place of stderr, which nobody reads
HAS_FULL_PIPE, KIND = KIND.startswith("full-"), KIND.removeprefix("full-")
# How many steps come before a fault: three if a process stands still, since the first steps are
# given more time, and if it gets a signal, which ends a process that has not begun to train.
AFTER_STEPS = {"setup": 0}.get(
    PHASE, 3 if KIND in ("sleep", "stop", "alone", "slow", "interrupt") else 1
)
AFTER_SAMPLES = 40  # in a data worker, which knows no steps
done = {"steps": 0, "samples": 0, "reads": 0}
BATCH = 16


def fault(phase: str) -> None:
    """Does the fault, if this is its phase and rank; each time, since checks may call a copy."""
    if phase == "data" and get_worker_info() is not None:
        done["samples"] += 1
        phase = "worker"
    is_due = done["steps"] >= AFTER_STEPS or done["samples"] >= AFTER_SAMPLES
    if (phase, os.environ.get("RANK", "0")) != (PHASE, RANK) or not is_due:
        return
    at = Path(os.environ["FAULT_TIME"])
    is_first = not at.exists()  # a file, because a check restores what a forward changes
    if is_first:
        at.touch()
    if KIND == "exception":
        raise ArithmeticError(f"boom in {phase}")
    if KIND == "exit":
        os._exit(7)
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "3":
        os.kill(os.getpid(), signal.SIGKILL)
    if KIND in ("terminate", "interrupt") and is_first:
        # to the launcher, which tells all its processes, or to this one
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        number = signal.SIGTERM if KIND == "terminate" else signal.SIGINT
        os.kill(os.getppid() if launched else os.getpid(), number)
        time.sleep(1)
    if KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if KIND == "segfault":
        ctypes.string_at(0)
    if KIND == "sleep":
        time.sleep(10_000)
    if KIND == "slow" and done["steps"] == AFTER_STEPS:
        time.sleep(0.6 * float(os.environ["STALL_S"]))
    if KIND == "alone":
        dist.all_reduce(torch.ones(1))
    if KIND == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))
        try:
            torch.ones(2**28)
        finally:  # the next thread must start
            resource.setrlimit(resource.RLIMIT_AS, before)
    if KIND == "disk":
        os.fsync = _full_disk


def _full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        if KIND == "nan" and done["steps"] >= AFTER_STEPS and self.training:
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

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        if KIND == "differ" and os.environ.get("RANK") == RANK:
            Path(os.environ["FAULT_TIME"]).touch()
            lr *= 10
        super().__init__(params, lr, **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does a step."""
        # the command line tries its optimizer before the processes meet, after its first batch
        trains = PHASE == "worker" or done["reads"] > BATCH
        if trains:
            fault("optimizer")
        super().step(closure)
        done["steps"] += trains


class FaultyState(Callback):
    """A state that all processes save, with the fault of a save."""

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing."""
        fault("save")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has nothing to load."""


class FaultyData(Dataset[tuple[Tensor, int]]):
    """128 random samples of 16 values and 4 classes; only those of the training have the fault."""

    def __init__(self, trains: bool) -> None:
        self._trains = trains

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        done["reads"] += 1
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


def fill_stderr() -> int:
    """Makes stderr a full pipe; returns the end to read from, which must stay open."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    fcntl.fcntl(write_end, 1031, 4096)  # F_SETPIPE_SZ
    os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)
    os.dup2(write_end, 2)
    return read_end


def train(level: str, engine: str, stall_s: float, steps: int) -> None:
    """Trains at a level of the API, with evaluations after every fourth step, and a checkpoint."""
    folder = Path(os.environ["FAULT_TIME"]).parent / "saved"
    nb_part, workers = 2, int(PHASE == "worker")
    world = World.from_env(nb_part, "cpu", engine=engine, stall_s=stall_s, timeout_s=12 * stall_s)
    options: dict[str, Any] = {"chunks": 4, "split": [2, 3]}
    splits, loss = data(), FaultyLoss()
    if level == "session":
        session = Session(world=world, **options)
        net = model()
        optimizer: Any = FaultySGD(net.parameters(), lr=0.01)
        loaders = [DataLoader(s, BATCH, num_workers=workers) for s in (splits.train, splits.eval)]
        hybrid, optimizer, batches, held_out = session.prepare(net, optimizer, *loaders)
        while session.steps < steps:
            for inputs, targets in batches:
                session.forward_backward(inputs, targets, loss)
                optimizer.step()
                optimizer.zero_grad()
                if session.steps % 4 == 0:
                    hybrid.eval()
                    with torch.no_grad():
                        hybrid(next(iter(held_out))[0])
                    hybrid.train()
        session.states["faulty"] = FaultyState()
        session.save(folder)
        session.close()
        return
    hybrid = HybridModel(model(), world, **options)
    optimizer = FaultySGD(hybrid.parameters(), lr=0.01)
    loader = Loader(splits.train, BATCH, world, workers=workers)
    held_out = EvalLoader(splits.eval, BATCH, world)
    if level == "trainer":
        counts = TrainerOptions(steps=steps, log_every=4, eval_every=4, max_skipped=2)
        own: dict[str, Any] = {"store": CheckpointStore(folder), "callbacks": [FaultyState()]}
        Trainer(hybrid, optimizer, loss, loader, counts, evaluation=held_out, **own).fit()
    while level == "loop" and done["steps"] < steps:
        for batch in loader.batches():
            hybrid.train_step(batch.inputs, batch.targets, loss)
            optimizer.step()
            optimizer.zero_grad()
            if done["steps"] % 4 == 0:
                with hybrid.evaluating(), torch.no_grad():
                    hybrid(next(iter(held_out))[0])
    if level == "loop":
        save_run(OptimizerStep(hybrid, optimizer), folder, states={"faulty": FaultyState()})
    world.close()


if __name__ == "__main__":
    if HAS_FULL_PIPE:
        unread = fill_stderr()
    if sys.argv[1] == "command":  # in a process that `table` has forked
        from hybridtrain.cli import main

        sys.exit(main(sys.argv[2:]))
    train(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
