"""Recomputation compares the random seeds that attention kernels save only if they are used.

The kernels of GPUs save uninitialised memory as the seed where there is no dropout. Operations here
stand in for them: their seed counts up, and their backward uses it where there is dropout.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_gradients, hybrid, plain_step
from support.nets import WIDTH, TanhLinear, regression
from torch import nn

from hybridtrain.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

SEEDS = itertools.count(1)


def factor(seed, dropout_p):
    """What the seed does to a gradient; the forward does not show it."""
    return 1 + 0.01 * float(seed.to(torch.int64).sum() % 97) if dropout_p else 1.0


def operation(name, dtype, shape, tags=()):
    """Returns an attention that returns its output and its seed; its own autograd saves both."""

    def compute(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        seed = torch.full(shape, next(SEEDS), dtype=torch.int64).to(dtype)
        return torch.tanh(x), seed

    def gradient(
        grad: torch.Tensor, y: torch.Tensor, seed: torch.Tensor, dropout_p: float
    ) -> torch.Tensor:
        return (grad * (1 - y * y) * factor(seed, dropout_p)).to(y.dtype)

    def save(ctx, inputs, output):
        ctx.dropout_p = inputs[1]
        ctx.save_for_backward(*output)

    forward = torch.library.custom_op(f"stand_in::{name}", compute, mutates_args=(), tags=tags)
    forward.register_fake(lambda x, _: (torch.empty_like(x), x.new_empty(shape, dtype=dtype)))
    backward = torch.library.custom_op(f"stand_in::{name}_backward", gradient, mutates_args=())
    backward.register_fake(lambda grad, y, seed, p: torch.empty_like(y))
    forward.register_autograd(
        lambda ctx, grad, _: (backward(grad, *ctx.saved_tensors, ctx.dropout_p), None),
        setup_context=save,
    )
    return forward


TAGGED = operation("tagged", torch.int64, (), [torch.Tag.nondeterministic_seeded])
PAIR = operation("pair", torch.uint64, (2,), [torch.Tag.nondeterministic_seeded])
UNTAGGED = operation("untagged", torch.int64, (2,))


class SavedLater(torch.autograd.Function):
    """Saves what the operation returns, as flash-attn does."""

    @staticmethod
    def forward(ctx, x, dropout_p):
        y, seed = UNTAGGED(x, dropout_p)
        ctx.save_for_backward(y, seed)
        ctx.dropout_p = dropout_p
        return y, seed

    @staticmethod
    def backward(ctx, grad, _):
        y, seed = ctx.saved_tensors
        return (grad * (1 - y * y) * factor(seed, ctx.dropout_p)).to(y.dtype), None


KERNELS = {
    "tagged": TAGGED,
    "two words": PAIR,
    "untagged": UNTAGGED,
    "saved later": SavedLater.apply,
}


class Attends(nn.Module):
    def __init__(self, kernel, dropout_p):
        super().__init__()
        self.linear, self.kernel, self.dropout_p = nn.Linear(WIDTH, WIDTH), kernel, dropout_p

    def forward(self, x):
        return self.kernel(self.linear(x), self.dropout_p)[0]


def net(layer):
    torch.manual_seed(0)
    return nn.Sequential(TanhLinear(), layer(), nn.Linear(WIDTH, WIDTH))


def check(layer, training=True, steps=2, **options):
    ours, plain = net(layer).train(training), net(layer).train(training)
    model = hybrid(ours, 1, **options)
    for seed in range(steps):
        ours.zero_grad()
        plain.zero_grad()
        x, y = regression(11, seed)
        plain_step(plain, x, y)
        model.train_step(x, y, F.mse_loss)
        assert_same_gradients(ours, plain)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation mode"])
@pytest.mark.parametrize("recompute", ["always", ["1"]], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_seed_that_no_gradient_depends_on_may_differ(kernel, recompute, training):
    check(lambda: Attends(KERNELS[kernel], 0.0), training, recompute=recompute)


@pytest.mark.parametrize("recompute", ["always", ["1"]], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_seed_that_differs_is_refused_with_dropout(kernel, recompute):
    with pytest.raises(ConfigError, match="layer '1' computes different values"):
        check(lambda: Attends(KERNELS[kernel], 0.1), recompute=recompute)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("kernel", ["tagged", "untagged"])
@pytest.mark.quick_cases("tagged-0.1", "untagged-0.0")
def test_compiled_code_may_save_another_seed_only_without_dropout(monkeypatch, kernel, dropout_p):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile_(f, backend="aot_eager", **o))
    torch._dynamo.reset()

    def run():
        options = {"compile": True, "recompute": "always"}
        check(lambda: Attends(KERNELS[kernel], dropout_p), **options)

    if not dropout_p:
        run()
    else:
        with pytest.raises(ConfigError, match="layer '1' computes different values"):
            run()
    torch._dynamo.reset()


class OtherPath(TanhLinear):
    """Takes its values from other columns in each forward."""

    def __init__(self):
        super().__init__()
        self.runs = iter(range(1000))

    def forward(self, x):
        columns = torch.arange(WIDTH).roll(next(self.runs)).expand(len(x), WIDTH)
        return super().forward(x).gather(1, columns)


class WithItsOwnSeed(Attends):
    """An integer of the layer itself scales the gradient; its kernel has no dropout."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seed):
            ctx.save_for_backward(seed)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def __init__(self):
        super().__init__(TAGGED, 0.0)
        self.runs = iter(range(1, 1000))

    def forward(self, x):
        return self.Scaled.apply(super().forward(x), torch.tensor(next(self.runs)))


stand_ins = torch.library.Library("stand_in", "FRAGMENT")
stand_ins.define("attends_from(Tensor x, Tensor(a) i, float dropout_p) -> (Tensor, Tensor(a))")
stand_ins.impl(
    "attends_from", lambda x, i, p: (x.tanh(), i.view_as(i)), "CompositeExplicitAutograd"
)


class FromItsCaller(torch.autograd.Function):
    """Saves integers that the operation returns, but has not made."""

    @staticmethod
    def forward(ctx, x, i):
        y, i = torch.ops.stand_in.attends_from(x, i, 0.0)
        ctx.save_for_backward(y, i)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, i = ctx.saved_tensors
        return grad * (1 - y * y) * i, None


class WithIntegersOfItsCaller(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.runs = nn.Linear(WIDTH, WIDTH), iter(range(1, 1000))

    def forward(self, x):
        return FromItsCaller.apply(self.linear(x), torch.tensor(next(self.runs)))


@pytest.mark.parametrize("recompute", ["always", ["1"]], ids=str)
@pytest.mark.parametrize("layer", [OtherPath, WithItsOwnSeed, WithIntegersOfItsCaller])
def test_other_integers_that_differ_are_refused(layer, recompute):
    with pytest.raises(ConfigError, match="layer '1' computes different values"):
        check(layer, recompute=recompute)
