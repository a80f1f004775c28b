"""The random numbers of layers depend on seed, step, layer, micro-batch and replica alone."""

import ctypes
import itertools
import shutil
import threading

import pytest
import torch
from support.compare import hybrid
from torch import nn
from torch.nn import functional as F

from hybridtrain._base.torch_private import InterceptedDraws, find_random_operations
from hybridtrain.pipeline import DrawsOf, LayerRNG


def rng_of(layers: int) -> LayerRNG:
    rng = LayerRNG(0, 0)
    rng.follow([(layer, 0) for layer in range(layers)])
    return rng


def test_draws_of_neighbouring_steps_layers_and_micro_batches_are_unrelated():
    draws = rng_of(10)
    drawn = set()
    for step, layer, i in itertools.product(range(10), repeat=3):
        draws.step = step
        with draws.drawing_in(i) as own:
            own.at(layer, layer)
            drawn |= {torch.randint(2**60, ()).item(), torch.randint(2**60, ()).item()}
    assert len(drawn) == 2000


class Seen(InterceptedDraws):
    """Notes the operations that are handed over."""

    def __init__(self):
        find_random_operations()
        self.names = []

    def draw(self, operation, args, kwargs):
        self.names.append(str(operation))
        return operation(*args, **kwargs)


def test_random_operations_alone_are_handed_over_and_only_inside():
    x, seen = torch.ones(2, 3, requires_grad=True), Seen()
    F.dropout(x)
    with seen:
        F.dropout(torch.relu(x @ x.T)).sum().backward()
        torch.rand(2)
        torch.zeros(2).normal_()
        nn.LSTM(3, 3, num_layers=2, dropout=0.5)(x)
    torch.rand(2)
    initial = ["aten.uniform_.default"] * 8
    draws = ["bernoulli_.float", "rand.default", "normal_.default"]
    expected = [f"aten.{name}" for name in draws]
    assert seen.names == [*expected, *initial, "aten.bernoulli_.float"]


def test_an_inner_context_ends_with_the_outer_one_in_place_also_after_an_error():
    outer, inner = Seen(), Seen()

    def draw_and_fail():
        with inner:
            torch.rand(1)
            raise ArithmeticError

    with outer:
        with pytest.raises(ArithmeticError):
            draw_and_fail()
        torch.randn(1)
    torch.rand(1)
    assert (outer.names, inner.names) == (["aten.randn.default"], ["aten.rand.default"])


def test_draws_in_threads_that_torchscript_starts_are_seeded():
    @torch.jit.script
    def two(x: torch.Tensor):
        later = torch.jit.fork(F.dropout, x, 0.5, True)
        return torch.jit.wait(later)

    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        with rng_of(1).drawing_in(0) as draws:
            draws.at(0, 0)
            results.append(two(torch.ones(64)))
    assert torch.equal(*results)


def test_draws_in_threads_that_torchscript_starts_are_seeded_while_samples_are_read():
    in_use, done = threading.Event(), threading.Event()

    def read_ahead():
        with DrawsOf(torch.Generator()):
            in_use.set()
            done.wait(20)

    reader = threading.Thread(target=read_ahead)
    reader.start()
    try:
        assert in_use.wait(20)
        with rng_of(1).drawing_in(0) as draws:
            draws.at(0, 0)
            found = dropped_in_a_thread(torch.ones(64))
    finally:
        done.set()
        reader.join()
    with rng_of(1).drawing_in(0) as draws:
        draws.at(0, 0)
        assert torch.equal(found, dropped_in_a_thread(torch.ones(64)))


@torch.jit.script
def dropped_in_a_thread(x: torch.Tensor):
    later = torch.jit.fork(F.dropout, x, 0.5, True)
    return torch.jit.wait(later)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_evaluations_and_losses_may_draw_in_threads_that_torchscript_starts(nb_part):
    class Forks(nn.Module):
        def forward(self, x):
            return dropped_in_a_thread(x)

    model = hybrid(nn.Sequential(nn.Linear(4, 4), Forks(), nn.Linear(4, 4)), nb_part, chunks=2)
    model.eval()
    assert model(torch.ones(4, 4)).shape == (4, 4)
    model = hybrid(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nb_part, chunks=2)
    model.train_step(torch.ones(4, 4), None, lambda y, _: dropped_in_a_thread(y).mean())


def test_draws_of_a_loss_in_a_thread_are_not_those_of_a_layer_that_runs_meanwhile():
    class Draws(nn.Module):
        def __init__(self, waits):
            super().__init__()
            self.linear, self.waits, self.masks = nn.Linear(4, 4), waits, []

        def forward(self, x):
            if self.waits and len(self.masks) == 1:  # inside the layer while the loss draws
                inside.set()
                assert drawn.wait(20)
            self.masks.append(F.dropout(torch.ones(64), 0.5))
            return self.linear(x)

    def loss(output, _):
        if first.waits:
            assert inside.wait(20)
        try:
            return dropped_in_a_thread(output).mean()
        finally:
            drawn.set()

    masks = []
    for waits in (False, True):
        inside, drawn = threading.Event(), threading.Event()
        first = Draws(waits)
        options = {"chunks": 2, "schedule": "gpipe"}
        # its layers wait for each other, which run one at a time in the self-check
        options["self_check"] = False
        model = hybrid(nn.Sequential(first, nn.Linear(4, 4)), 2, **options)
        model.train_step(torch.ones(4, 4), None, loss)
        masks.append(torch.stack(first.masks))
    assert torch.equal(*masks)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_a_pipeline_that_a_layer_evaluates_draws_as_a_part_of_that_layer(nb_part):
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn(x.shape)

    class WithTeacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            teacher = hybrid(nn.Sequential(nn.Linear(4, 4), Noise()), 1, chunks=1)
            teacher.eval()
            self.__dict__["teacher"] = teacher  # no part of the model

        def forward(self, x):
            return self.linear(x) + self.teacher(x)

    found = []
    for seed in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), WithTeacher(), nn.Linear(4, 4))
        model = hybrid(net, nb_part, chunks=2)
        torch.manual_seed(seed)
        model.train_step(torch.ones(4, 4), None, lambda y, _: y.square().mean())
        found.append(net[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("written_in", ["Python", "C++"])
def test_random_operations_of_an_extension_are_seeded_whether_or_not_they_take_a_generator(
    written_in, tmp_path
):
    find_random_operations()  # before the extension comes
    name = f"noise_{written_in.replace('+', 'p')}"
    library = torch.library.Library("hybridtest", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    # of its own, as a kernel that draws by no operation of PyTorch
    kernel = lambda x: x + torch.default_generator.get_state().sum()  # noqa: E731
    library.impl(name, kernel, "CPU")
    if written_in == "C++":  # it comes with a shared library, and Python's notes do not have it
        torch.library._defs.discard(f"hybridtest::{name}")
        ctypes.CDLL(str(shutil.copy(torch._C.__file__, tmp_path)))
    results = []
    for seed in range(2):
        torch.manual_seed(seed)
        with rng_of(1).drawing_in(0) as draws:
            draws.at(0, 0)
            noise = getattr(torch.ops.hybridtest, name)
            results.append(noise(torch.zeros(1, dtype=torch.long)))
    assert torch.equal(*results)
