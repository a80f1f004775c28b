"""Measured costs: bytes exactly, times by the clock, and no trace of the measuring."""

from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hybridtrain._base.skip import pop, stash
from hybridtrain.graph import layers_of
from hybridtrain.partitioning import observed_chain
from hybridtrain.partitioning.estimates import estimate_costs
from hybridtrain.partitioning.measurements import MAX_REPEATS, LayerProfiler

CPU = torch.device("cpu")


class Shared:
    """What a layer and its copies have together."""

    def __deepcopy__(self, memo):
        return self


class Notes(Shared, list):
    pass


class Clock(Shared):
    """Moves on only while a layer of these tests says that it works."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hybridtrain.partitioning.measurements.perf_counter", clock)
    return clock


def image_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )


def images():
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def measured(net, inputs, seconds=None, devices=(CPU,), **options):
    """The costs of a first pass, or of repeats for `seconds`."""
    profiler = LayerProfiler(layers_of(net), inputs, devices, **options)
    if seconds is not None:
        profiler.repeat(seconds)
    return profiler.costs()


class Seen(nn.Module):
    """Notes what it is given, and whether it works outside of its forward."""

    def __init__(self):
        super().__init__()
        self.inputs = Notes()

    def forward(self, x):
        self.inputs.append(x.detach().clone())
        return x * 1


class Down(nn.Module):
    stashes = ("features", "size")

    def forward(self, x):
        stash("features", x * 2)
        stash("size", {"rows": torch.tensor(len(x)), "name": "size"})
        return x[:, :2] * 1


class Peek(nn.Module):
    pops = ("size",)

    def forward(self, x):
        assert pop("size")["rows"] == len(x)
        return x * 1


class Up(nn.Module):
    pops = ("features",)

    def __init__(self):
        super().__init__()
        self.popped = Notes()

    def forward(self, x):
        features = pop("features")
        self.popped.append(features)
        stash("features", None)  # the last one to need it may drop it
        return torch.cat([x, features], dim=1)


def skip_net():
    return nn.Sequential(nn.Linear(3, 4), Down(), nn.Tanh(), Peek(), Up(), nn.Linear(6, 1))


# ---------------------------------------------------------------- what is measured


def test_bytes_are_those_of_the_tensors_that_are_kept_and_handed_on():
    net = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Flatten(), nn.Linear(5, 2))
    costs = measured(net, torch.randn(7, 3))
    # a linear layer keeps its input, a sigmoid its output, a view nothing; what both the sigmoid
    # and the last layer keep counts once, where it is made
    assert [cost.activation_bytes for cost in costs] == [7 * 3 * 4, 7 * 5 * 4, 0, 0]
    assert [cost.crossing_bytes for cost in costs] == [7 * 5 * 4] * 3 + [7 * 2 * 4]
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert [cost.parameters for cost in costs] == [20, 0, 0, 12]


def test_a_micro_batch_counts_and_not_the_batch_that_it_is_a_view_of():
    net = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid())
    costs = measured(net, torch.randn(70, 3)[:7])
    assert costs[0].activation_bytes == 7 * 3 * 4


def test_buffers_that_autograd_saves_are_not_activations():
    costs = measured(nn.Sequential(nn.BatchNorm1d(3)), torch.randn(7, 3))
    mean_and_deviation = 2 * 3 * 4
    assert costs[0].activation_bytes == 7 * 3 * 4 + mean_and_deviation


def test_a_value_crosses_every_cut_from_where_it_is_stashed_to_where_it_is_last_needed():
    costs = measured(skip_net(), torch.randn(5, 3))
    features, size, narrow = 5 * 4 * 4, 8, 5 * 2 * 4
    assert [cost.crossing_bytes for cost in costs] == [
        5 * 4 * 4,
        narrow + features + size,
        narrow + features + size,
        narrow + features,
        5 * 6 * 4,
        5 * 4,
    ]


def test_what_several_later_layers_read_crosses_every_cut_before_the_last_of_them():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x, mask):
            a = self.a(x)
            wide = self.b(a)[:, :6] * mask  # between two layers
            return self.c(torch.cat([wide, a[:, :2]], dim=1))

    net, inputs = Joined(), (torch.randn(3, 4), torch.ones(3, 6))
    layers = observed_chain(net, inputs).layers
    costs = LayerProfiler(layers, inputs, [CPU]).costs()
    counted = estimate_costs(layers, inputs)
    a, mask, joined, out = 3 * 4 * 4, 3 * 6 * 4, 3 * 8 * 4, 3 * 2 * 4
    assert [cost.crossing_bytes for cost in costs] == [a + mask, joined, out]
    assert [cost.crossing_bytes for cost in counted] == [a + mask, joined, out]
    assert all(cost.backward_ms > 0 for cost in costs)


class Takes(torch.autograd.Function):
    """An operation that takes so many milliseconds there and twice as many back."""

    @staticmethod
    def forward(ctx, x, clock, ms):
        ctx.clock, ctx.ms = clock, ms
        clock.now += ms / 1000
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += 2 * ctx.ms / 1000
        return gradient, None, None


class Timed(nn.Module):
    def __init__(self, clock, *ms):
        super().__init__()
        self.clock, self.ms = clock, Notes(ms)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        ms = self.ms.pop(0) if len(self.ms) > 1 else self.ms[0]
        return Takes.apply(x * self.weight, self.clock, ms)


def test_forward_and_backward_of_each_layer_are_timed_apart(clock):
    net = nn.Sequential(Timed(clock, 1), Timed(clock, 20), Timed(clock, 3))
    costs = measured(net, torch.randn(2, 3), seconds=0.0)
    assert [cost.forward_ms for cost in costs] == pytest.approx([1, 20, 3])
    assert [cost.backward_ms for cost in costs] == pytest.approx([2, 40, 6])


def test_a_layers_time_is_the_median_without_the_warm_up(clock):
    net = nn.Sequential(Timed(clock, 500, 4, 6))
    assert measured(net, torch.randn(2, 3), seconds=0.0)[0].forward_ms == pytest.approx(5)


class Modes(nn.Module):
    """Notes the mode that its copies run in."""

    seen: ClassVar[list[bool]] = []

    def forward(self, x):
        self.seen.append(self.training)
        return F.dropout(x, 0.5, self.training)


class Traced(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("make", [nn.Sequential, Traced])
@pytest.mark.quick_cases(1)
def test_a_model_that_arrives_in_evaluation_mode_is_measured_in_training(make):
    def activations(trains):
        net = make(nn.Linear(3, 4), Modes(), nn.Linear(4, 4), Modes(), nn.Linear(4, 2))
        net.train(trains)
        layers = observed_chain(net, torch.randn(2, 3)).layers
        Modes.seen.clear()
        profiler = LayerProfiler(layers, torch.randn(2, 3), [CPU])
        profiler.repeat(0.0)
        costs = profiler.costs()
        assert all(Modes.seen)
        estimates = estimate_costs(layers, torch.randn(2, 3))
        assert all(cost.backward_ms > 0 for cost in estimates)
        assert not any(module.training is not trains for module in net.modules())
        assert all(cost.backward_ms > 0 for cost in costs)
        return [[each.activation_bytes for each in found] for found in (costs, estimates)]

    assert activations(False) == activations(True)


def test_frozen_layers_have_a_backward_only_behind_a_trained_one():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for index in (0, 1, 3):
        net[index].requires_grad_(False)
    net[3].eval()
    backward = [cost.backward_ms for cost in measured(net, torch.randn(2, 3))]
    assert backward[0] == backward[1] == 0
    assert backward[2] > 0
    assert backward[3] > 0


def test_a_layer_may_work_in_place():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    costs = measured(net, torch.randn(2, 3), seconds=10.0)
    assert all(cost.backward_ms > 0 for cost in costs)


def test_tuples_and_integers_pass_from_layer_to_layer():
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, given):
            return self.table(given["tokens"]), given["mask"]

    class Mask(nn.Module):
        def forward(self, given):
            value, mask = given
            return value * mask[..., None]

    tokens, mask = torch.tensor([[1, 2, 3]]), torch.ones(1, 3)
    costs = measured(nn.Sequential(Embed(), Mask()), {"tokens": tokens, "mask": mask})
    assert [cost.crossing_bytes for cost in costs] == [3 * 4 * 4 + 3 * 4, 3 * 4 * 4]
    assert all(cost.backward_ms > 0 for cost in costs)


def test_a_crossing_takes_time_only_between_devices():
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    assert all(cost.crossing_ms == 0 for cost in measured(net, torch.randn(2, 3)))
    stay = measured(net, torch.randn(2, 3), devices=[CPU, CPU])
    assert all(cost.crossing_ms == 0 for cost in stay)
    leave = measured(net, torch.randn(2, 3), devices=[CPU, torch.device("meta")])
    assert all(cost.crossing_ms > 0 for cost in leave)
    assert leave[0].crossing_ms == leave[1].crossing_ms  # of as many bytes


@pytest.mark.parametrize(("seconds", "runs"), [(None, 2), (0.0, 3), (1000.0, 2 + MAX_REPEATS)])
def test_every_layer_is_warmed_up_and_timed_and_repeated_no_longer_than_asked(seconds, runs):
    net = nn.Sequential(Seen(), Seen())
    costs = measured(net, torch.randn(1), seconds=seconds)
    assert [len(layer.inputs) for layer in net] == [runs, runs]
    assert all(cost.forward_ms > 0 for cost in costs)


def test_rounds_go_over_all_layers_so_that_a_disturbance_hits_each_a_little():
    order = []

    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            order.append(self.name)
            return x

    measured(nn.Sequential(Named("a"), Named("b")), torch.randn(1), seconds=1000.0)
    assert "".join(order) == "ab" * (2 + MAX_REPEATS)


# ---------------------------------------------------------------- no trace


class Counter(nn.Module):
    """Keeps a state of its own, by assignment and in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x):
        self.calls += 1
        self.last = x.detach()
        return x * 1


@pytest.mark.parametrize("with_gradients", [True, False])
def test_measuring_changes_neither_inputs_weights_buffers_gradients_nor_generators(with_gradients):
    net = image_net()
    net.append(Counter())
    net[4].eval()
    net[6].bias.requires_grad_(False)
    if with_gradients:
        for index, parameter in enumerate(net.parameters()):
            parameter.grad = torch.full_like(parameter, float(index))
    inputs = images()
    pointers = {name: tensor.data_ptr() for name, tensor in net.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flags = [module.training for module in net.modules()]
    generator = torch.get_rng_state()

    measured(net, inputs, seconds=10.0)

    assert torch.equal(inputs, images())
    assert not inputs.requires_grad
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in net.modules()] == flags
    assert {name: t.data_ptr() for name, t in net.state_dict().items()} == pointers
    assert all(torch.equal(t, state[name]) for name, t in net.state_dict().items())
    assert net[-1].last is None
    for index, parameter in enumerate(net.parameters()):
        if with_gradients:
            assert torch.equal(parameter.grad, torch.full_like(parameter, float(index)))
        else:
            assert parameter.grad is None
    assert torch.is_grad_enabled()


def test_a_layer_that_draws_draws_afterwards_what_it_would_have_drawn():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(8, 4)
    torch.manual_seed(3)
    expected = net(x)
    torch.manual_seed(3)
    measured(net, x)
    assert torch.equal(net(x), expected)


def test_a_failure_changes_nothing_either():
    class NormThenFail(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            raise ValueError(self.norm(x).shape)

    net = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), NormThenFail())
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(ValueError, match="Size"), torch.no_grad():
        measured(net, images())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------- contexts and errors


def test_autocast_holds_in_the_forward_alone():
    inside, seen = [], []

    @contextmanager
    def precision():
        inside.append(1)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            yield
        inside.pop()

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", x.dtype, len(inside)))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(("backward", gradient.dtype, len(inside)))
            return gradient

    class Watched(nn.Module):
        def forward(self, x):
            return Watch.apply(x)

    costs = measured(
        nn.Sequential(nn.Linear(4, 4), Watched()), torch.randn(2, 4), precision=precision
    )
    assert seen == [("forward", torch.bfloat16, 1), ("backward", torch.bfloat16, 0)] * 2
    assert costs[0].crossing_bytes == 2 * 4 * 2


class Fails(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.when = when

    def forward(self, x):
        if self.when == "forward":
            raise ValueError("no")
        x = x * 1
        x.register_hook(self.hook)
        return x

    def hook(self, gradient):
        raise ValueError("no")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_layer_that_raises_is_named(when):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), Fails(when)))
    with pytest.raises(ValueError, match="no") as caught:
        measured(net, torch.randn(1, 2))
    assert caught.value.__notes__ == ["in layer '1.1', while measuring its cost"]


def test_popping_a_value_that_nobody_stashed_names_the_layer():
    with pytest.raises(KeyError, match="no earlier layer has stashed it") as caught:
        measured(nn.Sequential(nn.Linear(2, 2), Up()), torch.randn(1, 2))
    assert caught.value.__notes__ == ["in layer '1', while measuring its cost"]
