"""Layers that change what they are given in place: exact as in the plain model, or refused."""

import copy

import pytest
import torch
from support.compare import assert_same_gradients, hybrid, plain_step
from support.nets import WIDTH, TanhLinear, regression
from torch import nn
from torch.nn import functional as F

from hybridtrain.errors import SplitError, UserError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Returns(nn.Module):
    """A layer that returns two tensors, which `parts` makes of one."""

    def __init__(self, parts):
        super().__init__()
        self.inner, self.parts = nn.Linear(WIDTH, WIDTH), parts

    def forward(self, x):
        return self.parts(self.inner(x))


class Doubles(nn.Module):
    """Changes the first of two tensors in place, or a sum of both if it is not to."""

    inplace = True

    def forward(self, given):
        one, other = given
        one.mul_(2)  # and so the other one
        return one + F.pad(other, (0, one.shape[1] - other.shape[1]))


def same(y):
    return y, y


def view(y):
    return y, y[:, :4]


CHECKPOINTS = ["never", "always", {"every": 1}, ["2"]]


def net_of(parts):
    torch.manual_seed(0)
    return nn.Sequential(TanhLinear(), Returns(parts), Doubles(), TanhLinear())


@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
@pytest.mark.quick_cases(3)
def test_a_tensor_that_a_layer_returns_twice_is_one_where_the_next_works_in_place(
    recompute, nb_part
):
    net = net_of(same)
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part, split=[2, 2] if nb_part == 2 else [4], recompute=recompute)
    for seed in range(2):
        model.train_step(*regression(7, seed), F.mse_loss)
        plain_step(plain, *regression(7, seed))
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("split", [[4], [2, 2], [3, 1]], ids=str)
@pytest.mark.parametrize("recompute", CHECKPOINTS, ids=str)
def test_a_view_that_would_be_cut_off_from_what_is_changed_in_place_is_refused(split, recompute):
    net = net_of(view)
    plain = copy.deepcopy(net)
    model = hybrid(net, len(split), split=split, recompute=recompute)
    refused = None
    if recompute != "never":  # the second run has copies
        refused = r"shapes \(2, 6\) and \(2, 4\) share memory.*layer '2', which works in place"
    elif split == [2, 2]:
        refused = r"shape \(2, 6\) of an earlier stage is changed in place through another view"
    if refused is not None:
        with pytest.raises(SplitError, match=refused):
            model.train_step(*regression(7), F.mse_loss)
        return
    model.train_step(*regression(7), F.mse_loss)
    plain_step(plain, *regression(7))
    assert_same_gradients(net, plain)


class Passes(nn.Module):
    """Hands on what it gets, which a later layer changes."""

    def forward(self, x):
        return 2 * x, x


class ChangesSecond(nn.Module):
    inplace = True

    def forward(self, given):
        one, other = given
        return one * other.add_(1)


class Residual(nn.Module):
    """Adds what its layers were given, as it is after them."""

    def __init__(self):
        super().__init__()
        self.first, self.layers = TanhLinear(), nn.Sequential(Passes(), ChangesSecond())
        self.last = TanhLinear()

    def forward(self, x):
        x = self.first(x) + 1  # nothing that the backward of tanh needs
        return self.last(self.layers(x) + x)


@pytest.mark.parametrize("recompute", CHECKPOINTS[:3], ids=str)
@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_change_in_place_is_seen_by_code_after_the_layer(recompute, nb_part):
    torch.manual_seed(0)
    net = Residual()
    plain = copy.deepcopy(net)
    model = hybrid(net, nb_part, recompute=recompute)
    for seed in range(2):
        model.train_step(*regression(7, seed), F.mse_loss)
        plain_step(plain, *regression(7, seed))
    assert_same_gradients(net, plain)


class Adds(nn.Module):
    """Changes its input in place, without a word."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x.add_(1))


class Declared(Adds):
    inplace = True


FIRST = {
    "relu": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "an own layer": Adds,
    "an own layer that declares it": Declared,
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.parametrize("kind", FIRST.values(), ids=FIRST)
@pytest.mark.quick_cases(3)
def test_a_first_layer_may_change_the_batch_in_place(kind, nb_part, schedule):
    torch.manual_seed(0)
    net = nn.Sequential(kind(), TanhLinear(), TanhLinear())
    plain = copy.deepcopy(net)
    x, y = regression(9)
    expected = x.clone()
    plain_step(plain, expected, y)
    hybrid(net, nb_part, schedule=schedule).train_step(x, y, F.mse_loss)
    assert_same_gradients(net, plain)
    assert torch.equal(x, expected), "the plain model changes its batch, too"


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("recompute", ["always", {"every": 1}], ids=str)
def test_a_layer_that_changes_its_input_without_a_word_is_not_recomputed(recompute, at):
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # else a later one's input is a leaf
    layers = [Adds(), TanhLinear()] if at == 0 else [frozen, Adds()]
    model = hybrid(nn.Sequential(*layers), split=[1, 1], recompute=recompute)
    with pytest.raises(UserError, match="inplace = True") as error:
        model.train_step(*regression(8), F.mse_loss)
    assert "inplace = True" in str(error.value)
