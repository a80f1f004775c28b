"""What changes from call to call is never frozen into a graph: it runs as it is, or is refused."""

import random
import time
from time import perf_counter

import numpy as np
import pytest
import torch
from support.traced import WIDTH, hybrid, linear, loss_of, names, samples
from torch import nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph.chain import ChainBuilder

calls = 0
gain = 2.0
own_generator = np.random.default_rng(0)
np_rand = np.random.rand


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)
    np.random.seed(0)


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.generator = random.Random(0)


class Scaled(Three):
    def forward(self, x):
        x = self.a(x)
        x = x * float(np.random.rand())
        return self.c(self.b(x))


class LayerDrop(Three):
    def forward(self, x):
        x = self.a(x)
        if np_rand() < 0.5:
            x = self.b(x)
        return self.c(x)


class PythonDrop(Three):
    def forward(self, x):
        x = self.a(x)
        if random.random() < 0.5:
            x = self.b(x)
        return self.c(x)


class Clock(Three):
    def forward(self, x):
        now = perf_counter()
        x = self.b(self.a(x)) * now
        return self.c(x) * (time.time() % 1)


class Counter(Three):
    def forward(self, x):
        global calls
        calls += 1
        x = self.a(x) * calls
        return self.c(self.b(x))


def bump():
    global calls
    calls += 1


class HiddenCounter(Three):
    def forward(self, x):
        bump()
        x = self.a(x) * calls
        return self.c(self.b(x))


class OwnGenerator(Three):
    def forward(self, x):
        x = self.a(x)
        x = x * own_generator.random()
        return self.c(self.b(x))


class ItsOwnGenerator(Three):
    def forward(self, x):
        x = self.a(x)
        if self.generator.random() < 0.5:
            x = self.b(x)
        return self.c(x)


class Gained(Three):
    def forward(self, x):
        return self.c(self.b(self.a(x))) * factor()


def factor():
    return gain


def outputs_of(kind, calls=12):
    model = hybrid(kind(), 2, example_inputs=samples()).eval()
    x = torch.ones(3, WIDTH)
    return model, {tuple(model(x).flatten().tolist()) for _ in range(calls)}


@pytest.mark.parametrize("kind", [Scaled, LayerDrop, PythonDrop, Clock, Counter])
def test_draws_clocks_and_counters_are_asked_at_each_call(kind):
    state = random.getstate(), np.random.get_state()[2]
    model, seen = outputs_of(kind, 0)
    assert (random.getstate(), np.random.get_state()[2]) == state
    model, seen = outputs_of(kind)
    assert len(seen) > 3
    assert any("line" in name for name in names(model))


@pytest.mark.parametrize("kind", [Scaled, LayerDrop])
def test_draws_of_numpy_train_as_in_the_unsplit_model(kind):
    def plain(model, net, inputs):
        np.random.seed(1)
        return [net(part) for part in inputs.split([3, 2, 2])]

    net = kind()
    model = hybrid(net, 2, example_inputs=samples())
    np.random.seed(1)
    outputs = []
    model.train_step(samples(), None, lambda output, _: outputs.append(output) or loss_of(output))
    for ours, theirs in zip(outputs, plain(model, net, samples()), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (HiddenCounter, "x = self.a(x) * calls"),
        (OwnGenerator, "x = x * own_generator.random()"),
        (ItsOwnGenerator, "if self.generator.random() < 0.5:"),
    ],
)
def test_what_cannot_be_seen_in_the_code_is_refused_with_the_users_line(kind, line):
    with pytest.raises(SplitError) as caught:
        hybrid(kind(), 2, example_inputs=samples())
    assert "test_frozen.py:" in str(caught.value)
    assert f"`{line}`" in str(caught.value)
    assert "contextlib" not in str(caught.value)


@pytest.mark.parametrize("kind", [Scaled, LayerDrop, Clock, HiddenCounter, OwnGenerator])
def test_a_submodule_that_would_be_frozen_is_called_whole(kind):
    net = nn.Sequential(linear(), kind(), *(linear() for _ in range(3)))
    model = hybrid(net, 2, split=["2"]).eval()
    assert "1" in names(model)
    x = torch.ones(3, WIDTH)
    assert len({tuple(model(x).flatten().tolist()) for _ in range(12)}) > 2 - (kind is LayerDrop)
    assert "1.a" not in [layer.name for layer in ChainBuilder(net).chain({"1"}).layers]


def test_a_global_number_that_was_read_while_tracing_may_not_change_later(monkeypatch):
    model = hybrid(Gained(), 2)
    model(samples())
    monkeypatch.setattr(f"{__name__}.gain", 3.0)
    with pytest.raises(ConfigError, match=r"test_frozen\.gain has changed from 2\.0 to 3\.0"):
        model(samples())


class Ticker:
    def __init__(self):
        self.ticks = 0

    def tick(self):
        self.ticks += 1


class Ticking(Three):
    """A counter that the statements of the forward do not show."""

    def __init__(self):
        super().__init__()
        self.ticker = Ticker()

    def forward(self, x):
        x = self.a(x)
        if x.sum() < 1e9:
            self.ticker.tick()
        return self.c(self.b(x)) * self.ticker.ticks


class Bumping(Three):
    def forward(self, x):
        x = self.a(x)
        if isinstance(x, torch.Tensor):  # torch.fx cannot follow this
            bump()
        return self.c(self.b(x)) * calls


@pytest.mark.parametrize("kind", [Ticking, Bumping])
def test_a_counter_that_kept_statements_move_is_not_frozen_elsewhere(kind):
    global calls
    seen = set()
    try:
        _, seen = outputs_of(kind)
    except SplitError:
        return
    assert len(seen) == 12
