"""What changes from call to call is never frozen into a graph: it runs as it is, or is refused."""

import random
import time
from time import perf_counter

import numpy as np
import pytest
import torch
from support.traced import WIDTH, hybrid, linear, names, samples
from torch import nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph import ChainBuilder

calls = 0
gain = 2.0
own_generator = np.random.default_rng(0)
np_rand = np.random.rand


pytestmark = pytest.mark.usefixtures("seeded")


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


class Ticker:
    def __init__(self):
        self.ticks = 0

    def tick(self):
        self.ticks += 1


class Ticking(Three):
    def __init__(self):
        super().__init__()
        self.ticker = Ticker()

    def forward(self, x):
        x = self.a(x)
        if x.sum() < 1e9:
            self.ticker.tick()
        return self.c(self.b(x)) * self.ticker.ticks


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Scaled, "x = x * float(np.random.rand())"),
        (LayerDrop, "if np_rand() < 0.5:"),
        (PythonDrop, "if random.random() < 0.5:"),
        (Clock, "now = perf_counter()"),
        (Counter, "calls += 1"),
        (Ticking, "if x.sum() < 1e9:"),
        (HiddenCounter, "calls += 1"),
    ],
)
@pytest.mark.quick_cases(2)
def test_draws_clocks_and_counters_in_the_models_own_forward_are_refused_with_their_line(
    kind, line, traced
):
    state = random.getstate(), np.random.get_state()[2]
    with pytest.raises(SplitError) as caught:
        hybrid(kind(), 2, example_inputs=samples())
    assert "test_frozen.py:" in str(caught.value)
    assert f"`{line}`" in str(caught.value)
    assert "contextlib" not in str(caught.value)
    assert (random.getstate(), np.random.get_state()[2]) == state


@pytest.mark.parametrize("kind", [OwnGenerator, ItsOwnGenerator])
def test_draws_from_a_generator_that_the_model_keeps_are_refused(kind, traced):
    with pytest.raises(SplitError, match=r"draws a random number .*a generator of the model"):
        hybrid(kind(), 2, example_inputs=samples())


@pytest.mark.parametrize("kind", [Scaled, LayerDrop, Clock, HiddenCounter, OwnGenerator])
def test_a_submodule_that_would_be_frozen_is_called_whole(kind):
    net = nn.Sequential(linear(), kind(), *(linear() for _ in range(3)))
    model = hybrid(net, 2, split=["2"]).eval()
    assert "1" in names(model)
    x = torch.ones(3, WIDTH)
    assert len({tuple(model(x).flatten().tolist()) for _ in range(12)}) > 2 - (kind is LayerDrop)
    assert "1.a" not in [layer.name for layer in ChainBuilder(net).chain({"1"}).layers]


def test_a_global_number_that_was_read_while_tracing_may_not_change_later(monkeypatch, traced):
    model = hybrid(Gained(), 2)
    model(samples())
    monkeypatch.setattr(f"{__name__}.gain", 3.0)
    with pytest.raises(ConfigError, match=r"test_frozen\.gain has changed from 2\.0 to 3\.0"):
        model(samples())
