"""A statement that cannot be traced is refused by its line, and runs in a module of its own."""

import pytest
import torch
from support import traced
from support.traced import assert_same, hybrid, linear, loss_of, names, samples
from torch import nn

from hybridtrain.errors import ConfigError, SplitError

pytestmark = pytest.mark.usefixtures("seeded")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear() for _ in range(4))
        self.steps, self.last = 0, None


class Branches(Base):
    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x)
        return self.d(self.c(x))


class LeavesTheLoop(Base):
    def forward(self, x):
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            if x.sum() > 0:
                break
        return self.d(x)


class Counts(Base):
    def forward(self, x):
        self.steps += 1
        return self.d(self.c(self.b(self.a(x)))) * (1 + 0.1 * self.steps)


class CountsInOneLine(Base):
    # fmt: off
    def forward(self, x):
        self.steps += 1; return self.d(self.c(self.b(self.a(x)))) * self.steps  # noqa: E702
    # fmt: on


class Remembers(Base):
    def forward(self, x):
        self.keep(self.a(x))
        return self.d(self.c(self.b(x))) * self.last

    def keep(self, x):
        self.last = x


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Branches, "if x.sum() > 0:"),
        (LeavesTheLoop, "if x.sum() > 0:"),
        (Counts, "self.steps += 1"),
        (CountsInOneLine, "self.steps += 1; return"),
        (Remembers, "self.last = x"),
    ],
)
@pytest.mark.quick_cases("Counts-self.steps += 1", "CountsInOneLine-self.steps += 1; return")
def test_a_statement_that_cannot_be_traced_is_refused_in_one_line_with_its_place(kind, line):
    with pytest.raises(SplitError) as caught:
        hybrid(kind(), 2, example_inputs=samples())
    message = str(caught.value)
    assert "\n" not in message
    for part in (f"{kind.__name__} cannot be traced", "test_untraceable.py:", f"`{line}"):
        assert part in message
    assert "into the forward of a separate nn.Module that the model calls" in message
    assert_same(kind(), samples(), 1, example_inputs=samples())


@pytest.mark.thorough
def test_raft_which_hands_values_on_through_an_attribute_is_refused():
    flow = pytest.importorskip("torchvision.models").optical_flow
    images = torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)
    with pytest.raises(SplitError, match=r"raft\.py:\d+: `self\.corr_pyramid = .*its attribute"):
        hybrid(flow.raft_small(weights=None), 2, split="size", example_inputs=images)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = linear()

    def forward(self, x):
        return self.b(x) if x.sum() > 0 else x * 2


class Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        return x * (1 + 0.1 * self.steps)


class WithModules(Base):
    """What the refusals advise: the statements in modules of their own."""

    def __init__(self):
        super().__init__()
        self.branch, self.count = Branch(), Count()

    def forward(self, x):
        x = self.count(self.branch(self.a(x)))
        return self.d(self.c(x))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.quick_cases(1)
def test_statements_in_modules_of_their_own_run_as_in_the_plain_model(recompute):
    model = assert_same(WithModules(), samples(), 3, example_inputs=samples(), recompute=recompute)
    assert names(model) == ["a", "branch", "count", "c", "d"]


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


@pytest.mark.thorough
def test_a_large_submodule_that_cannot_be_traced_is_one_layer():
    model = assert_same(WithBody(), samples(), 2, example_inputs=samples())
    assert names(model) == ["body", "head"]
    says = r"cut into 3 stages.*body could not be expanded: .*`if x\.sum\(\) > 0:`.*control flow"
    with pytest.raises(SplitError, match=says):
        hybrid(WithBody(), 3, example_inputs=samples())


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
@pytest.mark.quick_cases(1)
def test_the_grad_mode_is_that_of_a_step_in_training_and_of_no_grad_in_evaluation(kind):
    model = assert_same(kind(), samples(), 2, example_inputs=samples())
    assert not any("line" in name for name in names(model))


@pytest.mark.parametrize("kind", [AsksForGrad, AsksExported])
@pytest.mark.quick_cases(1)
def test_another_grad_mode_than_usual_is_an_error_if_it_matters(kind):
    model = hybrid(kind(), 2, example_inputs=samples())
    with pytest.raises(ConfigError, match=r"is_grad_enabled.*train\(\) mode without"):
        model(samples())
    model.eval()
    with pytest.raises(ConfigError, match=r"is_grad_enabled.*eval\(\) mode with"):
        model.train_step(samples(), None, loss_of)
    model = hybrid(AsksInVain(), 2, example_inputs=samples())
    model(samples())


def swallows_control_flow(net, x):
    h = net.a(x)
    try:
        if h.mean() > 0:
            h = h * 2
    except Exception:
        h = h * 3
    return net.c(net.b(h))


def swallows_a_number(net, x):
    h = net.a(x)
    try:
        h = h * float(h.mean())
    except Exception:
        h = h * 3
    return net.c(net.b(h))


@pytest.mark.parametrize("body", [swallows_control_flow, swallows_a_number])
@pytest.mark.quick_cases(1)
def test_a_question_that_cannot_be_answered_is_refused_though_the_model_catches_its_error(body):
    with pytest.raises(SplitError, match=r"Body cannot be traced.*h\.mean\(\)"):
        hybrid(traced.Body(body), 2, example_inputs=samples())
    assert_same(
        nn.Sequential(traced.Body(body), traced.Body(body)), samples(), 2
    )  # in a layer it may
