"""Layers and data that take a known time for each sample: devices that are emulated by sleeping."""

import statistics
import time

import torch
from torch import nn

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loop import Tracker
from hybridtrain.loss import cross_entropy
from hybridtrain.schedule import Account


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, seconds):
        ctx.seconds = seconds
        time.sleep(seconds * len(value))
        ctx.save_for_backward(value)  # or a recomputation would stop before it comes here
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds * len(gradient))
        return gradient, None


class SlowLinear(nn.Linear):
    """A layer that takes `seconds` for a sample forward, and twice as long backward."""

    def __init__(self, seconds, width=4):
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, value):
        return _Sleep.apply(super().forward(value), self.seconds)


class SlowData(torch.utils.data.Dataset):
    """Samples that take `seconds` each to load."""

    def __init__(self, seconds, samples=640, width=4):
        drawn = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, width, generator=drawn)
        self.targets = torch.randint(0, width, (samples,), generator=drawn)
        self.seconds = seconds

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


def trained(layers, nb_part, engine="local", chunks=4, **settings):
    """A trainer that has trained slow layers over all processes.

    All of its eight steps are recorded: the mean over them is what it should be on a busy machine
    too, where one step or another is interrupted for longer than it takes.
    """
    world = World.from_env(nb_part, "cpu", engine=engine)
    net = nn.Sequential(*map(SlowLinear, layers))
    model = HybridModel(net, world, chunks=chunks, split="uniform")
    data = TrainLoader(SlowData(0.0), 16 * world.data_parallel_size, world)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    recorder = Logged()
    trainer = Trainer(
        model,
        optimizer,
        cross_entropy,
        data,
        steps=8,
        log_every=1,
        callbacks=[recorder],
        **settings,
    )
    trainer.recorder = recorder
    trainer.fit()
    return trainer


class Logged(Tracker):
    """Keeps what is logged."""

    def __init__(self):
        self.values = []

    def on_log(self, run, values):
        self.values.append(dict(values))


def assert_names_slow_replica(trainer, slowest):
    """Checks that rank 0's log and the advice of all ranks name the replica that is slowest."""
    assert any(f"replica {slowest} is slower than the others" in line for line in trainer.advice)
    if trainer.world.is_main:
        logged = trainer.recorder.values
        assert statistics.mode(values["replicas/slowest"] for values in logged) == slowest
        for values in logged:
            assert values["replicas/slowest_ms"] > values["replicas/mean_ms"] > 0


def check_rows(trainer, expected):
    """Checks that an account has these (replica, device), each with parts that make a step."""
    account = trainer.account
    rows = [(row["replica"], row["device"]) for row in account["devices"]]
    assert rows == expected
    for row in account["devices"]:
        parts = [row[name] for name in Account._fields]
        assert min(parts) >= 0, row
        # the processes begin and end a step a little apart
        assert abs(sum(parts) / account["step_ms"] - 1) < 0.5
