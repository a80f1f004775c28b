"""What replicas share besides gradients: buffers, draws, evaluations and messages."""

import copy
import sys

import pytest
import torch
import torchmetrics
from support.compare import (
    CLOSE,
    assert_same,
    assert_same_on_all_ranks,
    hybrid,
    replica_step,
    share,
    square_loss,
)
from support.launch import Cells
from support.nets import classification, floats, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from hybridtrain import Trainer
from hybridtrain.data.loader import EvalLoader
from hybridtrain.data.stream import StreamLoader
from hybridtrain.errors import UserError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import accuracy
from hybridtrain.options import LoaderOptions

cells = Cells()

ROWS = (8, 6)


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))


def buffers(net):
    return dict(net.named_buffers())


@cells.add("BatchNorm's buffers are rank 0's on all ranks after sync_buffers and at each step")
def _buffers(world):
    net = norms()
    model = hybrid(net, chunks=2)
    replica_step(model, classification(14), ROWS)
    everyones = world.gather({name: buffer.clone() for name, buffer in net.named_buffers()})
    assert not torch.equal(everyones[0]["1.running_mean"], everyones[1]["1.running_mean"])
    model.sync_buffers()
    assert_same(buffers(net), everyones[0])
    # a step begins with rank 0's: the result is that of a net with rank 0's
    twin = copy.deepcopy(net)
    if world.rank:
        net[1].running_mean.fill_(99.0)
        net[3].running_mean.fill_(99.0)
    batch = classification(14, 1)
    replica_step(model, batch, ROWS)
    inputs, _ = share(batch, ROWS, world.rank)
    for part in inputs.split(len(inputs) // 2):
        twin(part)
    assert_same(buffers(net), buffers(twin), "second step", **CLOSE)


@cells.add("without broadcast_buffers the buffers stay each replica's own from step to step")
def _own_buffers(world):
    net = norms()
    model = hybrid(net, chunks=1, broadcast_buffers=False)
    twin = copy.deepcopy(net)
    for seed in (0, 1):
        batch = classification(14, seed)
        twin.load_state_dict({**net.state_dict(), **buffers(twin)})
        replica_step(model, batch, ROWS)
        twin(share(batch, ROWS, world.rank)[0])
    assert_same(buffers(net), buffers(twin), "two steps", **CLOSE)


@cells.add("the buffers of a stage that trains nothing are rank 0's at each step too")
def _frozen_buffers(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Tanh())
    net[:2].requires_grad_(False)
    model = hybrid(net, chunks=2)
    for seed in (0, 1):
        replica_step(model, classification(14, seed), ROWS)
    model.sync_buffers()
    assert_same_on_all_ranks(world, buffers(net))
    assert net[1].running_mean.any()


def deferred(checkpoint):
    def check(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3))
        plain = nn.BatchNorm1d(6)
        model = hybrid(net, chunks=3, batch_norm="deferred", checkpoint=checkpoint)
        for seed in range(3):
            everyones = [floats(7 + r, seed=10 * seed + r) + r for r in range(2)]
            x = everyones[world.rank]
            model.train_step(x, None, square_loss)
            # a step begins with rank 0's buffers on all ranks
            before = {name: b.clone() for name, b in plain.named_buffers()}
            plain(x)
            assert_same(buffers(net[0]), buffers(plain), f"step {seed}", **CLOSE)
            plain.load_state_dict({**plain.state_dict(), **before})
            plain(everyones[0])
        model.sync_buffers()
        assert_same(buffers(net[0]), buffers(plain), "rank 0's", **CLOSE)
        assert_same_on_all_ranks(world, buffers(net[0]), "buffers")
        assert int(net[0].num_batches_tracked) == 3

    return check


for _checkpoint in ("never", "always"):
    cells.add(f"deferred statistics are rank 0's, once per step: checkpoint {_checkpoint}")(
        deferred(_checkpoint)
    )


@cells.add("evaluation over the replicas equals one process")
def _evaluation(world):
    for total in (11, 4, 1):  # of one sample, a replica has none
        torch.manual_seed(0)
        net = mlp()
        model = hybrid(net, chunks=3)
        inputs, targets = classification(total, seed=total)
        metrics = {
            "accuracy": accuracy(),
            "torchmetrics": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
        }
        loader = EvalLoader(TensorDataset(inputs, targets), 4, world)
        result = evaluate(model, loader, F.cross_entropy, metrics)
        with torch.no_grad():
            outputs = net(inputs)
        assert result["samples"] == total
        right = float((outputs.argmax(1) == targets).double().mean())
        assert abs(result["accuracy"] - right) < 1e-12, (result, right)
        assert abs(result["torchmetrics"] - right) < 1e-6, (result, right)  # a float32
        assert abs(result["loss"] - float(F.cross_entropy(outputs, targets))) < 1e-6
        assert world.gather(result)[0] == result


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, x):
        self.masks.append(F.dropout(torch.ones(64), 0.5) == 0)
        return x


@cells.add("dropout draws differ between replicas")
def _draws(world):
    net = nn.Sequential(nn.Linear(6, 6), Noting(), nn.Linear(6, 3))
    replica_step(hybrid(net, chunks=2), classification(8), (4, 4))
    masks = [tuple(mask.tolist()) for masks in world.gather(net[1].masks) for mask in masks]
    assert len(set(masks)) == len(masks) == 4


@cells.add("an error on rank 0 is raised on all ranks by on_main")
def _on_main(world):
    def fail(error):
        raise error

    assert world.on_main(lambda: 5) == (5 if world.is_main else None)
    for error, expected, text in [
        (UserError("no such data"), UserError, "no such data"),
        (KeyError("k"), RuntimeError, "rank 0 failed: 'k'"),
    ]:
        with pytest.raises(type(error) if world.is_main else expected) as caught:
            world.on_main(lambda error=error: fail(error))
        assert text in str(caught.value) or caught.value is error
    calls = []
    world.on_main(lambda: calls.append(1))
    assert len(calls) == (1 if world.is_main else 0)


@cells.add("values are sent from rank 0, gathered by all ranks and summed")
def _collectives(world):
    assert world.broadcast({"rank": world.rank}) == {"rank": 0}
    assert world.gather(world.rank) == list(range(world.size))
    assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    tensor = torch.full((3,), float(world.rank + 1))
    world.broadcast_tensor(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert (world.launcher, world.size, world.local_rank) == ("torchrun", 2, world.rank)


class Uneven(IterableDataset):
    """7 samples on rank 0 and 2 on rank 1."""

    def __init__(self, rank):
        self.samples = [(5, 1, 6, 2, 0, 8, 4), (7, 3)][rank]

    def __iter__(self):
        inputs, targets = classification(9)
        yield from ((inputs[i], targets[i]) for i in self.samples)


@cells.add("a stream that ends unevenly gives the same steps as its global batches")
def _uneven_stream(world):
    net = mlp()
    plain = copy.deepcopy(net)
    model = hybrid(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = StreamLoader(Uneven(world.rank), 4, world, options=LoaderOptions(divided=True))
    trainer = Trainer(model, optimizer, F.cross_entropy, loader, steps=8, log_every=100)
    trainer.fit()
    assert (trainer.epoch, trainer.batch, trainer.samples) == (2, 0, 18)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    inputs, targets = classification(9)
    for samples in [(5, 1, 7, 3), (6, 2), (0, 8), (4,)] * 2:
        own.zero_grad()
        F.cross_entropy(plain(inputs[list(samples)]), targets[list(samples)]).backward()
        own.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert_same_on_all_ranks(world, dict(model.net.named_parameters()))


if __name__ == "__main__":
    cells.main(sys.argv[1])
