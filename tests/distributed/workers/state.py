"""What replicas share besides gradients: buffers, draws, evaluations and messages."""

import copy
import pickle
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from safetensors.torch import save_file
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
from support.slow import assert_names_slow_replica, check_rows, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from hybridtrain import Trainer
from hybridtrain._base import objects
from hybridtrain._base.problem import copied_problem
from hybridtrain.checkpoint import CheckpointStore, init_from, saving
from hybridtrain.checkpoint import restore_checkpoint as restore
from hybridtrain.data import EvalLoader, StreamLoader
from hybridtrain.errors import CheckpointError, ConfigError, OtherProcessError, UserError
from hybridtrain.loop import evaluate
from hybridtrain.loss import accuracy
from hybridtrain.options import LoaderOptions
from hybridtrain.pipeline import check_replicas
from hybridtrain.schedule import Account

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


class MeanOfCode(nn.Module):
    """A buffer that no layer has, changed by code between layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.rand(8))

    def forward(self, x):
        y = self.first(x).tanh()
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return self.last(y - self.mean)


@cells.add("a buffer that no layer has is rank 0's on all ranks, from the start and at each step")
def _buffers_of_code(world):
    torch.manual_seed(world.rank)
    net = MeanOfCode()
    model = hybrid(net, chunks=2, example_inputs=classification(14)[0])
    assert_same_on_all_ranks(world, {**buffers(net), **dict(net.named_parameters())})
    for seed in (0, 1):
        twin = copy.deepcopy(net)
        of_first = world.broadcast(buffers(net))
        twin.mean.copy_(of_first["mean"])
        batch = classification(14, seed)
        replica_step(model, batch, ROWS)
        inputs, _ = share(batch, ROWS, world.rank)
        for part in inputs.split(len(inputs) // 2):
            twin(part)
        assert_same(buffers(net), buffers(twin), "of a step", **CLOSE)


class MovingMean(nn.Linear):
    """Puts a new tensor in the place of its buffer in each forward."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


@cells.add("buffers that a forward replaces are rank 0's at each step, also when recomputed")
def _replaced_buffers(world):
    torch.manual_seed(0)
    net = nn.Sequential(MovingMean(), nn.Tanh(), MovingMean())
    model = hybrid(net, chunks=2, recompute="always")
    for seed in (0, 1, 2):
        replica_step(model, (floats(14, seed=seed), floats(14, seed=9)), ROWS, F.mse_loss)
        model.sync_buffers()
        assert_same_on_all_ranks(world, buffers(net), f"step {seed}")


def deferred(recompute):
    def check(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3))
        plain = nn.BatchNorm1d(6)
        model = hybrid(net, chunks=3, batch_norm="deferred", recompute=recompute)
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


for _recompute in ("never", "always"):
    cells.add(
        f"deferred statistics are rank 0's, once per step: recompute {_recompute}",
        thorough=_recompute == "never",
    )(deferred(_recompute))


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


def mean_gradients(world, net, batch):
    """The gradients of the plain net, on the samples of all ranks."""
    twin = copy.deepcopy(net)
    twin.zero_grad()
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


@cells.add("parameters may be frozen and freed between steps, on all ranks alike")
def _freezing(world):
    net = mlp()
    model = hybrid(net, chunks=2)
    for seed, frozen in enumerate([[], [0, 2], [0, 2, 4, 6, 7], [0]]):
        for index, layer in enumerate(net):
            layer.requires_grad_(index not in frozen)
        net.zero_grad()
        if len(frozen) == 5:
            with pytest.raises(UserError, match="no trainable parameter"):
                replica_step(model, classification(14, seed), ROWS)
            continue
        batch = classification(14, seed)
        replica_step(model, batch, ROWS)
        mine = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        assert_same(mine, mean_gradients(world, net, batch), f"{frozen}", **CLOSE)
        assert_same_on_all_ranks(world, mine)


@cells.add("what is frozen must be the same on all ranks, or it is one line on all of them")
def _changed_unlike(world):
    net = mlp()
    model = hybrid(net, chunks=2)
    net[world.rank * 2].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"on rank 0 requires_grad of 0\.weight.*rank 1 .* 2"):
        replica_step(model, classification(14), ROWS)


@cells.add("a parameter that is frozen on some ranks alone is one line there")
def _changed_alone(world):
    model = hybrid(mlp(), chunks=2)
    if world.rank:
        model.net[0].requires_grad_(False)
        with (
            mock.patch.object(model.world, "all_arrive", return_value=False),  # nobody came
            pytest.raises(ConfigError, match=r"requires_grad of 0\..*on rank 1, but not on all"),
        ):
            model.train_step(*classification(4), F.cross_entropy)


@cells.add("replicas that are apart by one bit of one weight are named with the parameter")
def _apart(world):
    net = mlp()
    model = hybrid(net, chunks=2)
    check_replicas(net, world)
    replica_step(model, classification(14), ROWS)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.step()
    check_replicas(net, world)
    if world.rank:
        net[2].bias.data[3] = torch.nextafter(net[2].bias[3].detach(), torch.tensor(9.0))
    with pytest.raises(UserError, match=r"2\.bias of rank 1 differs from replica 0's"):
        check_replicas(net, world)


@cells.add("an error on rank 0 is raised on all ranks by on_main")
def _on_main(world):
    def fail(error):
        raise error

    assert world.on_main(lambda: 5) == (5 if world.is_main else None)
    for error, expected, text in [
        (UserError("no such data"), UserError, "no such data"),
        (KeyError("k"), RuntimeError, "rank 0 failed: KeyError: 'k'"),
    ]:
        with pytest.raises(type(error) if world.is_main else expected) as caught:
            world.on_main(lambda error=error: fail(error))
        assert text in str(caught.value) or caught.value is error
    assert world.from_main(lambda: world.rank + 5) == 5
    with pytest.raises(UserError, match="no such data"):
        world.from_main(lambda: fail(UserError("no such data")))
    calls = []
    world.on_main(lambda: calls.append(1))
    assert len(calls) == (1 if world.is_main else 0)


@cells.add("an error of one rank is raised on all of them by on_all, the lowest rank's first")
def _on_all(world):
    def fail(ranks, error):
        if world.rank in ranks:
            raise error
        return world.rank

    assert world.on_all(lambda: fail([], None)) == world.rank
    for ranks in ([0], [1], [0, 1]):
        error = CheckpointError(f"the disk of rank {world.rank}")
        with pytest.raises(CheckpointError, match=f"the disk of rank {ranks[0]}") as caught:
            world.on_all(lambda ranks=ranks, error=error: fail(ranks, error))
        assert (caught.value is error) == (world.rank == ranks[0])
        assert (copied_problem(caught.value) is None) == (world.rank == ranks[0])
    with pytest.raises(KeyError if world.rank else OtherProcessError, match="'k'") as caught:
        world.on_all(lambda: fail([1], KeyError("k")))
    error = caught.value  # on rank 0 a copy, which does not take the place of the original
    with pytest.raises(type(error)) as again:
        world.on_all(lambda: fail([0, 1], error))
    assert (again.value is error) == (world.rank == 1)


@cells.add("values are sent from rank 0, gathered by all ranks and summed")
def _collectives(world):
    assert world.broadcast({"rank": world.rank}) == {"rank": 0}
    assert world.gather(world.rank) == list(range(world.size))
    assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    tensor = torch.full((3,), float(world.rank + 1))
    world.broadcast_tensor(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert (world.launcher, world.size, world.local_rank) == ("torchrun", 2, world.rank)


class _RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@cells.add("hostile bytes of another process run nothing and are one error")
def _hostile_bytes(world):
    mark = Path(world.broadcast(tempfile.mkdtemp())) / "ran"
    code = torch.frombuffer(bytearray(pickle.dumps(_RunsCode(mark))), dtype=torch.uint8)
    for length, data in [(len(code), code), (-1, None), (1 << 62, None)]:
        if world.rank == 1:
            dist.send(torch.tensor([length]), dst=0)
            if data is not None:
                dist.send(data, dst=0)
        else:
            with pytest.raises(UserError, match="another process"):
                objects.receive(None, 1)
    assert not mark.exists()
    assert world.gather(world.rank) == [0, 1]  # what follows arrives


@cells.add("a value of another kind than processes exchange is one error on all ranks")
def _not_sent(world):
    for value in (lambda: 0, object()):
        with pytest.raises(UserError, match="cannot send a value"):
            world.gather(value if world.rank else 0)
        with pytest.raises(UserError, match="cannot send a value"):
            world.broadcast(value)
    assert world.gather(world.rank) == [0, 1]


class Counting(nn.Linear):
    """A layer with state that is not a parameter."""

    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


class OwnCounts:
    """A state that differs between the processes, and gathers them."""

    def __init__(self, world, count):
        self.world, self.count = world, count

    def state_dict(self):
        return {"counts": self.world.gather(self.count)}

    def load_state_dict(self, saved):
        self.count = saved["counts"][self.world.rank]


class Dtypes:
    """A state of tensors that gloo and NCCL cannot send as they are."""

    names = ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "complex64", "bool")

    def __init__(self, value):
        self.tensors = {n: torch.full((3, 2), value).to(getattr(torch, n)) for n in self.names}

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, saved):
        self.tensors = saved


@cells.add("tensors of every dtype in a checkpoint reach all ranks")
def _dtypes(world):
    model = hybrid(mlp(), chunks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved, loaded = Dtypes(1), Dtypes(0)
    with tempfile.TemporaryDirectory() as folder:
        path = saving.save_checkpoint(
            CheckpointStore(Path(folder)), 1, model, optimizer, {}, {"own": saved}
        )
        restore(path, model, optimizer, states={"own": loaded})
    for name, tensor in saved.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].tolist() == tensor.tolist(), name


@cells.add("a checkpoint written and read by rank 0 alone restores every state on all ranks")
def _checkpoint(world):
    def made(seed):
        with torch.random.fork_rng():  # other seeds on each rank, for this cell alone
            torch.manual_seed(seed)
            net = nn.Sequential(Counting(6, 8), nn.Tanh(), nn.Linear(8, 4))
        net[0].extra = {"seed": seed, "kept": torch.tensor([float(seed)])}
        model = hybrid(net, chunks=2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(0)
    replica_step(model, classification(14), ROWS)
    optimizer.step()
    # the other process has no such folder
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder if world.is_main else "/nowhere"), background=True)
        counts = OwnCounts(world, 10 + world.rank)
        with saving.finishing_saves(store, world):
            path = saving.save_checkpoint(store, 1, model, optimizer, {}, {"counts": counts})
        other, other_optimizer = made(5 + world.rank)
        counts.count = 0
        restore(path, other, other_optimizer, states={"counts": counts})
        assert counts.count == 10 + world.rank
        assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
        extra = other.net[0].extra
        assert extra["seed"] == 0
        assert extra["kept"].tolist() == [0.0]
        for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
            assert_same(one, two)

        # weights alone, of which one is not there
        third, _ = made(9 + world.rank)
        before = third.net[2].bias.detach().clone()
        if world.is_main:
            weights = {n: v for n, v in model.state_dict().items() if n in ("0.weight", "2.weight")}
            save_file(weights, Path(folder) / "some.safetensors")
        report = init_from(third, f"{folder}/some.safetensors", strict=False)
        assert report.missing == ("0.bias", "2.bias")
        assert torch.equal(third.net[2].weight, model.net[2].weight)
        assert_same_on_all_ranks(world, dict(third.named_parameters()))
        assert world.rank or torch.equal(third.net[2].bias, before)


class Uneven(IterableDataset):
    """7 samples on rank 0 and 2 on rank 1."""

    def __init__(self, rank):
        self.samples = [(5, 1, 6, 2, 0, 8, 4), (7, 3)][rank]

    def __iter__(self):
        inputs, targets = classification(9)
        yield from ((inputs[i], targets[i]) for i in self.samples)


@cells.add("a stream that ends unevenly gives the same steps as its global batches")
def _uneven_stream(world):
    torch.manual_seed(0)
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


for chunks in (1, 4):

    @cells.add(
        f"the account of a step tells who waits for the slower replica: {chunks} chunks",
        thorough=chunks == 1,
    )
    def _account(world, chunks=chunks):
        slow = world.rank == world.size - 1
        trainer = trained((3e-3 if slow else 1e-4,), 1, chunks=chunks)
        check_rows(trainer, [(rank, 0) for rank in range(world.size)])
        first, last = trainer.account["devices"][0], trainer.account["devices"][-1]
        assert max(Account._fields, key=first.__getitem__) == "stragglers"
        assert max(Account._fields, key=last.__getitem__) == "backward"
        assert_names_slow_replica(trainer, world.size - 1)


@cells.add("a training_step that records in one process alone ends without an account")
def _one_recorded(world):
    def training_step(trainer, batches, timeline):
        return Trainer.training_step(trainer, batches, timeline and world.is_main)

    assert trained((1e-4,), 1, training_step=training_step).account is None


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
