"""Code that a graph would not repeat stays in the user's module, or is refused by name."""

import random
import threading

import pytest
import torch
from support.traced import (
    CHUNKS,
    WIDTH,
    Body,
    Dropping,
    Wrapped,
    assert_same,
    hybrid,
    linear,
    loss_of,
    names,
    samples,
)
from torch import Tensor, nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph import ChainBuilder

pytestmark = pytest.mark.usefixtures("seeded")


class Inner(nn.Module):
    """A submodule that calls `inside` between its two layers."""

    def __init__(self, inside):
        super().__init__()
        self.first, self.second = linear(), linear()
        self.inside = inside

    def forward(self, x):
        return self.second(self.inside(self.first(x)))


class Outer(nn.Module):
    def __init__(self, inside):
        super().__init__()
        # the inner module is large enough to be expanded, and small enough to stay one layer
        self.before, self.inner = linear(), Inner(inside)
        self.after = nn.Sequential(*(linear() for _ in range(8)))

    def forward(self, x):
        return self.after(self.inner(self.before(x)))


class Fivefold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def without_grad(x):
    with torch.no_grad():
        y = x * 2
    return x + y


def by_chance(x):
    return x * 2 if random.random() < 0.5 else x / 2


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: x * 2 if x.sum() > 0 else x / 2,
        without_grad,
        Fivefold.apply,
        lambda x: Fivefold.apply(x),
    ],
    ids=["control flow", "no_grad", "autograd.Function", "autograd.Function by name"],
)
@pytest.mark.quick_cases(2)
def test_a_submodule_with_code_that_a_graph_would_lose_is_called_whole(inside):
    model = assert_same(Outer(inside), samples(), 2)
    assert "inner" in names(model)
    assert "inner.first" not in names(model)


def test_pythons_random_is_drawn_from_at_each_call_and_not_while_tracing():
    net = Outer(by_chance)
    state = random.getstate()
    model = hybrid(net, 2)
    assert random.getstate() == state
    model.eval()
    random.seed(0)
    seen = {tuple(model(samples()).sum(1).tolist()) for _ in range(20)}
    assert len(seen) > 1


def test_a_tensor_that_the_forward_makes_is_made_at_each_call():
    model = hybrid(Outer(lambda x: x + torch.zeros(len(x.shape)).sum() + torch.rand(1)), 2)
    assert not torch.equal(model(samples()), model(samples()))


def test_hooks_of_submodules_run_and_hooks_of_the_model_are_refused():
    net = Outer(torch.tanh)
    seen = []
    net.inner.register_forward_hook(lambda *args: seen.append("inner"))
    net.after[3].register_full_backward_hook(lambda *args: seen.append("after"))
    model = hybrid(net, 2)
    model.train_step(samples(), None, loss_of)
    assert sorted(seen) == ["after"] * CHUNKS + ["inner"] * CHUNKS
    net.register_forward_hook(lambda *args: None)
    with pytest.raises(SplitError, match="the model itself has hooks"):
        hybrid(net, 2).train_step(samples(), None, loss_of)


def test_a_submodule_switched_to_another_mode_than_the_model_is_an_error():
    net = Wrapped()
    model = hybrid(net, 2, split=["b.second"])
    model.train_step(samples(), None, loss_of)
    net.b.eval()
    with pytest.raises(ConfigError, match="module 'b' was switched to a different mode"):
        model.train_step(samples(), None, loss_of)


def test_a_submodule_whose_train_keeps_it_in_evaluation_mode_stays_there():
    class Still(Dropping):
        def train(self, mode=True):
            return super().train(False)

    net = Wrapped()
    net.b, net.c = Still(), nn.Identity()
    net.b.train()
    model = hybrid(net, 2, split=["b.second"])
    assert not net.b.training
    assert not torch.equal(model.train()(samples()), model(samples()))  # the dropout around it
    assert torch.equal(net.b(samples()), net.b(samples()))


def switched_off(net, x):
    y = net.a(x)
    with torch.set_grad_enabled(False):
        z = net.b(y)
    return net.c(y * z)


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


def counts(net, x):
    net.calls += 1
    return net.c(net.b(net.a(x))) * net.calls


def asks_for_a_type(net, x):
    y = net.a(x)
    y = y * 2 if isinstance(y, Tensor) else y * 3
    return net.c(net.b(y))


def asks_for_grad(net, x):
    y = net.a(x) * 2 if torch.is_grad_enabled() else net.a(x)
    return net.c(net.b(y))


def has_a_tensor_hook(net, x):
    y = net.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 3)
    return net.c(net.b(y))


def reads_a_table(net, x):
    return net.c(net.b(net.a(x))) * net.c.table


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (switched_off, None),
        (lambda net, x: net.c(net.b(NewStyle.apply(net.a(x)))), r"(autograd\.Function|the type)"),
        (counts, "sets its attribute 'calls'"),
        (asks_for_a_type, None),
        (asks_for_grad, None),
        (has_a_tensor_hook, "control flow"),
        (reads_a_table, None),
    ],
)
@pytest.mark.quick_cases(1)
def test_the_models_own_code_that_a_graph_would_lose_is_exported_or_refused_by_name(body, says):
    net = Body(body, calls=0)
    net.c.register_buffer("table", torch.ones(WIDTH))
    if says is None:  # one of the tracers can follow these
        assert_same(net, samples(), 2, example_inputs=samples())
        return
    with pytest.raises(SplitError, match=rf"Body cannot be traced.*{says}"):
        hybrid(net, 2, example_inputs=samples())
    assert vars(net)["calls"] == 0


def in_place_through_a_view(net, x):
    y = net.a(x)
    head = y[:, :2]
    z = net.b(y)
    head.add_(1)
    return net.c(z * y)


def moving_mean(net, x):
    y = net.a(x - net.mean)
    z = net.b(y)
    net.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return net.c(z)


@pytest.mark.parametrize(
    "net",
    [
        lambda: Body(lambda net, x: net.c(net.b(net.a(x).chunk(2, 1)[0].repeat(1, 2).relu_()))),
        lambda: Body(moving_mean, mean=torch.zeros(WIDTH)),
    ],
    ids=["a view", "a buffer"],
)
@pytest.mark.quick_cases(1)
def test_a_tensor_changed_in_place_stays_in_one_stage_with_what_it_is_a_view_of(net):
    assert_same(net(), samples(), 2)
    chain = ChainBuilder(Body(in_place_through_a_view)).chain()
    assert chain.no_cut_before == {1}
    with pytest.raises(SplitError, match=r"'a' and 'b': .* changed in place"):
        hybrid(Body(moving_mean, mean=torch.zeros(WIDTH)), 3, split=[1, 1, 1])


@pytest.mark.parametrize(
    "view",
    [
        torch.ravel, torch.adjoint, torch.atleast_2d, lambda x: x.hsplit(2)[0], lambda x: x.mT,
        lambda x: x.type(torch.float32), lambda x: nn.functional.dropout(x, 0.0),
    ],
)  # fmt: skip
@pytest.mark.quick_cases(1)
def test_what_may_be_a_view_is_known_of_every_function(view):
    def body(net, x):
        y = net.a(x)
        part = view(y)
        z = net.b(x)
        part.add_(1)
        return net.c(y + z)

    assert ChainBuilder(Body(body)).chain().no_cut_before == {1}
    assert_same(Body(body), samples(), 2)


def test_a_buffer_that_is_given_as_out_stays_in_one_stage():
    def body(net, x):
        y = net.b(net.a(x) + net.mean)
        torch.add(net.mean, 1, out=net.mean)
        return net.c(y)

    chain = ChainBuilder(Body(body, mean=torch.zeros(WIDTH))).chain()
    assert chain.no_cut_before == {1}


def adds_to_an_alias(net, x):
    y = net.a(x)
    same, rows = y, y.size(0)
    old_rows = rows
    rows += 1
    y += 1
    return net.c(net.b(x) + same) * rows / old_rows


def adds_to_a_view(net, x):
    y = net.a(x)
    half = y[:, :2]
    half *= 2
    return net.c(net.b(y))


def adds_to_a_buffer(net, x):
    y = net.b(net.a(x))
    mean = net.mean
    mean += y.detach().mean(0)
    return net.c(y)


@pytest.mark.parametrize("body", [adds_to_an_alias, adds_to_a_view, adds_to_a_buffer])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.quick_cases(2)
def test_an_augmented_assignment_changes_what_has_another_name(body, stages):
    assert_same(Body(body, mean=torch.zeros(WIDTH)), samples(), stages)


def test_an_augmented_assignment_that_nothing_else_sees_makes_a_new_tensor():
    def residual(net, x):
        y = net.b(net.a(x))
        y += x
        return net.c(y)

    assert_same(Body(residual), samples(), 3)
    layers = ChainBuilder(Body(residual)).chain().layers
    assert not any(layer.module.inplace for layer in layers)


def test_a_number_that_was_read_while_tracing_may_not_change_later():
    net = Body(lambda net, x: net.c(net.b(net.a(x))) * net.scale, scale=1.0)
    model = hybrid(net, 2)
    model(samples())
    net.scale = 0.5
    with pytest.raises(ConfigError, match=r"the model\.scale has changed from 1\.0 to 0\.5 since"):
        model(samples())


@pytest.mark.parametrize("value", [None, torch.ones(WIDTH), "deleted"])
def test_a_number_that_is_deleted_or_replaced_by_something_else_is_named_too(value):
    net = Body(lambda net, x: net.c(net.b(net.a(x))) * net.scale, scale=1.0)
    model = hybrid(net, 2)
    del net.scale
    if not isinstance(value, str):
        net.scale = value
    with pytest.raises(ConfigError, match=r"the model\.scale has changed from 1\.0 to .* since"):
        model(samples())


def test_other_threads_compute_as_usual_while_a_model_is_traced():
    made, inside, done = [], threading.Event(), threading.Event()

    def elsewhere():
        inside.wait()
        made.append(nn.Sequential(linear(), nn.ReLU())(torch.zeros(1, WIDTH) + torch.arange(WIDTH)))
        done.set()

    def body(net, x):
        inside.set()
        done.wait()
        return net.c(net.b(net.a(x)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    hybrid(Body(body), 2)
    thread.join()
    assert type(made[0]) is Tensor


def test_a_scripted_submodule_is_called_whole():
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    net.b = torch.jit.trace(linear(), samples())
    model = hybrid(net, 2)
    model.train_step(samples(), None, loss_of)
    assert len(names(model)) == 3


def test_a_hook_registered_after_tracing_is_an_error():
    net = Wrapped()
    model = hybrid(net, 2, split=["b.second"])
    net.b.register_forward_hook(lambda *args: None)
    with pytest.raises(ConfigError, match="b had a hook registered after tracing"):
        model(samples())


def test_torchs_functions_are_restored_after_tracing_even_if_it_fails():
    before = torch.zeros, torch.is_grad_enabled, nn.Module.__setattr__
    with pytest.raises(SplitError, match="sets its attribute"):
        hybrid(Body(counts, calls=0), 2, example_inputs=samples())
    assert (torch.zeros, torch.is_grad_enabled, nn.Module.__setattr__) == before
