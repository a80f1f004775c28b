"""Values that skip layers: with `stash` and `pop`, a cut model computes what the plain one does."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from support.cases import thinned
from support.compare import (
    CLOSE,
    assert_same_gradients,
    hybrid,
    mean_loss,
    plain_step,
)
from support.nets import Pop, Stash, TanhLinear, regression, skip_chain
from torch import nn

from hybridtrain._base.skip import pop, stash

SPLITS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 3)]  # (nb_part, stages_per_device)
CHECKPOINTS = ["never", "except_last", "always", {"every": 1}, {"every": 2}]


pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def plain_layers(count):
    return [TanhLinear() for _ in range(count)]


class StashTree(TanhLinear):
    stashes = ("tree",)

    def forward(self, x):
        y = super().forward(x)
        stash("tree", {"y": y, "pair": (x.exp(), None), "mask": y > 0, "n": 2, "text": "t"})
        return y


class PopTree(TanhLinear):
    pops = ("tree",)

    def forward(self, x):
        tree = pop("tree")
        assert (tree["n"], tree["text"], tree["pair"][1]) == (2, "t", None)
        return super().forward(x) + tree["n"] * tree["y"] * tree["mask"] + tree["pair"][0]


class Inner(nn.Module):
    """Declares nothing itself: the modules in it do."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def crossed():
    layers = plain_layers(8)
    layers[1], layers[2], layers[5], layers[7] = Stash("a"), Stash("b"), Pop("a"), Pop("b")
    return nn.Sequential(*layers)


def within_layers():
    inner = Inner(TanhLinear(), Stash("c"), Stash("d"), Pop("c"))
    return nn.Sequential(TanhLinear(), inner, *plain_layers(3), Inner(TanhLinear(), Pop("d")))


NETS = {
    "adjacent layers": lambda: skip_chain(3, 4),
    "over one layer": lambda: skip_chain(1, 3),
    "from the first layer to the last": lambda: skip_chain(0, 7),
    "crossing values": crossed,
    "a pytree": lambda: nn.Sequential(
        TanhLinear(), StashTree(), *plain_layers(4), PopTree(), TanhLinear()
    ),
    "modules within layers": within_layers,
}


def make(kind):
    torch.manual_seed(0)
    return NETS[kind]()


def assert_two_steps_equal_the_plain_net(net, parts, tolerance=None, **options):
    plain = copy.deepcopy(net)
    model = hybrid(net, *parts, **options)
    for seed in range(2):
        batch = regression(10, seed)
        plain_step(plain, *batch)
        model.train_step(*batch, F.mse_loss)
        assert_same_gradients(net, plain, **(tolerance or {}))
    return model


def test_in_the_plain_sequential_a_popped_value_is_what_was_stashed():
    net = skip_chain(1, 4, length=6)
    x, value = regression(10)[0], None
    y = x
    for index, layer in enumerate(net):
        if index == 4:
            y = torch.tanh(layer.linear(y)) + value
            continue
        if index == 1:
            value = torch.tanh(layer.linear(y))
        y = layer(y)
    assert torch.equal(net(x), y)
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize(
    ("kind", "split", "recompute"),
    thinned(list(itertools.product(NETS, SPLITS, CHECKPOINTS)), 7),
    ids=str,
)
@pytest.mark.quick_cases(2)
def test_gradients_with_skipping_values_equal_those_of_the_plain_net(kind, split, recompute):
    if split == (4, 1) and kind == "modules within layers":
        split = (3, 1)
    # with by-layer recomputation too, each value has two uses, whose two gradients commute
    assert_two_steps_equal_the_plain_net(
        make(kind), split, recompute=recompute, tolerance=CLOSE if kind == "a pytree" else None
    )


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("split", [(4, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("skipped", [0, 1, 2])
@pytest.mark.quick_cases(2)
def test_a_stashed_value_skips_any_number_of_stages(skipped, split, recompute):
    torch.manual_seed(0)
    net = skip_chain(0, 2 * (skipped + 1))  # two layers per stage
    assert_two_steps_equal_the_plain_net(net, split, recompute=recompute, split=[2, 2, 2, 2])


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("poppers", [(2, 3), (3, 5), (5, 7), (2, 7), (0, 7)], ids=str)
@pytest.mark.quick_cases(2)
def test_a_stashed_value_may_be_popped_by_several_layers(poppers, recompute):
    torch.manual_seed(0)
    layers = plain_layers(8)
    layers[0] = Inner(Stash("a"), Pop("a")) if 0 in poppers else Stash("a")
    for index in poppers:
        if index:
            layers[index] = Pop("a")
    net = nn.Sequential(*layers)
    # three gradients meet at the stashed value, in another order than in the plain net
    assert_two_steps_equal_the_plain_net(net, (4, 1), CLOSE, recompute=recompute)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.quick_cases(7)
def test_a_forward_with_skipping_values_equals_that_of_the_plain_net(kind, split):
    if split == (4, 1) and kind == "modules within layers":
        split = (3, 1)
    net = make(kind)
    plain = copy.deepcopy(net).eval()
    model = hybrid(net, *split, recompute="always").eval()
    for rows in (10, 3):
        x, _ = regression(rows)
        # the kernels choose their blocks by the number of samples: the last bits differ
        torch.testing.assert_close(model(x), plain(x).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_micro_batch_pops_its_own_value(split):
    class Number(nn.Module):
        stashes = ("number",)

        def forward(self, x):
            stash("number", x[:, :1].clone())
            return x

    class Check(nn.Module):
        pops = ("number",)

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.seen = []

        def forward(self, x):
            number = pop("number")
            assert torch.equal(number, x[:, :1])
            self.seen.append(float(number[0]))
            return self.linear(number)

    layers = [nn.Identity() for _ in range(6)]
    layers[0], layers[5] = Number(), Check()
    x = torch.arange(8.0)[:, None].expand(8, 3)
    hybrid(nn.Sequential(*layers), *split, chunks=8).train_step(x, None, mean_loss)
    assert layers[5].seen == list(range(8))


WRONG = {
    "stashed twice": (
        lambda: [Stash("a"), TanhLinear(), Stash("a"), Pop("a")],
        r"'a' is stashed by layer '0' and by '2'",
    ),
    "stashed twice in one layer": (
        lambda: [Inner(Stash("a"), Stash("a")), TanhLinear(), TanhLinear(), Pop("a")],
        r"'a' is stashed by layer '0' and by '0'",
    ),
    "never popped": (
        lambda: [Stash("a"), Stash("b"), TanhLinear(), Pop("b")],
        r"layer '0' stashes 'a', ",
    ),
    "popped before": (
        lambda: [Pop("a"), TanhLinear(), Stash("a"), TanhLinear()],
        r"layer '0' pops 'a', ",
    ),
    "popped only": (
        lambda: [TanhLinear(), TanhLinear(), TanhLinear(), Pop("zz")],
        r"layer '3' pops 'zz', ",
    ),
}


class Undeclared(TanhLinear):
    def __init__(self, action):
        super().__init__()
        self.action = action

    def forward(self, x):
        if self.action == "stash":
            stash("a", x)
            return super().forward(x)
        return super().forward(x) + pop("a")


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.quick_cases(7)
def test_an_undeclared_skipping_value_is_the_micro_batchs_own(split, recompute):
    torch.manual_seed(0)
    net = nn.Sequential(Undeclared("stash"), *plain_layers(6), Undeclared("pop"))
    assert_two_steps_equal_the_plain_net(net, split, schedule="gpipe", recompute=recompute)


@pytest.mark.parametrize("nb_part", [1, 3])
@pytest.mark.parametrize("kind", ["popped before", "popped only"])
def test_a_pop_of_what_no_earlier_layer_has_stashed_is_an_error_with_a_hint(kind, nb_part):
    layers, _ = WRONG[kind]
    model = hybrid(nn.Sequential(*layers()), nb_part)
    with pytest.raises(KeyError, match=r"no earlier layer has stashed it.*`stashes`.*`pops`"):
        model.train_step(*regression(10), F.mse_loss)


class Forgets(TanhLinear):
    stashes = ("a",)


@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.parametrize("nb_part", [1, 2, 4])
@pytest.mark.quick_cases(3)
def test_a_declared_value_that_is_not_stashed_is_an_error_with_a_hint(nb_part, recompute):
    layers = [Forgets(), *plain_layers(6), Pop("a")]
    model = hybrid(nn.Sequential(*layers), nb_part, recompute=recompute)
    with pytest.raises(KeyError, match=r"'a'.*`stashes`.*`pops`"):
        model.train_step(*regression(10), F.mse_loss)


def test_a_failed_step_leaves_no_stashed_value_for_the_next_one():
    net = skip_chain(0, 7)
    plain = copy.deepcopy(net)
    model = hybrid(net, 4)
    calls = itertools.count()

    def failing(output, target):
        if next(calls) == 2:
            raise ArithmeticError("boom")
        return F.mse_loss(output, target)

    with pytest.raises(ArithmeticError):
        model.train_step(*regression(10), failing)
    model.zero_grad()
    batch = regression(10, 1)
    plain_step(plain, *batch)
    model.train_step(*batch, F.mse_loss)
    assert_same_gradients(net, plain)


def test_a_stashed_value_that_needs_no_gradient_is_passed_on():
    class Mask(nn.Module):
        stashes = ("mask", "none")

        def forward(self, x):
            stash("mask", x > 0)
            stash("none", None)
            return x

    class Masked(TanhLinear):
        pops = ("mask", "none")

        def forward(self, x):
            assert pop("none") is None
            return super().forward(x) * pop("mask")

    torch.manual_seed(0)
    net = nn.Sequential(Mask(), TanhLinear(), TanhLinear(), Masked())
    assert_two_steps_equal_the_plain_net(net, (4, 1))
    assert_two_steps_equal_the_plain_net(copy.deepcopy(net), (4, 1), recompute="always")
