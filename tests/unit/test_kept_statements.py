"""Statements that cannot be traced run as they are, in a layer of their own; the rest is cut."""

import copy
import inspect

import pytest
import torch
from support.traced import WIDTH, assert_same, hybrid, linear, loss_of, names, samples
from torch import nn

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph.chain import ChainBuilder


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear() for _ in range(4))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.counter, self.last = 0, None


class Branches(Base):
    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x) * self.scale
        elif x.sum() < -100:
            x = x * 3
        return self.d(self.c(x))


class ReturnsEarly(Base):
    def forward(self, x):
        x = self.a(x)
        y = self.b(x)
        if y.mean() > 0:
            return self.c(y)
        z = self.c(y) + x
        return self.d(z)


class Repeats(Base):
    def forward(self, x):
        x = self.a(x)
        n = 0
        while x.norm() > 0.1 and n < 5:
            x = self.b(x) * 0.5
            n += 1
        return self.d(self.c(x) * n)


class Collects(Base):
    def forward(self, x):
        outs = []
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            outs.append(x)
            if x.sum() > 0:
                outs.append(x * 2)
        return self.d(torch.stack(outs).mean(0))


class LeavesTheLoop(Base):
    def forward(self, x):
        x = self.a(x)
        for layer in (self.b, self.c):
            x = layer(x)
            if x.sum() > 0:
                break
        return self.d(x)


class SumsInALoop(Base):
    def forward(self, x):
        total, number = x * 0, 0
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            if x.norm() > 0:  # nothing else reads `total` and `number`
                number = number + 1
                total = total + x
                x = x + total * number
        return self.d(x)


class LeavesTheOuterLoop(Base):
    def forward(self, x):
        x = self.a(x)
        for _ in range(2):
            for layer in (self.b, self.c):
                x = layer(x)
            else:
                if x.norm() > 0:
                    break
            x = x * 2
        return self.d(x.tanh())


class Counts(Base):
    def forward(self, x):
        self.counter += 1
        x = self.a(x)
        x = self.b(x) * self.counter
        self.last = x.detach()
        return self.d(self.c(x))


class Remembers(Base):
    def forward(self, x):
        x = self.a(x)
        self.note(x)
        x = self.b(x)
        if self.last is not None:
            x = x + self.last.mean()
        return self.d(self.c(x))

    def note(self, x):
        self.last = x.detach()


class Asserts(Base):
    def forward(self, x):
        x = self.a(x)
        assert torch.isfinite(x).all()
        return self.d(self.c(self.b(x)))


class Raises(Base):
    def forward(self, x):
        x = self.a(x)
        if not torch.isfinite(x).all():
            raise ValueError("no")
        return self.d(self.c(self.b(x)))


class ChangesAView(Base):
    def forward(self, x):
        x = self.a(x)
        x = x.tanh().exp() * 1
        y = x[:, :2]
        z = self.b(x.detach())
        if z.sum() > -100:
            y += 1
        return self.d(self.c(x))


class LossInside(Base):
    def forward(self, x):
        x = self.d(self.c(self.b(self.a(x))))
        loss = nn.MSELoss()
        return loss(x, x * 0)


class AsksForAType(Base):
    def forward(self, x):
        x = self.a(x)
        if isinstance(x, torch.Tensor) and x.sum() > 0:
            x = self.b(x)
        return self.d(self.c(x))


class Inherits(Base):
    def forward(self, x):
        x = self.twice(x)
        if x.sum() > 0:
            x = (super().extra_repr() and x) or self.b(x)
        return self.d(self.c(x))

    def twice(self, x):
        return self.a(x) * 2


class UsesItsMethods(Base):
    def forward(self, x):
        x = self.a(x)
        x = self.middle(x)
        return self.d(x)

    def middle(self, x):
        return self.c(self.b(x)) if x.sum() > 0 else self.c(x)


class Body(nn.Module):
    """Most of a model, as `model.transformer` is in transformers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            x = self.second(x)
        return self.third(x)


class WithBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), linear()

    def forward(self, x):
        return self.head(self.body(x))


KINDS = [
    Branches, ReturnsEarly, Repeats, Collects, LeavesTheLoop, SumsInALoop, LeavesTheOuterLoop,
    Asserts, Raises, ChangesAView, LossInside, AsksForAType, Inherits, UsesItsMethods, WithBody,
]  # fmt: skip


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_control_flow_on_data_trains_in_stages_as_it_does_whole(kind, checkpoint):
    model = assert_same(kind(), samples(), 3, example_inputs=samples(), checkpoint=checkpoint)
    assert len(names(model)) >= 3


def test_no_more_than_the_statement_stays_whole():
    assert names(hybrid(WithBody(), 2, example_inputs=samples())) == [
        "body.first", f"body.line{line_of(Body, 'if x.sum()')}", "body.third", "head",
    ]  # fmt: skip
    found = names(hybrid(ReturnsEarly(), 2, example_inputs=samples()))
    assert found == ["a", "b", f"line{line_of(ReturnsEarly, 'if y.mean()')}"]


def line_of(kind, text):
    lines, first = inspect.getsourcelines(kind)
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Counts, Remembers])
def test_counters_and_caches_that_a_forward_sets_advance_with_each_micro_batch(kind, checkpoint):
    net = kind()
    whole = copy.deepcopy(net)
    # A recomputed stage that works in place is given a copy of its samples. Here each micro-batch
    # begins at a multiple of 64 bytes as its copy does: some CPUs add up otherwise if it does not.
    x = samples(count=24)
    assert_same(net, x, 2, example_inputs=x, checkpoint=checkpoint)
    net, model = whole, hybrid(whole, 2, example_inputs=samples(), checkpoint=checkpoint)
    model.train_step(samples(), None, loss_of)
    model.train_step(samples(), None, loss_of)
    assert net.counter == (6 if kind is Counts else 0)
    assert net.last.shape == (2, WIDTH)


def test_all_that_uses_a_counter_stays_in_one_stage():
    chain = ChainBuilder(Counts(), samples()).chain()
    where = [number for number, layer in enumerate(chain.layers) if "line" in layer.name]
    assert set(range(where[0] + 1, where[-1] + 1)) <= chain.no_cut_before


class Private(Base):
    def forward(self, x):
        x = self.a(x)
        self.__hidden = 3
        return self.d(self.b(x) if x.sum() > 0 else x)


class InTry(Base):
    def forward(self, x):
        x = self.a(x)
        try:
            if x.sum() > 0:
                return x
        finally:
            x = self.b(x)
        return self.c(x)


class GivesItselfAway(Base):
    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = x * next(iter(self.parameters())).mean()
        return self.d(x)


@pytest.mark.parametrize("kind", [Private, GivesItselfAway])
def test_what_cannot_be_taken_out_of_a_forward_is_refused_with_its_line(kind):
    with pytest.raises(
        SplitError, match=rf"{kind.__name__} cannot be traced.*kept_statements\.py:"
    ):
        hybrid(kind(), 2, example_inputs=samples())
    assert_same(kind(), samples(), 1, example_inputs=samples())


def test_a_return_inside_try_takes_the_rest_along():
    assert_same(InTry(), samples(), 2, example_inputs=samples())


def test_too_few_layers_say_what_stays_whole_and_why():
    with pytest.raises(SplitError, match=r"cut into 4 stages.*line\d+ could not be.*control flow"):
        hybrid(ReturnsEarly(), 4, example_inputs=samples())


# Questions for the grad mode


class AsksForGrad(Base):
    def forward(self, x):
        x = self.a(x)
        if torch.is_grad_enabled() and self.training:
            x = self.b(x)
        elif torch.is_grad_enabled():
            x = self.c(x)
        return self.d(x)


class AsksInVain(Base):
    """As the models of diffusers, of which gradient checkpointing is off."""

    gradient_checkpointing = False

    def forward(self, x):
        if not torch.is_tensor(x):
            x = torch.tensor([x])
        x = self.a(x)
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            x = self.b(x)
        return self.d(self.c(x))


class AsksExported(AsksForGrad):
    def forward(self, x):
        if isinstance(x, torch.Tensor):  # torch.fx cannot follow this
            x = x * 2
        return super().forward(x)


@pytest.mark.parametrize("kind", [AsksForGrad, AsksInVain, AsksExported])
def test_the_grad_mode_is_that_of_a_step_in_training_and_of_no_grad_in_evaluation(kind):
    model = assert_same(kind(), samples(), 2, example_inputs=samples())
    assert not any("line" in name for name in names(model))


@pytest.mark.parametrize("kind", [AsksForGrad, AsksExported])
def test_another_grad_mode_than_usual_is_an_error_if_it_matters(kind):
    model = hybrid(kind(), 2, example_inputs=samples())
    with pytest.raises(ConfigError, match=r"is_grad_enabled.*train\(\) mode without"):
        model(samples())
    model.eval()
    with pytest.raises(ConfigError, match=r"is_grad_enabled.*eval\(\) mode with"):
        model.train_step(samples(), None, loss_of)
    model = hybrid(AsksInVain(), 2, example_inputs=samples())
    model(samples())
