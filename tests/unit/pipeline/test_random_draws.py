"""Random draws are independent of the split, the schedule and the default generator."""

import copy
import itertools
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from support.cases import thinned
from support.compare import assert_same, cpu_world, grads, hybrid, mean_loss, plain_step
from support.nets import CASES
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import UserError
from hybridtrain.pipeline import default_generator_lock

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


SPLITS = list(
    itertools.product([2, 3, 4, 5], ["never", "except_last", "always"], ["gpipe", "1f1b"])
)


@pytest.mark.parametrize(("nb_part", "recompute", "schedule"), thinned(SPLITS, 5))
@pytest.mark.quick_cases(1)
def test_dropout_draws_the_same_masks_for_every_split(nb_part, recompute, schedule):
    case, results = CASES["dropout"], []
    split = {"nb_part": nb_part, "recompute": recompute, "schedule": schedule}
    for options in ({"nb_part": 1, "schedule": "gpipe"}, split):
        net = case.net()
        model = hybrid(net, seed=5, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        for step in range(3):
            optimizer.zero_grad()
            model.train_step(*case.batch(10, step), case.loss)
            optimizer.step()
        results.append((grads(net), model.state_dict()))
    (grads_1, state_1), (grads_n, state_n) = results
    assert_same(grads_n, grads_1, "gradient of the last step")
    assert_same(state_n, state_1, "weights")


class Masks(nn.Module):
    """Notes down the mask of each of its micro-batches."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.seen = []
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.seen.append((self.draw(torch.ones(4, 32)) == 0).clone())
        return x * self.weight


def masks_of(steps=2, chunks=2, layers=2, seed=0, replica=0, start=0, nb_part=1, draw=None):
    """{(step, layer, micro-batch): mask}."""
    net = nn.Sequential(*[Masks(draw or nn.Dropout(0.5)) for _ in range(layers)])
    world = cpu_world(nb_part, replica)
    model = HybridModel(net, world, chunks=chunks, schedule="gpipe", seed=seed)
    model.rng.step = start
    for _ in range(steps):
        model.train_step(torch.ones(chunks, 1), None, mean_loss)
    return {
        (start + step, layer, i): net[layer].seen[step * chunks + i]
        for step in range(steps)
        for layer in range(layers)
        for i in range(chunks)
    }


def fingerprints(masks):
    return {tuple(mask.flatten().tolist()) for mask in masks.values()}


def test_draws_differ_by_step_layer_and_micro_batch():
    assert len(fingerprints(masks_of(steps=3, chunks=3, layers=3))) == 27


@pytest.mark.parametrize("change", [{"replica": 1}, {"seed": 1}, {"start": 5}], ids=str)
def test_draws_differ_by_replica_seed_and_step(change):
    assert not fingerprints(masks_of()) & fingerprints(masks_of(**change))


DRAWS = {
    "dropout": nn.Dropout(0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.5)[0],
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "in place": lambda x: x.clone().bernoulli_(0.5),
    "rand": lambda x: (torch.rand(x.shape) > 0.5).float(),
    "randint": lambda x: torch.randint(0, 2, x.shape),
    "feature dropout": lambda x: F.dropout1d(x[None], 0.5)[0],
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw_is_seeded_whatever_the_default_generator(name):
    results = []
    for seed, nb_part in [(1, 1), (2, 2)]:
        torch.manual_seed(seed)  # must not matter
        results.append(masks_of(draw=DRAWS[name], nb_part=nb_part))
    assert_same(*results)


def test_training_leaves_the_default_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    masks_of(nb_part=2)
    masks_of(draw=lambda x: F.dropout(x, 0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_the_same_again_once_the_step_is_put_back():
    all_five = masks_of(steps=5)
    assert_same(masks_of(steps=2, start=3), {k: v for k, v in all_five.items() if k[0] >= 3})


def test_a_layer_that_begins_to_draw_later_is_seeded_after_train():
    def run(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(Masks(nn.Dropout(0.5)))
        model = hybrid(net, 1, chunks=2)
        x = torch.ones(2, 1)
        model.eval()
        model.train_step(x, None, mean_loss)  # draws nothing
        net.train()  # as a user may, not through the model
        model.train_step(x, None, mean_loss)
        return net[0].seen[2:]

    assert all(map(torch.equal, run(1), run(2)))


class Switched(nn.Module):
    """Drops out while a switch outside of all modules is on."""

    on = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return F.dropout(x, 0.5) if Switched.on else x


def raise_a_rate(net, monkeypatch):
    net[1].p = 0.5


def switch_a_global(net, monkeypatch):
    monkeypatch.setattr(Switched, "on", True)


@pytest.mark.parametrize("change", [raise_a_rate, switch_a_global], ids=lambda f: f.__name__)
@pytest.mark.quick_cases(1)
def test_a_layer_that_begins_to_draw_draws_by_place_in_that_very_step(monkeypatch, change):
    def gradients(nb_part, recompute):
        torch.manual_seed(nb_part)  # must not matter
        net = nn.Sequential(Switched(), nn.Dropout(0.0), nn.Linear(4, 4), Switched())
        net.load_state_dict(first)
        model = hybrid(net, nb_part, chunks=2, seed=3, recompute=recompute)
        batch = torch.ones(8, 4), torch.zeros(8, 4)
        with monkeypatch.context() as patch:
            model.train_step(*batch, F.mse_loss)
            unchanged = grads(net)
            change(net, patch)
            model.zero_grad()
            model.train_step(*batch, F.mse_loss)
        return grads(net), unchanged

    first = nn.Sequential(Switched(), nn.Dropout(0.0), nn.Linear(4, 4), Switched()).state_dict()
    expected, unchanged = gradients(1, "never")
    assert not torch.equal(expected["0.linear.weight"], unchanged["0.linear.weight"])
    for nb_part, recompute in ((2, "never"), (1, "always"), (4, "always"), (2, {"every": 1})):
        assert_same(gradients(nb_part, recompute)[0], expected, f"{nb_part} {recompute}")


class OwnCheckpoint(nn.Module):
    """A layer with gradient checkpointing and dropout, as many models have."""

    def __init__(self, rate, use_reentrant=False):
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(rate)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        run = lambda y: self.dropout(torch.tanh(self.linear(y)))  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_a_models_own_checkpoint_is_refused_since_its_mask_would_differ(use_reentrant):
    net = nn.Sequential(nn.Linear(4, 4), OwnCheckpoint(0.5, use_reentrant))
    with pytest.raises(UserError, match=r"own gradient checkpointing.*set recompute="):
        hybrid(net).train_step(torch.randn(8, 4), None, mean_loss)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_models_own_checkpoint_without_dropout_has_the_gradients_of_the_plain_model(rate):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), OwnCheckpoint(rate))
    net[1].dropout.eval()
    plain, x = copy.deepcopy(net), torch.randn(8, 4)
    model = hybrid(net)
    net[1].dropout.eval()
    model.train_step(x, None, mean_loss)
    plain_step(plain, x, None, mean_loss)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.quick_cases(1)
def test_a_layer_that_compiles_a_part_of_itself_draws_as_if_it_did_not(nb_part):
    found = []
    for compiled, parts in ((False, 1), (True, nb_part)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        own = Holder(torch.compile(part, backend="eager") if compiled else part)
        net = nn.Sequential(nn.Linear(4, 4), own, nn.Linear(4, 4))
        model = hybrid(net, parts, chunks=2)
        for _ in range(2):  # traced in the first
            model.train_step(torch.ones(8, 4), None, mean_loss)
            found.append([p.grad.clone() for p in net.parameters()])
    torch._dynamo.reset()
    for step in range(2):
        for theirs, mine in zip(found[step], found[2 + step], strict=True):
            assert torch.equal(mine, theirs), f"step {step}"


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class MeetsAnotherThread(nn.Module):
    """Draws while another thread uses the default generator for a moment, as a data loader does."""

    def forward(self, x):
        begun = threading.Event()

        def use():
            with default_generator_lock:
                state = torch.get_rng_state()
                torch.manual_seed(1)
                begun.set()
                time.sleep(0.05)
                torch.set_rng_state(state)

        thread = threading.Thread(target=use)
        thread.start()
        begun.wait()
        y = F.dropout(x, 0.5)
        thread.join()
        return y


def test_a_draw_of_another_thread_is_not_taken_for_a_seed_of_the_forward():
    found = []
    for layer, parts in ((nn.Dropout(0.5), 1), (MeetsAnotherThread(), 2)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
        hybrid(net, parts, chunks=2).train_step(torch.ones(4, 4), None, mean_loss)
        found.append(grads(net))
    assert_same(found[1], found[0])
