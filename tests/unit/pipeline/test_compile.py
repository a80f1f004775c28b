"""`compile=True` compiles every layer that does not draw, in every step."""

import copy
import enum
import functools
import logging

import pytest
import torch
from support.compare import assert_same, grads, hybrid, mean_loss
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

WIDTH, CHUNKS = 4, 2


def net(dropout=False):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    return nn.Sequential(*layers[:2], *([nn.Dropout(0.5)] if dropout else []), *layers[2:])


@pytest.fixture
def compiled_calls(monkeypatch):
    """Counts how often compiled code runs; the code is what Dynamo has traced."""
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(None)
            return graph(*args)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    yield calls
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", ["never", "always", {"every": 2}], ids=str)
@pytest.mark.quick_cases(1)
def test_every_layer_is_compiled_in_every_step(compiled_calls, recompute):
    model = hybrid(net(dropout=True), chunks=CHUNKS, compile=True, recompute=recompute)
    # 4 linear layers; of 5 layers, 2 linear ones are recomputed one by one
    runs = {"never": 4, "always": 8}.get(str(recompute), 6)
    for step in range(4):
        compiled_calls.clear()
        model.train_step(torch.randn(6, WIDTH), None, mean_loss)
        assert len(compiled_calls) == runs * CHUNKS, f"step {step}"
        if step % 2:
            model.eval()
            model(torch.randn(6, WIDTH))
            model.train()
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0


def test_draws_of_compiled_runs_do_not_depend_on_the_split(compiled_calls):
    found = []
    for settings in ({}, {"compile": True}, {"compile": True, "recompute": "always"}):
        model = hybrid(net(dropout=True), 1 + len(settings), chunks=CHUNKS, seed=3, **settings)
        for step in range(2):
            model.train_step(torch.ones(6, WIDTH) * step, None, mean_loss)
        found.append(grads(model.net))
    for other in found[1:]:
        assert_same(other, found[0], rtol=1e-6, atol=1e-7)


class Attention(nn.Module):
    """Draws by a number of its own, not by a module's."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout_p = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x):
        q = self.linear(x)[None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout_p)[0]


def raise_a_rate(net):
    net[1].p = 0.5


def raise_a_number(net):
    net[3].dropout_p = 0.5


def switch_a_module_to_training(net):
    net[4].train()


@pytest.mark.parametrize(
    "change", [raise_a_rate, raise_a_number, switch_a_module_to_training], ids=lambda f: f.__name__
)
@pytest.mark.quick_cases(1)
def test_a_layer_that_begins_to_draw_after_it_was_compiled_draws_by_place(compiled_calls, change):
    found = []
    for nb_part, compiles in ((1, False), (1, True), (2, True)):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH), Attention(),
            nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip
        net[4].eval()
        model = hybrid(net, nb_part, chunks=CHUNKS, seed=3, compile=compiles)
        model.train_step(torch.ones(6, WIDTH), None, mean_loss)
        change(net)
        net.zero_grad()
        torch.rand(nb_part)  # default generators differ
        model.train_step(torch.ones(6, WIDTH), None, mean_loss)
        found.append(grads(net))
    for other in found[1:]:
        assert_same(other, found[0], rtol=1e-6, atol=1e-7)


class Switched(nn.Module):
    """Drops out while a switch that no module has is on."""

    on = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        return F.dropout(x, 0.5) if Switched.on else x


@pytest.mark.parametrize("recompute", ["never", "always", {"every": 2}], ids=str)
@pytest.mark.quick_cases(1)
def test_a_compiled_layer_that_a_global_switches_draws_by_place_at_once(
    compiled_calls, monkeypatch, recompute
):
    found = []
    for nb_part, settings in ((1, {}), (2, {"compile": True, "recompute": recompute})):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched(), Switched(), nn.Linear(WIDTH, 2))
        model = hybrid(net, nb_part, chunks=CHUNKS, seed=3, **settings)
        torch.rand(nb_part)  # default generators differ
        with monkeypatch.context() as patch:
            for step in range(3):
                patch.setattr(Switched, "on", step > 0)
                net.zero_grad()
                model.train_step(torch.ones(6, WIDTH), None, mean_loss)
                found.append(grads(net))
    for step in range(3):
        assert_same(found[3 + step], found[step], f"step {step}", rtol=1e-6, atol=1e-7)
    assert not torch.equal(found[1]["0.weight"], found[0]["0.weight"])


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


class Globals:
    """Attributes that compiled code reads from a class."""

    flag, rate, name, numbers, mode = False, 1.0, "plain", [1], Mode.PLAIN


class ByGlobals(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        doubles = (
            Globals.flag
            or Globals.rate > 1
            or Globals.name == "doubled"
            or Globals.numbers[0] > 1
            or Globals.mode is Mode.DOUBLED
        )
        return x * 2 if doubles else x


def test_compiled_code_notices_a_changed_attribute_of_a_class(compiled_calls, monkeypatch):
    net = nn.Sequential(ByGlobals(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    model = hybrid(net, chunks=CHUNKS, compile=True)

    def gradient():
        net.zero_grad()
        model.train_step(torch.ones(6, WIDTH), None, mean_loss)
        return net[0].bias.grad

    plain = gradient().clone()
    for name, value in {
        "flag": True, "rate": 2.0, "name": "doubled", "numbers": [2], "mode": Mode.DOUBLED,
    }.items():  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(Globals, name, value)
            assert torch.equal(gradient(), 2 * plain), name
        assert torch.equal(gradient(), plain), name


@pytest.mark.thorough
def test_the_recomputation_of_a_layer_that_begins_to_draw_draws_the_same(monkeypatch):
    # a backend whose code draws other numbers than the plain layer
    compile_ = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_(self, backend="aot_eager", **options)
    )
    found = []
    for recompute in ("never", "always"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Switched(), nn.Linear(WIDTH, 2))
        model = hybrid(net, 1, chunks=CHUNKS, seed=3, compile=True, recompute=recompute)
        with monkeypatch.context() as patch:
            for on in (False, True):
                patch.setattr(Switched, "on", on)
                net.zero_grad()
                model.train_step(torch.ones(6, WIDTH), None, mean_loss)
        found.append(grads(net))
    torch._dynamo.reset()
    assert_same(*found, rtol=1e-6, atol=1e-7)


class Twice(torch.autograd.Function):
    """Cannot be compiled in one piece with what calls it."""

    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Doubling(nn.Linear):
    def forward(self, x):
        return Twice.apply(super().forward(x))


def test_a_layer_with_its_own_autograd_function_is_compiled_around_it(compiled_calls):
    plain = nn.Sequential(Doubling(WIDTH, WIDTH), Doubling(WIDTH, WIDTH))
    ours = copy.deepcopy(plain)
    x = torch.randn(8, WIDTH)
    hybrid(plain, chunks=CHUNKS).train_step(x, None, mean_loss)
    hybrid(ours, chunks=CHUNKS, compile=True).train_step(x, None, mean_loss)
    assert compiled_calls
    assert_same(grads(ours), grads(plain), rtol=1e-6, atol=1e-7)


def test_layers_whose_settings_stay_are_looked_at_once(compiled_calls):
    layers = net()
    runs = []
    layers[0].register_forward_hook(lambda *_: runs.append(None))
    model = hybrid(layers, 1, chunks=CHUNKS, compile=True)
    for _ in range(3):
        model.train_step(torch.randn(6, WIDTH), None, mean_loss)
    assert len(runs) == 3 * CHUNKS + 1


def test_a_look_at_a_layer_leaves_its_state_alone(compiled_calls):
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    ours = copy.deepcopy(plain)
    x = torch.randn(8, WIDTH)
    hybrid(plain, chunks=CHUNKS).train_step(x, None, mean_loss)
    hybrid(ours, chunks=CHUNKS, compile=True).train_step(x, None, mean_loss)
    assert ours[1].num_batches_tracked == CHUNKS
    assert_same(ours.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def test_the_number_of_compiled_layers_is_said(compiled_calls, caplog):
    model = hybrid(net(dropout=True), chunks=CHUNKS, compile=True)
    with caplog.at_level(logging.INFO, "hybridtrain"):
        model.train_step(torch.randn(6, WIDTH), torch.randn(6, WIDTH), F.mse_loss)
    assert "compiled 4 of 5 layers" in caplog.text
    assert "uncompiled in training: 2" in caplog.text
    summaries = model.stage_summaries(torch.optim.SGD(model.parameters(), lr=0.1))
    assert sum(stage["compiled_layers"] for stage in summaries) == 4
