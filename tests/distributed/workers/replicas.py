"""What must hold between replicas. Run by test_replicas.py; every rank has data of its own."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from support.launch import Cells
from torch import nn
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, World
from hybridtrain.data.loader import EvalLoader
from hybridtrain.errors import UserError
from hybridtrain.evaluation import evaluate
from hybridtrain.losses import accuracy

cells = Cells()

# The rows of each rank; chunks 4 and 7 make ragged micro-batches of most of them.
ROWS = [(5, 5), (7, 3), (1, 8), (13, 10)]

# The same sums over the same rows as in one process, added up in another order: by replica, by
# micro-batch, then over the replicas. The gradients are of the order of 0.1.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def global_batch(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    total = sum(rows)
    return torch.randn(total, 6, generator=g), torch.randint(3, (total,), generator=g)


def share(batch, rows, rank):
    start = sum(rows[:rank])
    return tuple(tensor[start : start + rows[rank]] for tensor in batch)


def hybrid(net, nb_part=2, **options):
    world = World.from_env(nb_part=nb_part, devices="cpu", timeout_s=30)
    return HybridModel(net, world, **options)


def step(model, batch, rows, **options):
    inputs, targets = share(batch, rows, model.world.rank)
    weight = len(inputs) * model.world.size / sum(rows)
    return model.train_step(inputs, targets, F.cross_entropy, weight=weight, **options)


def grads(net):
    return {name: p.grad for name, p in net.named_parameters()}


def assert_close(ours, theirs, what, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not isinstance(value, torch.Tensor):
            assert ours[name] == value, f"{what}: {name}"
            continue
        assert ours[name] is not None, f"{what}: {name} is None"
        torch.testing.assert_close(
            ours[name], value, **(tolerance or CLOSE), msg=lambda m, n=name: f"{what}: {n}\n{m}"
        )


def assert_same_on_all_ranks(world, tensors, what):
    for rank, other in enumerate(world.gather({k: v.clone() for k, v in tensors.items()})):
        for name, value in tensors.items():
            assert torch.equal(value, other[name]), f"{what}: {name} differs on rank {rank}"


def one_step(nb_part, schedule, checkpoint):
    def check(world):
        # each rank begins with weights of its own: rank 0's must count
        ours, plain = make(seed=world.rank), make(seed=0)
        model = hybrid(ours, nb_part, schedule=schedule, checkpoint=checkpoint, split="uniform")
        assert_close(dict(ours.named_parameters()), dict(plain.named_parameters()), "start")
        for seed, rows in enumerate(ROWS):
            batch = global_batch(rows, seed)
            for model.chunks in (1, 4, 7):
                what = f"rows {rows}, chunks {model.chunks}"
                model.zero_grad()
                plain.zero_grad()
                loss = F.cross_entropy(plain(batch[0]), batch[1])
                loss.backward()
                out = step(model, batch, rows)
                assert_close(grads(ours), grads(plain), what)
                assert_same_on_all_ranks(world, grads(ours), what)
                total = world.sum(torch.stack([out.loss * out.samples]))[0]
                torch.testing.assert_close(total / sum(rows), loss.detach())

    return check


for _nb_part in (1, 2, 3):
    for _schedule, _checkpoint in (("gpipe", "never"), ("1f1b", "never"), ("1f1b", "except_last")):
        cells.add(
            f"a step equals the unsplit model on the global batch: "
            f"nb_part {_nb_part}, {_schedule}, checkpoint {_checkpoint}"
        )(one_step(_nb_part, _schedule, _checkpoint))


@cells.add("five AdamW steps equal one process on the global batch")
def _five_steps(world):
    ours, plain = make(0), make(0)
    model = hybrid(ours, 2, chunks=4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (ours, plain)]
    for seed in range(5):
        rows = ROWS[seed % len(ROWS)]
        batch = global_batch(rows, seed)
        step(model, batch, rows)
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Adam divides by the gradients' size, which makes the last bits of small ones count
    assert_close(ours.state_dict(), plain.state_dict(), "weights", rtol=1e-5, atol=2e-6)
    assert_same_on_all_ranks(world, ours.state_dict(), "weights")
    mine, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number in expected:
        assert_close(mine[number], expected[number], f"moments of {number}", rtol=1e-4, atol=1e-6)


@cells.add("BatchNorm's buffers are rank 0's on all ranks after sync_buffers and at each step")
def _buffers(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    model = hybrid(net, 2, chunks=2)
    rows = (8, 6)
    step(model, global_batch(rows), rows)
    mine = {name: buffer.clone() for name, buffer in net.named_buffers()}
    everyones = world.gather(mine)
    assert not torch.equal(everyones[0]["1.running_mean"], everyones[1]["1.running_mean"])
    model.sync_buffers()
    for name, buffer in net.named_buffers():
        assert torch.equal(buffer, everyones[0][name]), name
    # a step begins with rank 0's: what it makes of them is what a net with rank 0's makes
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for name, buffer in net.named_buffers():
            if world.rank and name.endswith("mean"):
                buffer.fill_(99.0)
    batch = global_batch(rows, 1)
    step(model, batch, rows)
    inputs, _ = share(batch, rows, world.rank)
    for part in inputs.split(len(inputs) // 2):
        twin(part)
    assert_close(dict(net.named_buffers()), dict(twin.named_buffers()), "second step")


@cells.add("without broadcast_buffers the buffers stay each replica's own from step to step")
def _own_buffers(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    model = hybrid(net, 2, chunks=1, broadcast_buffers=False)
    rows = (8, 6)
    twin = copy.deepcopy(net)
    for seed in (0, 1):
        batch = global_batch(rows, seed)
        twin.load_state_dict({**net.state_dict(), **dict(twin.named_buffers())})
        step(model, batch, rows)
        twin(share(batch, rows, world.rank)[0])
    assert_close(dict(net.named_buffers()), dict(twin.named_buffers()), "two steps of its own")


@cells.add("the buffers of a stage that trains nothing are rank 0's at each step too")
def _frozen_buffers(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Tanh())
    net[:2].requires_grad_(False)
    model = hybrid(net, 2, chunks=2)
    rows = (8, 6)
    for seed in (0, 1):
        step(model, global_batch(rows, seed), rows)
    model.sync_buffers()
    means = world.gather(net[1].running_mean)
    assert torch.equal(*means)
    assert means[0].abs().sum() > 0


@cells.add("gradients added up without sync stay local, and the last step averages them all")
def _accumulate(world):
    ours, plain = make(0), make(0)
    model = hybrid(ours, 2, chunks=3)
    reductions = count_reductions(model)
    batches = [global_batch((5, 4), seed) for seed in range(3)]
    for index, batch in enumerate(batches):
        step(model, batch, (5, 4), sync=index == 2)
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
        everyones = world.gather(ours[0].weight.grad.clone())
        assert torch.equal(*everyones) is (index == 2), f"after batch {index}"
    assert_close(grads(ours), grads(plain), "sum of three batches")
    assert_same_on_all_ranks(world, grads(ours), "sum of three batches")
    assert reductions == [1, 1], reductions


def count_reductions(model):
    """The buckets that each stage's DDP reduces from now on; small stages have one bucket."""
    counts = [0] * len(model.stages)

    def hook(index, bucket):
        counts[index] += 1
        group = model.stages[index].replica._ddp.process_group
        tensor = bucket.buffer().div_(group.size())
        future = torch.distributed.all_reduce(tensor, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    for index, stage in enumerate(model.stages):
        stage.replica._ddp.register_comm_hook(index, hook)
    return counts


@cells.add("many micro-batches are reduced once a stage")
def _reduce_once(world):
    ours, plain = make(0), make(0)
    model = hybrid(ours, 3, chunks=7)
    counts = count_reductions(model)
    for seed in range(3):
        batch = global_batch((9, 7), seed)
        step(model, batch, (9, 7))
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
        assert counts == [seed + 1] * 3, counts
    assert_close(grads(ours), grads(plain), "three batches")


class Sometimes(nn.Module):
    """Has a parameter that is never used, and one that only batches with a flag use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.never = nn.Parameter(torch.ones(6))
        self.flagged = nn.Parameter(torch.ones(6))

    def forward(self, value):
        x, flag = value
        x = self.linear(x)
        return x * self.flagged if bool(flag.any()) else x


def sometimes():
    torch.manual_seed(0)
    return nn.Sequential(Sometimes(), nn.Linear(6, 3))


def flagged_batch(flags, seed=0):
    inputs, targets = global_batch((len(flags),), seed)
    return (inputs, torch.tensor(flags)), targets


@cells.add("without find_unused_parameters an unused parameter is an error that names it")
def _unused_error(world):
    model = hybrid(sometimes(), 2, chunks=2)
    inputs, targets = flagged_batch([True] * 4, seed=world.rank)
    with pytest.raises(UserError) as caught:
        model.train_step(inputs, targets, F.cross_entropy)
    assert "no gradient was computed for 0.never," in str(caught.value)
    assert "world.find_unused_parameters=true" in str(caught.value)


def unused(flags_of_rank, used_by_anyone):
    def check(world):
        ours, plain = sometimes(), sometimes()
        model = hybrid(ours, 2, chunks=2, find_unused_parameters=True)
        for seed in (0, 2):  # a second time, as DDP learns from the first
            model.zero_grad()
            plain.zero_grad()
            for rank, flags in enumerate(flags_of_rank):
                (inputs, flag), targets = flagged_batch(flags, seed + rank)
                for rows in (slice(0, 2), slice(2, 4)):
                    loss = F.cross_entropy(plain((inputs[rows], flag[rows])), targets[rows])
                    (loss / 4).backward()
            mine = flagged_batch(flags_of_rank[world.rank], seed + world.rank)
            model.train_step(*mine, F.cross_entropy)
            expected = {k: v for k, v in grads(plain).items() if v is not None}
            assert ("0.flagged" in expected) is used_by_anyone
            found = {k: v for k, v in grads(ours).items() if v is not None and v.any()}
            assert_close(found, expected, f"seed {seed}")
            assert_same_on_all_ranks(world, found, f"seed {seed}")

    return check


for _what, _flags, _used in [
    ("used by all", ([True] * 4, [True] * 4), True),
    ("used by nobody", ([False] * 4, [False] * 4), False),
    ("used by one replica", ([True] * 4, [False] * 4), True),
    ("used by the last micro-batch only", ([False, False, True, True],) * 2, True),
    ("used by the first micro-batch only", ([True, True, False, False],) * 2, True),
    ("used by the first of one replica", ([True, True, False, False], [False] * 4), True),
]:
    cells.add(f"with find_unused_parameters a parameter trains: {_what}")(unused(_flags, _used))


@cells.add("a stage without a trainable parameter is left alone and starts as rank 0's")
def _frozen(world):
    ours, plain = make(world.rank), make(0)
    for net in (ours, plain):
        net[:3].requires_grad_(False)
    model = hybrid(ours, 2, chunks=4)
    assert_close(ours.state_dict(), plain.state_dict(), "start")
    rows = (7, 3)
    batch = global_batch(rows)
    step(model, batch, rows)
    F.cross_entropy(plain(batch[0]), batch[1]).backward()
    trained = {k: v for k, v in grads(plain).items() if v is not None}
    assert_close({k: v for k, v in grads(ours).items() if v is not None}, trained, "gradient")


@cells.add("evaluation over the replicas equals one process")
def _evaluation(world):
    for total in (11, 4, 1):  # with one row a replica has none
        net = make(0)
        model = hybrid(net, 2, chunks=3)
        inputs, targets = global_batch((total,), seed=total)
        metrics = {
            "accuracy": accuracy,
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
        self.linear = nn.Linear(6, 3)
        self.masks = []

    def forward(self, x):
        self.masks.append(F.dropout(torch.ones(64), 0.5) == 0)
        return self.linear(x)


@cells.add("dropout draws differ between replicas")
def _draws(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), Noting())
    model = hybrid(net, 2, chunks=2)
    rows = (4, 4)
    step(model, global_batch(rows), rows)
    masks = [tuple(mask.tolist()) for masks in world.gather(net[1].masks) for mask in masks]
    assert len(set(masks)) == len(masks) == 4


class Faulty(nn.Module):
    """Raises in the forward or in the backward of one micro-batch."""

    where = None

    def forward(self, value):
        x, number = value
        microbatch = int(number[0])
        if self.where == ("forward", microbatch):
            raise ArithmeticError("boom")
        if self.where == ("backward", microbatch) and x.requires_grad:
            x.register_hook(self._raise)
        return x

    @staticmethod
    def _raise(grad):
        raise ArithmeticError("boom")


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value):
        x, number = value
        return self.linear(x), number


def after_failure(kind, microbatch):
    def check(world):
        torch.manual_seed(0)
        net = nn.Sequential(First(), nn.Identity(), Faulty(), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        model = hybrid(net, 2, chunks=2)
        numbers = torch.tensor([0, 0, 1, 1])
        rows = (4, 4)
        batches = [global_batch(rows, seed) for seed in range(3)]
        for index, (inputs, targets) in enumerate(batches):
            x, y = share((inputs, targets), rows, world.rank)
            net[2].where = (kind, microbatch) if index == 1 else None
            model.zero_grad()
            try:
                model.train_step((x, numbers), y, F.cross_entropy)
            except ArithmeticError as error:
                assert index == 1
                notes = "\n".join(error.__notes__)
                assert f"in the {kind} of micro-batch {microbatch} on stage 1" in notes, notes
            else:
                assert index != 1, "no error"
        plain[2].where = None
        inputs, targets = batches[2]
        hidden = plain[0].linear(inputs)
        F.cross_entropy(plain[3](hidden), targets).backward()
        assert_close(grads(net), grads(plain), "the step after")
        assert_same_on_all_ranks(world, grads(net), "the step after")

    return check


for _kind in ("forward", "backward"):
    for _microbatch in (0, 1):
        cells.add(
            f"after an exception on both ranks the next step is right: "
            f"{_kind} of micro-batch {_microbatch}"
        )(after_failure(_kind, _microbatch))


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


@cells.add("values travel from rank 0, to all ranks and add up")
def _collectives(world):
    assert world.broadcast({"rank": world.rank}) == {"rank": 0}
    assert world.gather(world.rank) == list(range(world.size))
    assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
    tensor = torch.full((3,), float(world.rank + 1))
    world.broadcast_tensor(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert (world.launcher, world.size, world.local_rank) == ("torchrun", 2, world.rank)


if __name__ == "__main__":
    cells.main(sys.argv[1])
