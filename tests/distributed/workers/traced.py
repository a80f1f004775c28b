"""What must hold between replicas of a traced model. Every rank has data of its own."""

import copy
import sys
import time

import pytest
import torch
from support.launch import Cells
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.deferred import construct
from hybridtrain.errors import UserError

cells = Cells()

WIDTH = 6


class Slow(nn.Linear):
    """A layer that takes its time; of a module that is looked into, tracing would lose the wait."""

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
    """Two inputs, a value that skips layers, a parameter of its own, two outputs."""

    def __init__(self, rank=0):
        super().__init__()
        # a layer is slow on one rank only: each would cut elsewhere if it were asked
        self.blocks = nn.ModuleList(Block(0.02 * (i == (5 if rank else 0))) for i in range(6))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, mask):
        y = x * self.scale
        for block in self.blocks:
            y = block(y) * mask
        return {"value": y + x, "norm": (y * self.scale).square().mean(1)}


def batch(rank, rows=5):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, WIDTH, generator=generator)
    return {"x": x, "mask": (torch.rand(rows, WIDTH, generator=generator) > 0.2).float()}


def loss_of(output, _=None):
    return output["value"].square().mean() + output["norm"].mean()


def hybrid(net, **options):
    world = World.from_env(nb_part=2, devices="cpu", timeout_s=60)
    return HybridModel(net, world, chunks=2, **options)


def assert_steps_as_both(model, whole):
    """A step of all replicas is one of the whole model on the rows of both."""
    rank = model.world.rank
    model.train_step(batch(rank), None, loss_of)
    expected: dict[str, torch.Tensor] = {}
    for other in range(model.world.size):
        net = copy.deepcopy(whole)
        for rows in (slice(0, 3), slice(3, 5)):
            part = {name: tensor[rows] for name, tensor in batch(other).items()}
            (loss_of(net(**part)) * len(part["x"]) / 5 / model.world.size).backward()
        for name, parameter in net.named_parameters():
            expected[name] = expected.get(name, 0) + parameter.grad
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


@cells.add("a traced model's replicas have the gradients of all rows")
def _(world):
    torch.manual_seed(0)
    net = Net()
    assert_steps_as_both(hybrid(net, split="size"), copy.deepcopy(net))


@cells.add("all ranks cut where rank 0 has measured")
def _(world):
    torch.manual_seed(0)
    net = Net(world.rank)
    model = hybrid(net, split="time", example_inputs=batch(world.rank))
    counts = world.gather([len(stage.layers) for stage in model.stages])
    assert counts == [counts[0]] * world.size
    plans = world.gather(model.plan)
    assert plans == [plans[0]] * world.size
    assert_steps_as_both(model, copy.deepcopy(net))


@cells.add("a model that waits for its first batch is cut equally on all ranks")
def _(world):
    torch.manual_seed(0)
    net = Net(world.rank)
    whole = copy.deepcopy(net)
    model = hybrid(net, split="time")
    assert_steps_as_both(model, whole)
    counts = world.gather([len(stage.layers) for stage in model.stages])
    assert counts == [counts[0]] * world.size


@cells.add("rank 0's initial values reach all replicas of a deferred model")
def _(world):
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(world.rank)  # the others would have drawn other values
    net = construct(Net)
    assert all(parameter.device.type == "meta" for parameter in net.parameters())
    model = hybrid(net, split="uniform")
    for (name, ours), theirs in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert_steps_as_both(model, plain)


@cells.add("a model that cannot be cut is one message on all ranks")
def _(world):
    class Decides(Net):
        def forward(self, x, mask):
            return super().forward(x, mask) if x.sum() > 0 else {}

    with pytest.raises(UserError, match=r"Decides cannot be traced.*x\.sum\(\) > 0"):
        hybrid(Decides(), example_inputs=batch(world.rank))
    with pytest.raises(UserError, match=r"no layer 'blocks\.9'"):
        hybrid(Net(), split=["blocks.9"])


if __name__ == "__main__":
    cells.main(sys.argv[1])
