"""Replicas of a model that a batch or measured times split."""

import copy
import sys
import time

import pytest
import torch
from support.compare import CHUNKS, assert_same, grads, hybrid, micro_batches
from support.launch import Cells
from support.nets import WIDTH, floats
from torch import nn

from hybridtrain.errors import UserError

cells = Cells()


class Slow(nn.Linear):
    """A layer that takes its time."""

    def __init__(self, seconds):
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.first, self.second = Slow(seconds), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.second(self.norm(self.first(x)).relu_())


class Net(nn.Module):
    """Two inputs, a value that skips layers, a parameter of the root, two outputs."""

    def __init__(self, rank=0):
        super().__init__()
        # another layer is slow on each rank: by its own times each would cut elsewhere, and the
        # test could fail; whether it passes does not depend on the times
        self.blocks = nn.ModuleList(Block(0.02 * (i == (5 if rank else 0))) for i in range(6))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, mask):
        y = x * self.scale
        for block in self.blocks:
            y = block(y) * mask
        return {"value": y + x, "norm": (y * self.scale).square().mean(1)}


def make(rank=0):
    torch.manual_seed(0)
    return Net(rank)


def batch(rank):
    return {"x": floats(9, seed=rank), "mask": (floats(9, seed=10 + rank) > -1).float()}


def loss_of(output, _=None):
    return output["value"].square().mean() + output["norm"].mean()


def assert_step_as_one_process(model, whole):
    """A step of all replicas equals one of the whole model on the samples of both."""
    rank, replicas = model.world.rank, model.world.size
    model.train_step(batch(rank), None, loss_of)
    expected = {}
    for other in range(replicas):
        net = copy.deepcopy(whole)
        for part, _ in micro_batches(batch(other), None, CHUNKS):
            (loss_of(net(**part)) * len(part["x"]) / 9 / replicas).backward()
        for name, gradient in grads(net).items():
            expected[name] = expected.get(name, 0) + gradient
    assert_same(grads(model), expected, rtol=1e-5, atol=1e-6)


def assert_cut_alike(model):
    world = model.world
    for fact in ([len(stage.layers) for stage in model.stages], model.plan):
        everyones = world.gather(fact)
        assert everyones == [everyones[0]] * world.size


@cells.add("replicas that the first batch splits have the gradients of all samples")
def _(world):
    assert_step_as_one_process(hybrid(make(), split="size"), make())


@cells.add("all ranks cut where rank 0 has measured", thorough=True)
def _(world):
    model = hybrid(make(world.rank), split="time", example_inputs=batch(world.rank))
    assert_cut_alike(model)
    assert_step_as_one_process(model, make(world.rank))


@cells.add("rank 0's initial values reach all replicas")
def _(world):
    plain = make()
    torch.manual_seed(world.rank)  # the others draw other values
    model = hybrid(Net())
    assert_same(model.state_dict(), plain.state_dict())
    assert_step_as_one_process(model, plain)


@cells.add("a model that cannot be cut is one message on all ranks")
def _(world):
    class Fails(Net):
        def forward(self, x, mask):
            if world.rank == 0:
                raise RuntimeError("on rank 0")
            return super().forward(x, mask)

    with pytest.raises(Exception, match="on rank 0") as caught:
        hybrid(Fails(), example_inputs=batch(world.rank))
    if world.rank == 0:
        assert any("forward of Fails fails" in note for note in caught.value.__notes__)
    model = hybrid(Net(), split=["blocks.9"])
    with pytest.raises(UserError, match=r"no layer 'blocks\.9'"):
        model.train_step(batch(world.rank), None, loss_of)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
