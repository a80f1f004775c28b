"""Making a pipeline leaves no trace in the model, though layers may run to be measured."""

import random
import threading

import numpy as np
import pytest
import torch
from support.compare import assert_same_gradients, hybrid, plain_step
from support.nets import CASES
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from hybridtrain.errors import ConfigError
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import StageOwners, plan, planner

WIDTH = 6
MEASURED = [
    {"split": "time"},
    {"split": "memory"},
    {"split": "balanced"},
    {"split": "time", "costs": "estimated"},
]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(planner, "CAREFUL_SECONDS", 0.0)
    torch.manual_seed(0)


def state_of(net):
    """All that a forward may change: of every module, and the default generators."""
    parts = [{**vars(part), "_modules": list(part._modules)} for part in net.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return tree_map(kept, (parts, generators))


def kept(leaf):
    if isinstance(leaf, torch.Generator):
        return leaf.get_state()
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def assert_unchanged(net, before):
    (ours, form), (theirs, form_before) = tree_flatten(state_of(net)), tree_flatten(before)
    assert form == form_before
    for now, then in zip(ours, theirs, strict=True):
        assert now is then or np.array_equal(now, then)


def void(_):
    """What a hook must return that changes no gradient."""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def linear(self, x):
        """No submodule, so that a split does not cut inside."""
        return nn.functional.linear(x, self.weight)


class Counts(Layer):
    def __init__(self):
        super().__init__()
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.linear(x) * (1 + 0.1 * self.runs)


class Collects(Layer):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        x = self.linear(x) + sum(self.past)
        self.past.append(x.detach().mean())
        return x


class Averages(Layer):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(())  # neither a parameter nor a buffer

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return self.linear(x) * (1 + self.mean)


class ActNorm(Layer):
    """As in Glow: the first batch decides on the initial scale."""

    def __init__(self):
        super().__init__()
        self.scale, self.is_new = nn.Parameter(torch.ones(WIDTH)), True

    def forward(self, x):
        if self.is_new:
            self.scale.data = 1 / (x.detach().std(0) + 1)
            self.is_new = False
        return self.linear(x) * self.scale


class MaxNorm(Layer):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, max_norm=0.1)

    def forward(self, x):
        return self.linear(x) + self.table(torch.arange(len(x)))


class Hooked(Layer):
    """Hooks that change what lies outside of the layer."""

    def __init__(self):
        super().__init__()
        self.seen = [0]
        outside = self.seen
        self.register_forward_hook(lambda *_: outside.append(1))
        self.sums = sums = torch.zeros(WIDTH)
        self.register_full_backward_hook(lambda *given: void(sums.add_(given[2][0].sum(0))))

    def forward(self, x):
        return self.linear(x) * (1 + 0.1 * len(self.seen))


class Draws(Layer):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        noise = torch.rand((), generator=self.generator) + random.random() + np.random.rand()
        return self.linear(x) + noise


class Reentrant(Layer):
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=True) if x.requires_grad else self.linear(x)


class WeightNorm(Layer):
    def __init__(self):
        super().__init__()
        self.normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.normed(self.linear(x))


KINDS = [Counts, Collects, Averages, ActNorm, MaxNorm, Hooked, Reentrant, WeightNorm]


# Other cases have the same nets.
NETS = [name for name in CASES if name not in ("padded", "weighted", "transformer")]


def planned(net, inputs, chunks=2, costs="measured", **options):
    options = PipelineOptions(chunks=chunks, **options)
    return plan(net, options, inputs, StageOwners.of_cpus(2), costs=costs)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.quick_cases("pytree", "scaling_inplace")
def test_planning_changes_nothing_in_the_nets_that_must_be_exact(name):
    case = CASES[name]
    net, inputs = case.net(), case.batch(6, 0)[0]
    before = state_of(net)
    for options in MEASURED:
        planned(net, inputs, **options)
        assert_unchanged(net, before)


@pytest.mark.parametrize("kind", [*KINDS, Draws])
@pytest.mark.quick_cases(1)
def test_planning_changes_nothing_in_layers_that_change_themselves(kind):
    net, x = nn.Sequential(*(kind() for _ in range(5))), torch.randn(6, WIDTH)
    before = state_of(net)
    for options in MEASURED:
        planned(net, x, **options)
        assert_unchanged(net, before)


@pytest.mark.parametrize("options", MEASURED[:3:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(2)
def test_after_measuring_a_step_is_that_of_the_plain_model(kind, options):
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind() for _ in range(4)))
    torch.manual_seed(0)
    net = nn.Sequential(*(kind() for _ in range(4)))
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    model = hybrid(net, 2, chunks=3, example_inputs=x, **options)
    for _ in range(2):
        plain_step(plain, x, y, chunks=3)
        model.train_step(x, y, nn.functional.mse_loss)
        assert_same_gradients(net, plain)


class Held(Layer):
    """Holds a lock, of which there is no copy."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        return self.linear(x)


def test_a_layer_that_cannot_be_copied_is_refused_in_one_line():
    net, x = nn.Sequential(*(Held() for _ in range(4))), torch.randn(6, WIDTH)
    with pytest.raises(ConfigError, match=r"layer '0' .*lock.*split=uniform"):
        hybrid(net, 2, example_inputs=x, split="time")
    hybrid(net, 2, example_inputs=x)
