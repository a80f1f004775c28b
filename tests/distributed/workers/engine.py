"""The engine over replicas. Run by test_engine.py; every rank has data of its own."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from support.launch import Cells
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.checkpoint.store import CheckpointStore
from hybridtrain.data.loader import TrainLoader
from hybridtrain.skip import pop, stash

cells = Cells()

VOCABULARY, WIDTH = 11, 6

# The same sums over the same rows as in one process, added up in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def hybrid(net, nb_part=2, **options):
    world = World.from_env(nb_part=nb_part, devices="cpu", timeout_s=30)
    return HybridModel(net, world, **options)


def assert_close(ours, theirs, what):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] is None) is (value is None), f"{what}: {name}"
        if value is not None:
            torch.testing.assert_close(
                ours[name], value, **CLOSE, msg=lambda m, n=name: f"{what}: {n}\n{m}"
            )


def assert_same_on_all_ranks(world, tensors, what):
    tensors = {k: v.detach().clone() for k, v in tensors.items() if v is not None}
    for rank, other in enumerate(world.gather(tensors)):
        for name, value in tensors.items():
            assert torch.equal(value, other[name]), f"{what}: {name} differs on rank {rank}"


def grads(net):
    return {name: p.grad for name, p in net.named_parameters()}


def share(batch, rows, rank):
    start = sum(rows[:rank])
    return tuple(tensor[start : start + rows[rank]] for tensor in batch)


# Ties.
class Middle(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = weight

    def forward(self, x):
        x = torch.tanh(self.linear(x))
        return x + torch.sigmoid(x @ self.weight.T) @ self.weight


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, flag = value
        return self.linear(x), flag


class Sometimes(nn.Module):
    """Uses the tied weight for flagged rows only, which one replica lacks."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, value):
        x, flag = value
        return x + self.weight.sum(0) if bool(flag.any()) else x


def gpt(seed=0, frozen=False):
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    net = nn.Sequential(
        embedding, nn.LayerNorm(WIDTH), Middle(embedding.weight), nn.Linear(WIDTH, WIDTH), head
    )
    head.weight = embedding.weight
    embedding.weight.requires_grad_(not frozen)
    return net


def text(rows, seed):
    g = torch.Generator().manual_seed(seed)
    shape = (sum(rows), 4)
    return (
        torch.randint(VOCABULARY, shape, generator=g),
        torch.randint(VOCABULARY, shape, generator=g),
    )


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def text_step(model, batch, rows, **options):
    inputs, targets = share(batch, rows, model.world.rank)
    weight = len(inputs) * model.world.size / sum(rows)
    return model.train_step(inputs, targets, token_loss, weight=weight, **options)


def tied(nb_part, v, **options):
    def check(world):
        # each rank begins with weights of its own: rank 0's must count, in the aliases too
        frozen = options.pop("frozen", False)
        ours, plain = gpt(seed=world.rank, frozen=frozen), gpt(0, frozen)
        model = hybrid(ours, nb_part, chunks=3, stages_per_device=v, **options)
        for stage in model.stages:
            for alias in stage.aliases:
                assert torch.equal(alias.alias, plain[0].weight)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, plain)]
        for seed, rows in enumerate([(6, 6), (7, 3), (1, 8)]):
            batch = text(rows, seed)
            text_step(model, batch, rows)
            token_loss(plain(batch[0]), batch[1]).backward()
            assert_close(grads(ours), grads(plain), f"rows {rows}")
            assert_same_on_all_ranks(world, grads(ours), f"rows {rows}")
            norms = [clip_grad_norm_(net.parameters(), 0.5) for net in (model, plain)]
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_close(ours.state_dict(), plain.state_dict(), "weights")
        assert_same_on_all_ranks(world, ours.state_dict(), "weights")

    return check


for _nb_part, _v in [(1, 1), (2, 1), (3, 1), (2, 2)]:
    cells.add(f"tied weights equal one process on the global batch: {_nb_part} x {_v} stages")(
        tied(_nb_part, _v)
    )
cells.add("tied weights equal one process under recomputation")(tied(3, 1, checkpoint="always"))
cells.add("tied weights equal one process with find_unused_parameters")(
    tied(3, 1, find_unused_parameters=True)
)
cells.add("a frozen tied weight stays, and the rest equals one process")(tied(3, 1, frozen=True))


def tied_accumulation(nb_part):
    def check(world):
        ours, plain = gpt(), gpt()
        model = hybrid(ours, nb_part, chunks=3)
        for turn in range(2):  # a second time, as the first one changed the buckets
            model.zero_grad()
            plain.zero_grad()
            for index in range(3):
                batch = text((5, 4), 10 * turn + index)
                text_step(model, batch, (5, 4), sync=index == 2)
                token_loss(plain(batch[0]), batch[1]).backward()
                everyones = world.gather(ours[0].weight.grad.clone())
                assert torch.equal(*everyones) is (index == 2), f"after batch {index}"
            assert_close(grads(ours), grads(plain), f"sum of three batches, turn {turn}")
            assert_same_on_all_ranks(world, grads(ours), "sum of three batches")

    return check


for _nb_part in (1, 2, 3):
    cells.add(f"tied weights add up without sync, then with it: {_nb_part} stages")(
        tied_accumulation(_nb_part)
    )


@cells.add("a tied weight that one replica uses once and the other twice")
def _sometimes(world):
    def make():
        torch.manual_seed(0)
        first = First()
        return nn.Sequential(first, Sometimes(first.linear.weight), nn.Linear(WIDTH, 2))

    ours, plain = make(), make()
    model = hybrid(ours, 2, split=[1, 2], find_unused_parameters=True)
    for seed in range(2):
        model.zero_grad()
        plain.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
        parts = [(rows, torch.full((4,), bool(r))) for r, rows in enumerate(x.split(4))]
        model.train_step(parts[world.rank], None, lambda output, _: output.square().mean())
        for part in parts:
            (plain(part).square().mean() / 2).backward()
        assert_close(grads(ours), grads(plain), f"seed {seed}")
        assert_same_on_all_ranks(world, grads(ours), f"seed {seed}")


# Skips.
class Stash(nn.Module):
    stashes = ("a",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        stash("a", y)
        return x + y


class Pop(nn.Module):
    pops = ("a",)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * pop("a")


def skipping(nb_part, checkpoint):
    def check(world):
        def make(seed):
            torch.manual_seed(seed)
            layers = [Stash(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
            return nn.Sequential(*layers, Pop(), nn.Linear(WIDTH, 3))

        ours, plain = make(world.rank), make(0)
        model = hybrid(ours, nb_part, chunks=3, checkpoint=checkpoint)
        for seed, rows in enumerate([(6, 6), (7, 3)]):
            model.zero_grad()
            plain.zero_grad()
            for part in range(2):
                g = torch.Generator().manual_seed(10 * seed + part)
                x, y = torch.randn(sum(rows), WIDTH, generator=g), torch.arange(sum(rows)) % 3
                mine = share((x, y), rows, world.rank)
                weight = rows[world.rank] * 2 / sum(rows)
                model.train_step(*mine, F.cross_entropy, weight=weight, sync=part == 1)
                F.cross_entropy(plain(x), y).backward()
            assert_close(grads(ours), grads(plain), f"rows {rows}")
            assert_same_on_all_ranks(world, grads(ours), f"rows {rows}")

    return check


for _nb_part, _checkpoint in [(2, "never"), (3, "never"), (3, "always"), (3, "except_last")]:
    cells.add(f"skipping values equal one process: {_nb_part} stages, checkpoint {_checkpoint}")(
        skipping(_nb_part, _checkpoint)
    )


# Deferred batch norm.
def deferred(checkpoint):
    def check(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        plain = nn.BatchNorm1d(WIDTH)
        model = hybrid(net, 2, chunks=3, batch_norm="deferred", checkpoint=checkpoint)
        for seed in range(3):
            everyones = [
                torch.randn(7 + r, WIDTH, generator=torch.Generator().manual_seed(10 * seed + r))
                + r
                for r in range(2)
            ]
            x = everyones[world.rank]
            model.train_step(x, None, lambda output, _: output.square().mean())
            # a step begins with rank 0's buffers on all ranks
            before = {k: b.clone() for k, b in plain.named_buffers()}
            plain(x)
            assert_close(dict(net[0].named_buffers()), dict(plain.named_buffers()), f"step {seed}")
            plain.load_state_dict({**plain.state_dict(), **before})
            plain(everyones[0])
        model.sync_buffers()
        assert_close(dict(net[0].named_buffers()), dict(plain.named_buffers()), "rank 0's")
        assert_same_on_all_ranks(world, dict(net[0].named_buffers()), "buffers")
        assert int(net[0].num_batches_tracked) == 3

    return check


for _checkpoint in ("never", "always"):
    cells.add(f"deferred statistics are rank 0's, once a step: checkpoint {_checkpoint}")(
        deferred(_checkpoint)
    )


# Loss scaling.
class Overflow(nn.Module):
    """Multiplies the gradient with infinity at the steps in `at`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.at = ()
        self.step = 0

    def forward(self, x):
        y = self.linear(x)
        if self.step in self.at and y.requires_grad:
            y.register_hook(lambda grad: grad * float("inf"))
        return y


class Steps:
    """Keeps the weights after every step, on every rank."""

    def __init__(self, net):
        self.net = net
        self.weights = {0: self._copy()}
        self.scales = {}

    def _copy(self):
        return {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def start(self, *, total_steps, first_step, texts):
        self._count(first_step)

    def step(self, step, samples):
        self.weights[step] = self._copy()
        self._count(step)

    def _count(self, step):
        for layer in self.net:
            layer.step = step + 1

    def scalars(self, step, values):
        self.scales[step] = values.get("train/loss_scale")

    def timeline(self, step, predicted, measured):
        pass

    def close(self):
        pass

    def moved(self, step):
        before, after = self.weights[step - 1], self.weights[step]
        return {name for name, value in after.items() if not torch.equal(value, before[name])}


def trainer(nb_part, steps=6, at=(), layer=None, rows=None, store=None, scale=2.0**10, **options):
    torch.manual_seed(0)
    net = nn.Sequential(*[Overflow() for _ in range(4)])
    if layer is not None:
        net[layer].at = at
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, WIDTH, generator=g), torch.randn(24, WIDTH, generator=g)
    model = hybrid(net, nb_part, chunks=2, precision="fp16")
    loader = TrainLoader(TensorDataset(x, y), 4, model.world, seed=1)
    if rows is not None:  # of one replica's rows of one step, one is too large for fp16
        rank, step = rows
        stream = loader.stream()
        batches = [next(stream) for _ in range(step)]
        stream.close()
        wanted = model.world.gather(batches[-1].inputs[:1])[rank]
        x[(x == wanted).all(1)] = 1e30
    scaler = GradScaler("cpu", init_scale=scale, growth_interval=options.pop("growth", 1000))
    return Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda output, targets: F.mse_loss(output.float(), targets), loader, steps=steps,
        scaler=scaler, log_every=1, monitor=Steps(net), store=store, **options,
    )  # fmt: skip


def assert_all_skip(world, ours, skipped, scales):
    ours.fit()
    everything = set(ours.monitor.weights[0])
    for step in range(1, 7):
        expected = set() if step == skipped else everything
        assert ours.monitor.moved(step) == expected, f"step {step}: {ours.monitor.moved(step)}"
        assert ours.monitor.scales[step] == scales[step - 1], step
        assert_same_on_all_ranks(world, ours.monitor.weights[step], f"step {step}")
    assert world.gather(ours.scaler.get_scale()) == [scales[-1]] * 2


LOWERED = [2.0**10] * 2 + [2.0**9] * 4


def overflow_in_a_stage(nb_part, layer, rank, **options):
    def check(world):
        at = (3,) if world.rank == rank else ()
        ours = trainer(nb_part, at=at, layer=layer, **options)
        assert_all_skip(world, ours, 3, LOWERED)

    return check


for _nb_part, _layer, _rank in [(1, 1, 0), (2, 0, 0), (2, 3, 1), (4, 0, 1), (4, 2, 0)]:
    cells.add(
        f"an overflow in one stage of one replica skips the step in all: "
        f"layer {_layer} of {_nb_part} stages, rank {_rank}"
    )(overflow_in_a_stage(_nb_part, _layer, _rank))
cells.add("an overflow in the first of two accumulated batches of one replica skips the step")(
    overflow_in_a_stage(2, 1, 1, accumulate=2)
)
cells.add("an overflow under clipping skips the step in all")(
    overflow_in_a_stage(2, 1, 0, clip_norm=0.1)
)


def overflow_in_the_data(rank):
    def check(world):
        assert_all_skip(world, trainer(2, rows=(rank, 3)), 3, LOWERED)

    return check


for _rank in (0, 1):
    cells.add(f"a row of one replica that is too large skips the step in all: rank {_rank}")(
        overflow_in_the_data(_rank)
    )


@cells.add("a fixed scale stays on all ranks when one skips")
def _fixed(world):
    at = (3,) if world.rank else ()
    ours = trainer(2, at=at, layer=1, scale=256.0, loss_scale=256.0, growth=1)
    assert_all_skip(world, ours, 3, [256.0] * 6)


@cells.add("the scale comes back from the checkpoint on all ranks")
def _scale_comes_back(world):
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    at = (3,) if world.rank else ()
    options = {"at": at, "layer": 1, "growth": 2}
    whole = trainer(2, **options)
    whole.fit()
    trainer(2, steps=4, store=CheckpointStore(folder), **options).fit()
    world.gather(None)  # rank 0 has written it
    again = trainer(2, scale=4.0 + world.rank, **options)
    again.resume(folder / "step_00000004")
    assert world.gather(again.scaler.get_scale()) == [whole.monitor.scales[4]] * 2
    again.fit()
    for step in (5, 6):
        assert again.monitor.scales[step] == whole.monitor.scales[step]
    for name, value in whole.monitor.weights[6].items():
        assert torch.equal(again.monitor.weights[6][name], value), name


if __name__ == "__main__":
    cells.main(sys.argv[1])
