"""Tied weights and values that skip layers, over replicas."""

import sys

import torch
from support.compare import (
    CLOSE,
    assert_same,
    assert_same_gradients,
    assert_same_on_all_ranks,
    grads,
    hybrid,
    replica_step,
    square_loss,
)
from support.launch import Cells
from support.nets import WIDTH, classification, floats, skip_chain, tied_gpt, token_loss, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

cells = Cells()

# The same sums in another order, in float64.
CLOSE_64 = {"rtol": 1e-11, "atol": 1e-14}


def gpt(seed=0, **options):
    """In float64, so that what cancels out does not depend on how a CPU adds up."""
    torch.manual_seed(seed)
    return tied_gpt(uses=3, **options).double()


def tied(nb_part, v, frozen=False, **options):
    def check(world):
        # each rank begins with other weights: rank 0's must count, in all uses
        ours, plain = gpt(seed=world.rank, frozen=frozen), gpt(frozen=frozen)
        model = hybrid(ours, nb_part, v, chunks=3, **options)
        assert all(torch.equal(ours[i].weight, plain[0].weight) for i in (0, 2, 3))
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, plain)]
        for seed, rows in enumerate([(6, 6), (7, 3), (1, 8)]):
            batch = tokens(sum(rows), seed)
            replica_step(model, batch, rows, token_loss)
            token_loss(plain(batch[0]), batch[1]).backward()
            assert_same_gradients(ours, plain, f"rows {rows}", **CLOSE_64)
            assert_same_on_all_ranks(world, grads(ours), f"rows {rows}")
            norms = [clip_grad_norm_(net.parameters(), 0.5) for net in (model, plain)]
            torch.testing.assert_close(*norms)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(ours.state_dict(), plain.state_dict(), "weights", **CLOSE_64)
        assert_same_on_all_ranks(world, ours.state_dict(), "weights")

    return check


for _nb_part, _v in [(1, 1), (2, 1), (3, 1), (2, 2)]:
    cells.add(
        f"tied weights equal one process on the global batch: {_nb_part} x {_v} stages",
        thorough=(_nb_part, _v) != (2, 2),
    )(tied(_nb_part, _v))
cells.add("tied weights equal one process when stages are recomputed")(
    tied(3, 1, recompute="always")
)
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
                batch = tokens(9, 10 * turn + index)
                replica_step(model, batch, (5, 4), token_loss, sync=index == 2)
                token_loss(plain(batch[0]), batch[1]).backward()
                everyones = world.gather(ours[0].weight.grad.clone())
                assert torch.equal(*everyones) is (index == 2), f"after batch {index}"
            assert_same_gradients(ours, plain, f"turn {turn}", **CLOSE_64)
            assert_same_on_all_ranks(world, grads(ours))

    return check


for _nb_part in (1, 2, 3):
    cells.add(
        f"tied weights add up without sync, then with it: {_nb_part} stages",
        thorough=_nb_part != 2,
    )(tied_accumulation(_nb_part))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, flag = value
        return self.linear(x), flag


class Sometimes(nn.Module):
    """Uses the tied weight for flagged samples only, which one replica lacks."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, value):
        x, flag = value
        return x + self.weight.sum(0) if bool(flag.any()) else x


@cells.add("a tied weight that one replica uses once and the other twice")
def _sometimes(world):
    def make():
        torch.manual_seed(0)
        first = First()
        return nn.Sequential(first, Sometimes(first.linear.weight), nn.Linear(WIDTH, 2))

    ours, plain = make(), make()
    model = hybrid(ours, 2, chunks=1, split=[1, 2], find_unused_parameters=True)
    for seed in range(2):
        model.zero_grad()
        plain.zero_grad()
        x = floats(8, seed=seed)
        parts = [(rows, torch.full((4,), bool(r))) for r, rows in enumerate(x.split(4))]
        model.train_step(parts[world.rank], None, square_loss)
        for part in parts:
            (square_loss(plain(part)) / 2).backward()
        assert_same_gradients(ours, plain, f"seed {seed}", **CLOSE)
        assert_same_on_all_ranks(world, grads(ours), f"seed {seed}")


def skipping(nb_part, recompute):
    def check(world):
        def make(seed):
            torch.manual_seed(seed)
            return nn.Sequential(*skip_chain(0, 4, length=5), nn.Linear(WIDTH, 3))

        ours, plain = make(world.rank), make(0)
        model = hybrid(ours, nb_part, chunks=3, recompute=recompute)
        for seed, rows in enumerate([(6, 6), (7, 3)]):
            model.zero_grad()
            plain.zero_grad()
            for part in range(2):
                batch = classification(sum(rows), 10 * seed + part)
                replica_step(model, batch, rows, sync=part == 1)
                F.cross_entropy(plain(batch[0]), batch[1]).backward()
            assert_same_gradients(ours, plain, f"rows {rows}", **CLOSE)
            assert_same_on_all_ranks(world, grads(ours), f"rows {rows}")

    return check


for _nb_part, _recompute in [(2, "never"), (3, "never"), (3, "always"), (3, "except_last")]:
    cells.add(
        f"skipping values equal one process: {_nb_part} stages, recompute {_recompute}",
        thorough=(_nb_part, _recompute) not in ((2, "never"), (3, "always")),
    )(skipping(_nb_part, _recompute))


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
