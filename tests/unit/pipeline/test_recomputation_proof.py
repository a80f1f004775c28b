"""Recomputation gives the gradients of the plain module, or is refused with the layer's name."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_same, assert_same_gradients, hybrid, mean_loss, plain_step
from support.nets import WIDTH, TanhLinear, regression
from torch import nn

from hybridtrain.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.ones(WIDTH))


class Reads(TanhLinear):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return torch.tanh(super().forward(x) * self.cell.h.clone())


class Writes(TanhLinear):
    def __init__(self, cell, by_data=False):
        super().__init__()
        self.cell, self.by_data = cell, by_data

    def forward(self, x):
        y = super().forward(x)
        h = self.cell.h.data if self.by_data else self.cell.h
        with torch.no_grad():
            h.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y


class Momentum(nn.Module):
    """A copy of its weights follows them; the first update changes nothing."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data.mul_(0.5).add_(query.data, alpha=0.5)  # exact
        return torch.tanh(self.query(x)) * torch.sigmoid(self.key(x).detach())


class Traced(nn.Module):
    """Its statements become several layers, of which one reads what another one changes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("h", torch.ones(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.b(self.a(x) * self.h.clone()))
        self.h.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.c(y)


class ReadsFirst(Traced):
    """A layer before the one that changes the buffer computes with the buffer itself."""

    def forward(self, x):
        y = self.b(self.a(torch.exp(x) * self.h))
        self.h.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.c(torch.tanh(y))  # the recomputation must not stop before the change


class Hidden(TanhLinear):
    """Multiplies by a number that comes from `state`, and changes with each forward."""

    NUMBERS = {  # noqa: RUF012
        "generator": (
            lambda: torch.Generator().manual_seed(1),
            lambda g: float(torch.rand((), generator=g)),
        ),
        "object": (lambda: SimpleNamespace(n=0), lambda o: vars(o).update(n=o.n + 1) or o.n),
        "list in a dict": (lambda: {"a": []}, lambda d: d["a"].append(1) or len(d["a"])),
        "list": (list, lambda runs: runs.append(1) or len(runs)),
        "array": (lambda: np.zeros(1), lambda a: float(np.add(a, 1, out=a)[0])),
        "random": (lambda: random.Random(1), lambda r: r.random()),
        "numpy generator": (lambda: np.random.default_rng(1), lambda r: r.random()),
        "iterator": (lambda: iter(range(1, 1000)), next),
    }

    def __init__(self, kind):
        super().__init__()
        make, self.number = self.NUMBERS[kind]
        self.state = make()

    def forward(self, x):
        return torch.tanh(super().forward(x) * self.number(self.state))


def sharing(by_data=False):
    cell = Cell()
    return nn.Sequential(TanhLinear(), Reads(cell), Writes(cell, by_data), nn.Linear(WIDTH, WIDTH))


def around(make):
    return nn.Sequential(TanhLinear(), make(), nn.Linear(WIDTH, WIDTH))


def check(make, recompute, steps=3, nb_part=1):
    torch.manual_seed(0)
    net = make()
    torch.manual_seed(0)
    plain = make()
    model = hybrid(net, nb_part, recompute=recompute, schedule="gpipe")
    optimizers = [
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], 0.5)
        for one in (net, plain)
    ]
    for seed in range(steps):
        x, y = regression(11, seed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain_step(plain, x, y)
        model.train_step(x, y, F.mse_loss)
        assert_same_gradients(net, plain, f"step {seed}")
        assert_same(net.state_dict(), plain.state_dict())
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("recompute", ["always", "except_last", {"every": 1}, ["1"]], ids=str)
@pytest.mark.parametrize(
    "make",
    [sharing, lambda: sharing(by_data=True), lambda: around(Momentum), Traced, ReadsFirst],
    ids=["modules", "modules, by data", "momentum encoder", "traced", "read first"],
)
@pytest.mark.quick_cases("modules-always", "read first-{'every': 1}")
def test_state_that_another_layer_changes_is_put_back(make, recompute):
    is_traced = make in (Traced, ReadsFirst)
    check(make, recompute if not is_traced or recompute != ["1"] else {"every": 1})


RESTORED = ("generator", "object", "list in a dict", "list", "array")


@pytest.mark.parametrize("recompute", ["always", {"every": 1}], ids=str)
@pytest.mark.parametrize("kind", Hidden.NUMBERS)
@pytest.mark.quick_cases(5)
def test_hidden_state_is_put_back_or_refused_with_the_layer(kind, recompute):
    try:
        check(lambda: around(lambda: Hidden(kind)), recompute)
    except ConfigError as error:
        assert "layer '1' computes different values" in str(error)  # noqa: PT017
        assert kind not in RESTORED
    else:
        assert kind in RESTORED


class CallsRReLU(TanhLinear):
    def forward(self, x):
        return F.rrelu(super().forward(x), training=self.training)


@pytest.mark.parametrize("layer", [nn.RReLU, CallsRReLU])
def test_rrelu_is_refused_with_its_reason_and_trains_outside_of_recomputation(layer):
    def model(recompute):
        return hybrid(around(layer), 2, recompute=recompute)

    with pytest.raises(ConfigError, match=r"layer '1' .*random slopes of RReLU .*, or leave the"):
        model("always").train_step(*regression(8), F.mse_loss)
    model(["0", "2"]).train_step(*regression(8), F.mse_loss)


def train_with_hooks(recompute, dtype):
    torch.manual_seed(0)
    net = around(TanhLinear)
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, recompute=recompute)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.to(dtype), lambda tensor: tensor.float()
    ):
        model.train_step(*regression(8), mean_loss)  # saves nothing for its backward
    return net, plain


def test_hooks_on_saved_tensors_do_not_change_what_is_recomputed():
    net, plain = train_with_hooks("always", torch.bfloat16)
    plain_step(plain, *regression(8), mean_loss)
    assert_same_gradients(net, plain)
    never, _ = train_with_hooks("never", torch.bfloat16)
    assert not torch.equal(net[0].linear.weight.grad, never[0].linear.weight.grad)


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class ByData(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(1 + 0.1 * x.detach().mean())
        return super().forward(x)


@pytest.mark.parametrize("nb_part", [1, 2])
@pytest.mark.parametrize("layer", [Clamped, ByData])
def test_a_change_before_the_backward_is_refused_with_the_layer_and_exact_recomputed(
    layer, nb_part
):
    def make():
        return around(lambda: layer(WIDTH, WIDTH))

    message = r"layer '1' changes its parameter 'weight' in its forward.*clone.*recompute=\['1'"
    with pytest.raises(UserError, match=message):
        check(make, "never", nb_part=nb_part)
    check(make, ["1"], nb_part=nb_part)


def test_a_weight_that_stages_share_and_a_forward_changes_is_refused():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)

        def forward(self, x):
            return self.rows((x.abs() * 3).long() % WIDTH).sum(1)

    net = nn.Sequential(First(), TanhLinear(), nn.Linear(WIDTH, WIDTH, bias=False))
    net[2].weight = net[0].rows.weight
    model = hybrid(net, 2)
    with pytest.raises(ConfigError, match=r"layer '0' changes its parameter 'weight'.*stages use"):
        model.train_step(*regression(11), F.mse_loss)


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([*Hidden.NUMBERS, "cell", "momentum"]), min_size=1, max_size=3),
    by_data=st.booleans(),
    recompute=st.sampled_from(["always", "except_last", {"every": 1}, {"every": 2}]),
)
def test_gradients_are_those_of_the_plain_module_or_the_layer_is_named(kinds, by_data, recompute):
    def make():
        cell = Cell()
        layers = [TanhLinear()]
        for kind in kinds:
            if kind == "cell":
                layers += [Reads(cell), Writes(cell, by_data)]
            else:
                layers.append(Momentum() if kind == "momentum" else Hidden(kind))
        return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))

    try:
        check(make, recompute, 2)
    except UserError as error:
        assert "layer '" in str(error)  # noqa: PT017
