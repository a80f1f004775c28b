"""Before the first step of each kind of input, the stages are compared with the unsplit module."""

import copy
import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import thorough
from support.compare import hybrid, square_loss
from support.nets import CASES, WIDTH, TanhLinear, classification, floats, mlp
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain import HybridModel
from hybridtrain.errors import NotExactError, UserError
from hybridtrain.verification import forward_check, python_state

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class TakesGradient(nn.Module):
    """The first layer of a stage that takes a gradient of its input and gives none back."""

    def __init__(self):
        super().__init__()
        self.a, self.b = TanhLinear(), TanhLinear()

    def forward(self, x):
        if not x.requires_grad:
            return self.b(x)
        (gradient,) = torch.autograd.grad(self.a(x).pow(2).sum(), x, retain_graph=True)
        return self.b(gradient.detach())


class Differs(nn.Module):
    """Asks whether it is a layer of a stage: what a cut must never change."""

    def __init__(self):
        super().__init__()
        self.linear = TanhLinear()

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if in_a_pipeline() else y


def in_a_pipeline():
    import sys

    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("forward/layers.py"):
            return True
        frame = frame.f_back
    return False


def test_a_layer_that_computes_something_else_in_a_stage_is_named():
    net = nn.Sequential(TanhLinear(), TanhLinear(), Differs(), TanhLinear())
    model = hybrid(net, 2)
    with pytest.raises(NotExactError, match="first layer with a different output is '2'"):
        model.train_step(floats(8), None, square_loss)
    with pytest.raises(NotExactError, match="evaluation mode"):
        model.eval()(floats(8))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.quick_cases("1f1b")
def test_models_that_are_cut_rightly_are_compared_and_pass(schedule, caplog):
    caplog.set_level(logging.DEBUG, logger="hybridtrain")
    for name in ("dropout", "tied_gpt", "conv", "u_net", "stateful"):
        case = CASES[name]
        model = hybrid(case.net(), 2, schedule=schedule)
        model.train_step(*case.batch(7, 3), case.loss)
        model.eval()(case.batch(7, 3)[0])
    assert "were not compared" not in caplog.text


def test_the_check_is_off_where_the_option_says_so():
    model = hybrid(nn.Sequential(TanhLinear(), Differs()), 2, self_check=False)
    model.train_step(floats(8), None, square_loss)


def run_batches_of_some_kinds(model):
    for size in (8, 6, 8, 3, 1):  # 3: micro-batches of 2 and of 1
        model.train_step(floats(size), None, square_loss)
    model.eval()(floats(8))
    model.train_step(floats(8), None, square_loss)
    model(floats(4)[:, None].double().float())


def test_each_kind_of_batch_is_checked_before_its_first_step(monkeypatch):
    model = hybrid(nn.Sequential(TanhLinear(), TanhLinear()), 2, chunks=2)
    kinds = []

    def check(checked, batch, whole):
        kinds.append((batch.training, batch.trains, [tuple(part.shape) for part in batch.parts]))

    monkeypatch.setattr(forward_check.ForwardCheck, "_check", check)
    run_batches_of_some_kinds(model)
    assert kinds == [
        (True, True, [(2, WIDTH), (2, WIDTH)]),
        (True, True, [(2, WIDTH), (1, WIDTH)]),
        (True, True, [(1, WIDTH)]),
        (False, False, [(2, WIDTH), (2, WIDTH)]),
        (False, True, [(2, WIDTH), (2, WIDTH)]),
        (False, False, [(2, 1, WIDTH), (2, 1, WIDTH)]),
    ]


def test_the_model_and_what_its_code_reaches_are_as_before():
    history, calls, notes = [], {"n": 0}, []
    generator = torch.Generator().manual_seed(3)

    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.runs, self.seen = TanhLinear(), 0, []
            self.note = notes.append
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.runs += 1
            self.seen.append(self.runs)
            self.note(self.runs)
            history.append(float(torch.rand((), generator=generator)))
            calls["n"] += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            return self.linear(x) + self.mean.clone()

    net = nn.Sequential(Notes(), TanhLinear(), Notes())
    net[1].register_forward_hook(lambda *values: calls.update(hook=calls.get("hook", 0) + 1))
    plain = copy.deepcopy(net)
    model = hybrid(net, 2, chunks=4)
    random_state = torch.get_rng_state()
    model.train_step(floats(8), None, square_loss)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert net[0].runs == net[2].runs == 4
    assert net[0].seen == [1, 2, 3, 4]
    assert len(history) == len(notes) == calls["n"] == 8
    assert calls["hook"] == 4
    for part in floats(8).split(2):
        plain(part)
    assert torch.equal(net[2].mean, plain[2].mean)


def test_hooks_of_parameters_run_in_the_comparison_too():
    net = nn.Sequential(TanhLinear(), TanhLinear(), TanhLinear())
    # counters that the comparison does not restore, unlike numbers in a closure
    doubled, clipped = itertools.count(), itertools.count()

    def double(gradient):
        next(doubled)
        return gradient * 2

    def clip(parameter):
        next(clipped)
        parameter.grad.clamp_(-1e-3, 1e-3)

    net[0].linear.weight.register_hook(double)
    net[2].linear.bias.register_post_accumulate_grad_hook(clip)
    hybrid(net, 2, chunks=1).train_step(floats(8), None, square_loss)
    assert next(doubled) == next(clipped) == 3  # in the cut copy, the unsplit copy and the step


def test_a_module_that_never_gives_the_same_numbers_twice_is_not_refused(caplog):
    import time

    class Clock(TanhLinear):
        def forward(self, x):
            return super().forward(x) + time.perf_counter_ns() % 1000

    model = hybrid(nn.Sequential(TanhLinear(), Clock()), 2)
    with caplog.at_level(logging.INFO, "hybridtrain"):
        model.train_step(floats(8), None, square_loss)
    assert "on the same inputs give different numbers" in caplog.text
    assert "hybridtrain verify" in caplog.text


def test_that_a_model_is_too_large_to_run_ahead_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(forward_check, "MAX_BYTES", 0)
    model = hybrid(nn.Sequential(TanhLinear(), Differs()), 2)
    with caplog.at_level(logging.INFO, "hybridtrain"):
        model.train_step(floats(8), None, square_loss)
        model.eval()(floats(8))
    assert caplog.text.count("hybridtrain verify") == 1
    assert "because the model exceeds 0.0 GiB" in caplog.text


def test_a_model_that_holds_more_objects_than_can_be_restored_is_not_run_for_the_check(
    monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="hybridtrain")
    monkeypatch.setattr(python_state, "_MAX_OBJECTS", 100)
    calls = itertools.count()
    net = nn.Sequential(TanhLinear(), TanhLinear())
    net[0].rows = [[number] for number in range(200)]

    def count(module, args):
        next(calls)

    net[0].register_forward_pre_hook(count)
    hybrid(net, 2, chunks=1).train_step(floats(8), None, square_loss)
    assert next(calls) == 1
    assert "too many objects to restore" in caplog.text


def test_a_gradient_that_a_layer_takes_of_its_input_is_right_or_refused():
    plain = nn.Sequential(TanhLinear(), TakesGradient(), TanhLinear())
    model = hybrid(copy.deepcopy(plain), 2, split=[1, 2], chunks=2)
    try:
        model.train_step(floats(8), None, square_loss)
    except UserError:
        return
    square_loss(plain(floats(8)), None).backward()
    assert plain[0].linear.weight.grad is None
    assert model.net[0].linear.weight.grad is None


# Python that a forward may contain, as lines between h = self.a(x) and return self.d(h)
LINES = [
    "h = self.b(h) if x.shape[0] > 1 else self.c(h)",
    "h = h * self.scale",
    "h = self.c(h + x)",
    "h = h - h.mean(0) if x.dim() == 2 else h",
    "h = h * self.config['factor']",
    "h = sum(part(h) for part in self.parts)",
    "h = h + float(len(self.parts))",
    "h = h.clone().mul_(self.buffer)",
    "h = (lambda value: value.relu() + value)(h)",
    "h = torch.cat([h, x], 1)[:, ::2]",
    "h = h if h.requires_grad else h + 0",
    "h = h * (2 if isinstance(h, Tensor) else 1)",
    "h = self.b(h, *self.extra)",
    "h = torch.where(h > 0, h, self.b(h))",
]


@pytest.mark.parametrize("examples", [2, *thorough([25])])
def test_any_python_in_a_forward_is_exact_or_refused(examples):
    lists = st.lists(st.sampled_from(LINES), min_size=1, max_size=4)
    cases = given(lists, st.sampled_from([8, 7, 5, 1]))
    settings(max_examples=examples)(cases(check_forward))()


def check_forward(lines, samples):
    namespace = {"nn": nn, "torch": torch, "Tensor": Tensor, "TanhLinear": TanhLinear}
    body = "\n        ".join(["h = self.a(x)", *lines, "return self.d(h)"])
    exec(f"class Net(nn.Module):\n    def forward(self, x):\n        {body}", namespace)
    torch.manual_seed(0)
    plain = namespace["Net"]()
    plain.a, plain.b, plain.c, plain.d = (TanhLinear() for _ in range(4))
    plain.parts = nn.ModuleList(TanhLinear() for _ in range(2))
    plain.scale, plain.config, plain.extra = 0.5, {"factor": 1.5}, ()
    plain.register_buffer("buffer", torch.rand(WIDTH))
    inputs = floats(samples)
    try:
        model = hybrid(copy.deepcopy(plain), 2, chunks=3, example_inputs=floats(8))
        model.train_step(inputs, None, square_loss)
    except UserError:
        return
    parts = inputs.tensor_split(min(3, samples))
    for part in parts:
        (square_loss(plain(part), None) * (len(part) / samples)).backward()
    for name, parameter in plain.named_parameters():
        mine = model.net.get_parameter(name).grad
        if parameter.grad is None:
            assert mine is None, name
        else:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=1e-7)


def test_a_model_in_one_stage_needs_no_check(monkeypatch):
    monkeypatch.setattr(
        forward_check.ForwardCheck, "_check", lambda *args: pytest.fail("is checked")
    )
    model = hybrid(mlp(), 1)
    model.train_step(*classification(8), F.cross_entropy)
    assert isinstance(model, HybridModel)
