"""Gradients over replicas equal those of one process on the samples of all."""

import contextlib
import copy
import itertools
import sys
import time

import pytest
import torch
import torch.utils.checkpoint
from support.compare import (
    CLOSE,
    assert_same,
    assert_same_gradients,
    assert_same_on_all_ranks,
    floats_and_classes,
    grads,
    hybrid,
    replica_step,
    share,
)
from support.engine import Faulty
from support.launch import Cells
from support.nets import CASES, classification, inplace_net, padded_tokens, tied_gpt
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain import loss as losses
from hybridtrain.data import TrainLoader
from hybridtrain.data.loader import permutation
from hybridtrain.errors import UserError

cells = Cells()

# The samples of each rank; chunks 4 and 7 make ragged micro-batches of most of them.
ROWS = [(5, 5), (7, 3), (1, 8), (13, 10)]


def make(seed=0):
    torch.manual_seed(seed)
    return inplace_net()


def plain_backward(net, batch):
    loss = F.cross_entropy(net(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def with_gradient(net):
    return {name: grad for name, grad in grads(net).items() if grad is not None}


def one_step(nb_part, schedule, recompute):
    def check(world):
        for chunks in (1, 4, 7):
            # each rank begins with other weights: rank 0's must count
            ours, plain = make(seed=world.rank), make(seed=0)
            model = hybrid(ours, nb_part, chunks=chunks, schedule=schedule, recompute=recompute)
            assert_same(ours.state_dict(), plain.state_dict(), "start")
            for seed, rows in enumerate(ROWS):
                what = f"rows {rows}, chunks {chunks}"
                batch = classification(sum(rows), seed)
                model.zero_grad()
                plain.zero_grad()
                loss = plain_backward(plain, batch)
                out = replica_step(model, batch, rows)
                assert_same_gradients(ours, plain, what, **CLOSE)
                assert_same_on_all_ranks(world, grads(ours), what)
                total = world.sum(torch.stack([out.loss * out.samples]))[0]
                torch.testing.assert_close(total / sum(rows), loss)

    return check


QUICK = [(1, "1f1b", "never"), (3, "1f1b", "except_last")]

for _nb_part, (_schedule, _recompute) in itertools.product(
    (1, 2, 3), [("gpipe", "never"), ("1f1b", "never"), ("1f1b", "except_last")]
):
    cells.add(
        f"a step equals the unsplit model on the global batch: "
        f"nb_part {_nb_part}, {_schedule}, recompute {_recompute}",
        thorough=(_nb_part, _schedule, _recompute) not in QUICK,
    )(one_step(_nb_part, _schedule, _recompute))


@cells.add("five AdamW steps equal one process on the global batch")
def _five_steps(world):
    ours, plain = make(), make()
    model = hybrid(ours)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (ours, plain)]
    for seed in range(5):
        rows = ROWS[seed % len(ROWS)]
        batch = classification(sum(rows), seed)
        replica_step(model, batch, rows)
        plain_backward(plain, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Adam divides by the gradients' size, which makes the last bits of small ones count
    assert_same(ours.state_dict(), plain.state_dict(), "weights", rtol=1e-5, atol=2e-6)
    assert_same_on_all_ranks(world, ours.state_dict(), "weights")
    mine, expected = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number in expected:
        assert_same(mine[number], expected[number], f"moments of {number}", rtol=1e-4, atol=1e-6)


def token_net():
    torch.manual_seed(0)
    return tied_gpt(tied=False)


def token_mean(net, inputs, targets):
    loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()


@cells.add("a loss that counts needs no weight, also where a replica has nothing that counts")
def _counted(world):
    for step in range(2):
        batches = [padded_tokens(6 - rank, 100 * step + rank) for rank in range(world.size)]
        ours, plain = token_net(), token_net()
        expected = token_mean(plain, *(torch.cat(each) for each in zip(*batches, strict=True)))
        out = hybrid(ours, chunks=3).train_step(*batches[world.rank], losses.cross_entropy)
        assert_same_gradients(ours, plain, f"step {step}", **CLOSE)
        sums = world.sum(torch.tensor([float(out.loss) * out.count, out.count]))
        torch.testing.assert_close(sums[0] / sums[1], expected)


@cells.add("the trainer weighs by what counts over replicas and accumulated batches")
def _trainer_counts(world):
    # the last global batch is one sample: the other replica's only fills a place
    inputs, targets = padded_tokens(11, 0)
    targets[-1] = 1
    loader = TrainLoader(TensorDataset(inputs, targets), 5, world)
    ours, plain = token_net(), token_net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ours, plain)]
    options = {"epochs": 2, "accumulate": 2, "log_every": 1000}
    trainer = Trainer(hybrid(ours), optimizers[0], losses.cross_entropy, loader, **options)
    summary = trainer.fit()
    total = counted = 0.0
    for epoch in range(2):
        order = permutation(11, 0, epoch)
        for indices in (order[:10], order[10:]):
            count = int((targets[indices] != -100).sum())
            if count:
                total += float(token_mean(plain, inputs[indices], targets[indices])) * count
                counted += count
                optimizers[1].step()
                optimizers[1].zero_grad()
    assert_same(ours.state_dict(), plain.state_dict(), "weights", rtol=1e-4, atol=1e-6)
    assert_same_on_all_ranks(world, ours.state_dict(), "weights")
    torch.testing.assert_close(summary["train_loss"], total / counted, rtol=1e-5, atol=0)


@contextlib.contextmanager
def noted_ddps():
    """The DistributedDataParallel modules that are made inside; one per stage, in their order."""
    made, init = [], DistributedDataParallel.__init__

    def noting(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", noting)
        yield made


def hybrid_with_counts(net, nb_part, **options):
    """A model, and how often each stage's gradients are averaged; small stages have one bucket."""
    with noted_ddps() as ddps:
        model = hybrid(net, nb_part, **options)
    counts = [0] * nb_part

    def average(index, bucket):
        counts[index] += 1
        group = ddps[index].process_group
        tensor = bucket.buffer().div_(group.size())
        future = torch.distributed.all_reduce(tensor, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    for index, ddp in enumerate(ddps):
        ddp.register_comm_hook(index, average)
    assert len(ddps) == nb_part
    return model, counts


@cells.add("a timeline has the wait for other replicas apart, in each kind of backward")
def _reductions(world):
    batch = classification(8)
    for schedule, recompute in (("1f1b", "never"), ("zb-h1", "never"), ("zb-h1", "always")):
        model = hybrid(make(), 2, chunks=2, schedule=schedule, recompute=recompute)
        for _ in range(2):  # before the second backward DDP makes its buckets anew, together
            model.train_step(*batch, F.cross_entropy)
        for stage in model.pipeline.stages if world.rank == 0 else ():
            prepare = stage.reducer.prepare_for_backward
            late = lambda roots, prepare=prepare: (time.sleep(0.3), prepare(roots))  # noqa: E731
            stage.reducer.prepare_for_backward = late
        timeline = model.train_step(*batch, F.cross_entropy, timeline=True).timeline
        whole, computing = (
            {span.action: span.end - span.start for lane in spans for span in lane}
            for spans in (timeline.spans(), timeline.computing())
        )
        assert {(action.stage, action.microbatch) for action in timeline.reductions} == {
            (0, 1),
            (1, 1),
        }
        for action, wait in timeline.reductions.items():
            assert whole[action] == pytest.approx(computing[action] + wait)
            # rank 0 comes late, and rank 1 waits for it
            assert (computing[action] if world.rank == 0 else wait) > 0.2
            assert (wait if world.rank == 0 else computing[action]) < 0.2


@cells.add("gradients added up without sync stay local, and the last step averages them all")
def _accumulate(world):
    ours, plain = make(), make()
    model, counts = hybrid_with_counts(ours, 2, chunks=3)
    for index in range(3):
        batch = classification(9, index)
        replica_step(model, batch, (5, 4), sync=index == 2)
        plain_backward(plain, batch)
        everyones = world.gather(ours[0].weight.grad.clone())
        assert torch.equal(*everyones) is (index == 2), f"after batch {index}"
    assert_same_gradients(ours, plain, **CLOSE)
    assert_same_on_all_ranks(world, grads(ours))
    assert counts == [1, 1]


@cells.add("the gradients of many micro-batches are averaged once per stage")
def _average_once(world):
    ours, plain = make(), make()
    model, counts = hybrid_with_counts(ours, 3, chunks=7)
    for seed in range(3):
        batch = classification(16, seed)
        replica_step(model, batch, (9, 7))
        plain_backward(plain, batch)
        assert counts == [seed + 1] * 3
    assert_same_gradients(ours, plain, **CLOSE)


@cells.add("micro-batches add up in the buckets that are averaged, in no other memory")
def _buckets(world):
    for schedule in ("1f1b", "zb-h1"):
        ours = make()
        # the comparison with plain PyTorch runs copies, with the hooks below
        model = hybrid(ours, 2, chunks=3, schedule=schedule, self_check=False)
        places = {name: set() for name, _ in ours.named_parameters()}
        for name, parameter in ours.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, seen=places[name]: seen.add(p.grad.data_ptr())
            )
        for step in range(4):
            model.zero_grad()
            for seen in places.values():
                seen.clear()
            replica_step(model, classification(12, step), (6, 6), sync=False)
            replica_step(model, classification(12, step), (6, 6))
        # in the first steps DDP puts the gradients in the order in which they are ready
        averaged = {name: {p.grad.data_ptr()} for name, p in ours.named_parameters()}
        assert places == averaged


@cells.add("a stage without a trainable parameter is left alone and starts as rank 0's")
def _frozen(world):
    ours, plain = make(world.rank), make()
    for net in (ours, plain):
        net[:4].requires_grad_(False)
    model = hybrid(ours)
    assert_same(ours.state_dict(), plain.state_dict(), "start")
    batch = classification(10)
    replica_step(model, batch, (7, 3))
    plain_backward(plain, batch)
    assert_same_gradients(ours, plain, **CLOSE)


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
    inputs, targets = classification(len(flags), seed)
    return (inputs, torch.tensor(flags)), targets


@cells.add("without find_unused_parameters an unused parameter is an error that names it")
def _unused_error(world):
    model = hybrid(sometimes(), chunks=2)
    with pytest.raises(UserError) as caught:
        model.train_step(*flagged_batch([True] * 4, seed=world.rank), F.cross_entropy)
    assert " 0.never," in str(caught.value)
    assert "find_unused_parameters=" in str(caught.value)


def unused(flags_of_rank, used_by_anyone):
    def check(world):
        ours, plain = sometimes(), sometimes()
        model = hybrid(ours, chunks=2, find_unused_parameters=True)
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
            expected = with_gradient(plain)
            assert ("0.flagged" in expected) is used_by_anyone
            found = {name: grad for name, grad in with_gradient(ours).items() if grad.any()}
            assert_same(found, expected, f"seed {seed}", **CLOSE)
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
    cells.add(
        f"with find_unused_parameters a parameter trains: {_what}",
        thorough=_what
        not in ("used by nobody", "used by one replica", "used by the first of one replica"),
    )(unused(_flags, _used))


def after_failure(kind, microbatch):
    def check(world):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Identity(), Faulty(), nn.Linear(6, 3))
        plain = copy.deepcopy(net)
        # so long waits the all-reduce of a rank that has begun it before the other one failed
        model = HybridModel(net, World.from_env(2, "cpu", timeout_s=5), chunks=2)
        rows = (4, 4)
        first, second, third = (classification(8, seed) for seed in range(3))
        replica_step(model, first, rows)
        net[2].fail_at(kind, microbatch)
        with pytest.raises(ArithmeticError) as caught:
            model.train_step(*share(second, rows, world.rank), F.cross_entropy)
        notes = "\n".join(caught.value.__notes__)
        # a hook on the input of a stage runs in the backward of the stage that has made it
        stage = 1 if kind == "forward" else 0
        assert f"in the {kind} of micro-batch {microbatch} on stage {stage}" in notes, notes
        net[2].never()
        model.zero_grad()
        world.gather(None)  # a new group must not wait for a rank as long as its limit
        replica_step(model, third, rows)
        plain_backward(plain, third)
        assert_same_gradients(net, plain, "the step after", **CLOSE)
        assert_same_on_all_ranks(world, grads(net), "the step after")

    return check


for _kind, _microbatch in itertools.product(("forward", "backward"), (0, 1)):
    cells.add(
        f"after an exception on both ranks the next step is right: "
        f"{_kind} of micro-batch {_microbatch}",
        thorough=_microbatch == 0,
    )(after_failure(_kind, _microbatch))


@cells.add("verify compares what all replicas have together with the unsplit module", thorough=True)
def _(world):
    for name in ("dropout", "conv", "masked_lm"):
        case = CASES[name]
        torch.manual_seed(0)
        model = hybrid(case.net(), 2)
        found = model.verify(*case.batch(7 + 3 * world.rank, world.rank), case.loss)
        assert found.exact, found
        model.train_step(*case.batch(7, world.rank), case.loss)
        before = {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        }
        model.verify(*case.batch(7, world.rank + 2), case.loss, times=1)
        assert_same(((n, p.grad) for n, p in model.named_parameters()), before, "gradients")
        wrong = copy.deepcopy(model.net)
        if world.rank == 1:
            with torch.no_grad():
                next(wrong.parameters()).mul_(1.5)
        found = model.verify(*case.batch(9, world.rank), case.loss, reference=wrong)
        assert not found.exact
        assert len(set(world.gather(str(found)))) == 1


class Holds(nn.Module):
    """Uses a weight of another layer that it has not registered."""

    def __init__(self, weight):
        super().__init__()
        self.weights = [weight]

    def forward(self, x):
        return F.linear(x, self.weights[0])


def first_step(net, loss_fn=F.cross_entropy, **options):
    model = hybrid(net, 2, chunks=2, **options)
    model.train_step(*floats_and_classes(6, model.world.rank), loss_fn)
    return model


def assert_first_step_as_one_process(net, world, loss_of=lambda net: F.cross_entropy, **options):
    """A step of all replicas equals one of the whole model on the samples of both."""
    plain = copy.deepcopy(net)
    plain.load_state_dict(world.broadcast(plain.state_dict()))
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        for hook in (ours._backward_hooks or {}).values():
            theirs.register_hook(hook)
    first_step(net, loss_of(net), **options)
    for rank in range(world.size):
        inputs, targets = floats_and_classes(6, rank)
        for rows in (slice(0, 3), slice(3, 6)):
            loss = loss_of(plain)(plain(inputs[rows]), targets[rows])
            (loss / 2).backward()
    for parameter in plain.parameters():
        parameter.grad /= world.size
    assert_same_gradients(net, plain, **CLOSE)


@cells.add("a weight of another stage that a layer holds in a list gets the gradients of both")
def _held(world):
    for schedule in ("1f1b", "zb-h1"):
        first = nn.Linear(8, 8)
        net = nn.Sequential(first, nn.Tanh(), Holds(first.weight), nn.Linear(8, 3))
        assert_first_step_as_one_process(net, world, schedule=schedule)


@cells.add("a penalty on weights of any stage is exact")
def _penalty(world):
    def of_all(net):
        def loss(output, targets):
            penalty = net[0].weight.square().sum() + net[3].weight.square().sum()
            return F.cross_entropy(output, targets) + 0.01 * penalty

        return loss

    for schedule in ("1f1b", "zb-h1"):
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        assert_first_step_as_one_process(net, world, of_all, schedule=schedule)


class Reentrant(nn.Module):
    """Runs one module twice, each time in a checkpoint that runs a backward inside the backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)
        return x


@cells.add("a reentrant checkpoint that runs a module twice is refused with the way out")
def _reentrant(world):
    net = nn.Sequential(nn.Linear(8, 8), Reentrant(), nn.Linear(8, 8), nn.Linear(8, 3))
    with pytest.raises(UserError, match="use_reentrant=False"):
        first_step(net)


@cells.add("a hook on a parameter that stages share sees the sum of its gradients")
def _hooked(world):
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    net[2].weight = net[0].weight
    net[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    assert_first_step_as_one_process(net, world)


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
