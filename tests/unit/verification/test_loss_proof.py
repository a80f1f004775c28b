"""A loss is the mean that it is taken for: known, or compared with its parts in the first step."""

import copy
import functools
import gc
import logging
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.compare import CLOSE, assert_same_gradients, cpu_world, plain_step
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import BatchError, ConfigError, UserError
from hybridtrain.loss import MeanLoss, SumLoss, nll, resolve
from hybridtrain.model import check_loss_function

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.7, 5.0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(7, 6, generator=g), torch.randint(5, (7,), generator=g)


class Derived(nn.CrossEntropyLoss):
    """Keeps the forward."""


class Wrapped(nn.Module):
    """A mean over class weights, inside a module of one's own."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(WEIGHT)
        self.calls = 0

    def forward(self, output, targets):
        self.calls += 1
        return self.loss(output, targets)


def weighted(weight, output, targets):
    return F.cross_entropy(output, targets, weight)


def masked(output, targets):
    mask = targets != 1
    return (F.cross_entropy(output, targets, reduction="none") * mask).sum() / mask.sum()


def contrastive(output, targets):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


KNOWN = {
    "derived": Derived(WEIGHT),
    "derived, other index": Derived(ignore_index=2),
    "compiled module": torch.compile(nn.CrossEntropyLoss(WEIGHT), backend="eager"),
    "compiled function": torch.compile(F.cross_entropy, backend="eager"),
    "partial of compiled": functools.partial(
        torch.compile(F.cross_entropy, backend="eager"), weight=WEIGHT
    ),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.quick_cases(2)
def test_a_loss_of_pytorch_is_counted_whatever_wraps_it(name):
    inputs, targets = batch()
    if name == "compiled function":
        targets[:3] = -100
    reference = net()
    KNOWN[name](reference(inputs), targets).backward()
    model = HybridModel(net(), cpu_world(2), chunks=3)
    model.train_step(inputs, targets, KNOWN[name])
    assert_same_gradients(model, reference, **CLOSE)


def test_a_sum_is_refused_in_a_derived_class_too():
    model = HybridModel(net(), cpu_world(2), chunks=3)
    with pytest.raises(ConfigError, match='reduction="sum"'):
        model.train_step(*batch(), Derived(reduction="sum"))


@pytest.mark.parametrize("pack", [lambda y: {"labels": y}, lambda y: (y, torch.rand(7))])
def test_labels_to_ignore_are_found_in_the_leaves_of_targets(pack):
    inputs, targets = batch()
    targets[:3] = -100
    model = HybridModel(net(), cpu_world(2), chunks=3)
    with pytest.raises(BatchError, match="the labels contain -100"):
        model.train_step(inputs, pack(targets), lambda output, _: output.mean())


NO_MEANS = {
    "module": Wrapped(),
    "bound method": Wrapped().forward,
    "partial": functools.partial(weighted, WEIGHT),
    "other index": lambda o, t: F.cross_entropy(o, t, ignore_index=2),
    "mask": masked,
    "in the batch": contrastive,
    "sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
}


@pytest.mark.parametrize("chunks", [3, 7])
@pytest.mark.parametrize("name", NO_MEANS)
@pytest.mark.quick_cases(4)
def test_a_plain_function_that_is_no_mean_over_samples_is_said_once(name, chunks, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    for _ in range(2):
        model.train_step(*batch(), NO_MEANS[name])
    [said] = [r.message for r in caplog.records if "treated as a mean over samples" in r.message]
    assert ("It is a sum: pass SumLoss" if name == "sum" else "pass MeanLoss(loss_fn") in said


def test_a_mean_over_samples_and_an_undivided_step_are_silent(caplog):
    HybridModel(net(), cpu_world(2), chunks=3).train_step(
        *batch(), lambda o, t: F.cross_entropy(o, t)
    )
    HybridModel(net(), cpu_world(2), chunks=1).train_step(*batch(), masked)
    draws = lambda o, t: F.dropout(o).square().mean()  # noqa: E731
    HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), draws)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss_fn", [
    MeanLoss(lambda o, t: F.cross_entropy(o, t, WEIGHT), lambda _, t: len(t)),
    SumLoss(lambda o, t: F.cross_entropy(o, t), lambda _, t: len(t)),
])  # fmt: skip
def test_a_count_that_is_contradicted_is_an_error_with_both_numbers(loss_fn, precision):
    model = HybridModel(net(), cpu_world(2), chunks=3, precision=precision)
    with pytest.raises(ConfigError, match=r"[\d.]+ for 7 samples, and [\d.]+ as the"):
        model.train_step(*batch(), loss_fn)


@pytest.mark.parametrize("chunks", [3, 7])
def test_a_count_that_is_right_passes(chunks):
    inputs, targets = batch()
    reference = net()
    F.cross_entropy(reference(inputs), targets, WEIGHT).backward()
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    model.train_step(inputs, targets, MeanLoss(Wrapped(), lambda _, t: WEIGHT[t].sum()))
    assert_same_gradients(model, reference, **CLOSE)


def test_the_proof_leaves_outputs_draws_and_the_state_of_a_loss_alone():
    class Noisy(Wrapped):
        def forward(self, output, targets):
            noise = torch.rand(output.shape)
            return super().forward(output.mul_(1 + noise), targets)

    def train(proves):
        model, loss = HybridModel(net(), cpu_world(2), chunks=3), Noisy()
        if not proves:
            model._proof = lambda *_: None
        torch.manual_seed(2)
        out = model.train_step(*batch(), loss)
        assert loss.calls == 3
        return [out.loss, torch.rand(1), *(p.grad for p in model.parameters())]

    for mine, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(mine, plain)


class Own:
    """Has a loss as a method and as a call, which count their calls."""

    def __init__(self, weight):
        self.weight = weight
        self.data = object()
        self.calls, self.values = 0, []

    @property
    def scaled(self):
        return self.weight * 2

    def loss(self, output, targets):
        self.calls += 1
        self.values.append(len(output))
        return F.cross_entropy(output, targets, self.scaled)

    __call__ = loss

    def __deepcopy__(self, memo):
        raise TypeError("it holds processes")


def made(weight):
    return lambda o, t: F.cross_entropy(o, t, weight)


FORMS = {
    "closure": made,
    "partial": lambda weight: functools.partial(weighted, weight),
    "keyword": lambda weight: functools.partial(F.cross_entropy, weight=weight).__call__,
    "method": lambda weight: Own(weight).loss,
    "object": Own,
    "default": lambda weight: lambda o, t, w=weight: F.cross_entropy(o, t, w),
    "nested": lambda weight: functools.partial(lambda f, o, t: f(o, t), made(weight)),
    "numbers": lambda weight: (lambda n: lambda o, t: F.cross_entropy(o, t, torch.tensor(n)))(
        weight.tolist()
    ),
    "in a dict": lambda weight: (lambda held: lambda o, t: F.cross_entropy(o, t, **held))(
        {"weight": weight}
    ),
    "in a list": lambda weight: (lambda held: lambda o, t: F.cross_entropy(o, t, *held))([weight]),
    "compiled": lambda weight: torch.compile(made(weight), backend="eager"),
}


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "loss_fn=" in r.getMessage()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick_cases(4)
def test_a_second_loss_with_the_same_code_and_other_captures_is_proved_too(form, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=3)
    right, wrong = FORMS[form](torch.ones(5)), FORMS[form](WEIGHT)
    for _ in range(2):
        model.train_step(*batch(), right)
    assert not warnings_of(caplog)
    for _ in range(2):
        model.train_step(*batch(), wrong)
    [said] = warnings_of(caplog)
    assert "treated as a mean over samples, but it is not one" in said


NOTES = []
GLOBAL_WEIGHT = torch.ones(5)


def noted(output, targets):
    NOTES.append(len(output))
    return F.cross_entropy(output, targets)


def of_a_global(output, targets):
    return F.cross_entropy(output, targets, GLOBAL_WEIGHT)


def test_a_lambda_that_is_made_anew_in_each_step_is_proved_once():
    model, calls = HybridModel(net(), cpu_world(2), chunks=3), Calls()
    NOTES.clear()
    for _ in range(3):
        model.train_step(*batch(), lambda output, targets: noted(output, targets))
        model.train_step(*batch(), lambda output, targets: calls(output, targets))
    assert calls.seen == [3, 2, 7, 3, 2, 2, 2] + 2 * [3, 2, 2]  # before the last micro-batch
    assert NOTES == 3 * [3, 2, 2]  # the proof has written to a copy


class Calls:
    """Cannot be copied: notes the calls of a proof too."""

    def __init__(self):
        self.seen = []

    def __del__(self):
        pass

    def __call__(self, output, targets):
        self.seen.append(len(output))
        return F.cross_entropy(output, targets)


def test_another_global_is_another_loss(monkeypatch, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=3)
    model.train_step(*batch(), lambda output, targets: of_a_global(output, targets))
    assert not warnings_of(caplog)
    monkeypatch.setitem(globals(), "GLOBAL_WEIGHT", WEIGHT)
    for _ in range(2):
        model.train_step(*batch(), lambda output, targets: of_a_global(output, targets))
    assert len(warnings_of(caplog)) == 1


def test_what_a_loss_of_one_step_captures_is_not_kept_alive():
    model, alive = HybridModel(net(), cpu_world(2), chunks=3), []

    def step():
        held = {"weight": torch.ones(5), "more": [torch.ones(5)]}
        alive.extend(map(weakref.ref, (held["weight"], held["more"][0])))
        model.train_step(*batch(), lambda o, t: F.cross_entropy(o, t, held["weight"]))

    for _ in range(3):
        step()
    model.train_step(*batch(), F.cross_entropy)  # what holds the last loss
    gc.collect()
    assert not [reference for reference in alive if reference() is not None]


@pytest.mark.thorough
def test_a_loss_that_is_another_one_in_each_step_is_not_proved_for_ever():
    model, calls = HybridModel(net(), cpu_world(2), chunks=3), Calls()
    for number in range(200):
        weight = torch.ones(5)
        model.train_step(*batch(), lambda o, t, n=number, w=weight: calls(o * (n + w.sum()), t))
    assert calls.seen.count(7) == 64 + 1


class Small(Own):
    """May be copied."""

    def __deepcopy__(self, memo):
        own = Small(self.weight)
        own.calls, own.values = self.calls, list(self.values)
        return own


class Experiment(Own):
    """Holds what must not be copied."""

    def __init__(self, weight):
        super().__init__(weight)
        self.data = [object()] * 10_000
        self.model = net()


@pytest.mark.parametrize("kind", [Own, Small, Experiment])
def test_the_proof_leaves_what_a_loss_captures_alone(kind):
    own, steps, held = kind(torch.ones(5)), torch.zeros(()), [0, {"n": 0}]
    parts = {"own": own, "nets": [net()]}

    def loss(output, targets, log=[]):  # noqa: B006
        assert parts["nets"][0][0].weight is weight  # parameters are not copied
        steps.add_(1)
        held[0] += 1
        held[1]["n"] += 1
        log.append(1)
        return parts["own"].loss(output, targets)

    weight = parts["nets"][0][0].weight
    for form in (own.loss, own, loss):
        own.calls, own.values[:] = 0, []
        HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), form)
        assert (own.calls, own.values) == (3, [3, 2, 2])
    assert (int(steps), held, len(loss.__defaults__[0])) == (3, [3, {"n": 3}], 3)


@pytest.mark.parametrize("width", [5, 40_000, 9_000_000])
@pytest.mark.quick_cases(1)
def test_a_count_is_proved_whatever_the_outputs_take(width):
    class Wide(nn.Module):
        def forward(self, x):
            return x.repeat(1, width // x.shape[1])

    def wrong(output, targets):
        weight = WEIGHT[targets]
        return (output.mean(1) * weight).sum() / weight.sum()

    model = HybridModel(nn.Sequential(nn.Linear(6, 5), Wide()), cpu_world(2), chunks=2)
    targets = torch.tensor([0, 4, 0, 4, 0, 4, 4])
    with pytest.raises(ConfigError, match="not a mean over the counted elements") as error:
        model.train_step(batch()[0], targets, MeanLoss(wrong, lambda _, t: len(t)))
    assert ("for 2 samples" in str(error.value)) == (width == 9_000_000)


def noise(output, targets):
    return F.cross_entropy(output + 0.1 * torch.rand_like(output), targets)


DRAWS = {
    "noise": noise,
    "dropout": lambda o, t: F.cross_entropy(F.dropout(o, 0.3), t),
    "one number": lambda o, t: F.cross_entropy(o * torch.rand(()), t),
    "python": lambda o, t: F.cross_entropy(o * random.random(), t),
    "numpy": lambda o, t: F.cross_entropy(o * np.random.rand(), t),
    "own generator": (lambda g: lambda o, t: F.cross_entropy(o * g.random(), t))(
        np.random.default_rng(0)
    ),
    "own torch generator": (
        lambda g: lambda o, t: F.cross_entropy(o + torch.rand(o.shape, generator=g), t)
    )(torch.Generator()),
    "by sample": lambda o, t: (F.cross_entropy(o, t, reduction="none") * torch.rand(len(o))).mean(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_loss_that_draws_is_compared_with_the_same_draws(name, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=3)
    model.train_step(*batch(), DRAWS[name])
    assert not warnings_of(caplog)

    def wrong(output, targets):
        return DRAWS[name](output, targets) * (1 + len(output))

    model.train_step(*batch(), wrong)
    [said] = warnings_of(caplog)
    assert "treated as a mean over samples, but it is not one" in said


def test_draws_of_numpy_by_sample_are_said_where_a_mean_is_assumed_and_are_no_error(caplog):
    def loss(output, targets):
        noise = torch.from_numpy(np.random.rand(len(output), 1)).float()
        return F.cross_entropy(output + noise, targets)

    model = HybridModel(net(), cpu_world(2), chunks=3)
    np.random.seed(0)
    np.random.rand()
    state = np.random.get_state()[2]
    model.train_step(*batch(), loss)
    [said] = warnings_of(caplog)
    assert "not be checked: " in said
    model.train_step(*batch(), MeanLoss(loss, lambda _, t: len(t)))
    assert np.random.get_state()[2] - state == 2 * 2 * 7  # two words for each of 7 numbers


def test_draws_that_nobody_sees_are_no_error(caplog):
    class Unseen(torch.autograd.Function):
        """Draws as compiled code does: a generator moves on without an operation."""

        @staticmethod
        def forward(ctx, x):
            torch.set_rng_state(torch.Generator().manual_seed(len(x)).get_state())
            return x * len(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss(output, targets):
        return F.cross_entropy(Unseen.apply(output), targets)

    model = HybridModel(net(), cpu_world(2), chunks=3)
    model.train_step(*batch(), MeanLoss(loss, lambda _, t: len(t)))
    model.train_step(*batch(), loss)
    [said] = warnings_of(caplog)
    assert "it draws others" in said


def test_a_loss_that_draws_a_permutation_of_its_samples_is_said(caplog):
    def mixed(output, targets):
        return F.mse_loss(output, output[torch.randperm(len(output))].detach())

    HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), mixed)
    assert len(warnings_of(caplog)) == 1


def in_training(condition):
    def loss(output, targets):
        return (masked if condition(output) else F.cross_entropy)(output, targets)

    return loss


def test_a_loss_is_proved_in_its_first_step_that_is_divided(caplog):
    model, (inputs, targets) = HybridModel(net(), cpu_world(2), chunks=3), batch()
    model.train_step(inputs[:1], targets[:1], masked)
    assert not warnings_of(caplog)
    for _ in range(2):
        model.train_step(inputs, targets, masked)
    assert len(warnings_of(caplog)) == 1


def test_a_counted_loss_of_outputs_without_targets_is_proved_in_training_too():
    def loss(output, _):
        counted = output[:, 0] > 0
        if output.requires_grad:
            return (output.square().mean(1) * counted).sum() / counted.sum()
        return output.square().mean()

    model = HybridModel(net(), cpu_world(2), chunks=3)
    with pytest.raises(ConfigError, match="not a mean over the counted elements"):
        model.train_step(batch()[0], None, MeanLoss(loss, lambda inputs, _: len(inputs)))


class OwnLoss(nn.Module):
    """Computes its loss, as the models of transformers do; one layer."""

    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs):
        x, y = inputs
        return F.cross_entropy(self.dropout(self.layers(x)), y)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_the_check_of_a_models_own_loss_leaves_no_trace(dropout, caplog):
    inputs = batch()[0], torch.tensor([0, 1, 1, 3, 4, 1, 2])
    torch.manual_seed(0)
    own = OwnLoss(dropout)
    own.layers.register_forward_hook(lambda *_: seen.append(own.training))
    model, seen = HybridModel(nn.Sequential(own), cpu_world(1), chunks=3), []
    draws = torch.get_rng_state()
    model.train_step(inputs, None, MeanLoss(lambda o, _: o, lambda inputs, _: len(inputs[0])))
    assert not caplog.records
    assert int(own.layers[1].num_batches_tracked) == 3
    assert seen == 3 * [False] + 3 * [True]
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize("condition", [
    lambda output: output.requires_grad,
    lambda output: torch.is_grad_enabled(),
])  # fmt: skip
def test_a_masked_mean_in_training_only_is_proved_in_training(condition, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=3)
    model.train_step(*batch(), in_training(condition))
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(ConfigError, match="not a mean over the counted elements"):
        model.train_step(*batch(), MeanLoss(in_training(condition), lambda _, t: len(t)))


def test_a_loss_whose_gradient_alone_is_no_mean_is_said(caplog):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.scale, None

    def loss(output, targets):
        return F.cross_entropy(Scaled.apply(output, len(output)), targets)

    HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), loss)
    [said] = warnings_of(caplog)
    assert "its gradient for 7 samples differs, by " in said


def test_outputs_that_cannot_be_compared_are_said_where_a_mean_is_assumed(caplog):
    class Trims(nn.Module):
        def forward(self, x):
            return x[:, : 3 + len(x) % 2]

    class Inside(nn.Module):
        def forward(self, x):
            return x.square().mean()

    class Sparse(nn.Module):
        def forward(self, x):
            return {"x": x, "at": (x.detach() > 0).float().to_sparse()}

    def square(output, _):
        return output.square().mean()

    model = HybridModel(nn.Sequential(nn.Linear(6, 8), Trims()), cpu_world(2), chunks=2)
    model.train_step(batch()[0], None, square)
    assert not caplog.records  # each micro-batch has another shape, as with padding
    model = HybridModel(nn.Sequential(nn.Linear(6, 8), Sparse()), cpu_world(1), chunks=2)
    model.train_step(batch()[0], None, lambda output, _: square(output["x"], None))
    [said] = warnings_of(caplog)
    assert "not be checked: in a call" in said
    caplog.clear()
    model = HybridModel(nn.Sequential(nn.Linear(6, 8), Inside()), cpu_world(2), chunks=2)
    model.train_step(batch()[0], None, lambda output, _: output)
    [said] = warnings_of(caplog)
    assert "not be checked: the model's output has tensors without the samples" in said


BODIES = {
    "mean": (lambda w, o, t: F.cross_entropy(o, t)),
    "weights": (lambda w, o, t: F.cross_entropy(o, t, w)),
    "masked": (lambda w, o, t: masked(o, t)),
    "sum": (lambda w, o, t: F.cross_entropy(o, t, reduction="sum")),
    "in the batch": (lambda w, o, t: F.mse_loss(o - o.mean(0), o.detach())),
    "in training": (lambda w, o, t: in_training(lambda o: o.requires_grad)(o, t)),
    "pairs": (lambda w, o, t: contrastive(o, t)),
}
FACTORIES = {
    "closure": lambda body, w: lambda o, t: body(w, o, t),
    "partial": lambda body, w: functools.partial(body, w),
    "default": lambda body, w: lambda o, t, body=body: body(w, o, t),
    "method": lambda body, w: Held(body, w).loss,
    "object": lambda body, w: Held(body, w),
    "module": lambda body, w: HeldModule(body, w),
}


class Held:
    def __init__(self, body, weight):
        self.held = [body, weight]

    def loss(self, output, targets):
        return self.held[0](self.held[1], output, targets)

    __call__ = loss


class HeldModule(nn.Module):
    def __init__(self, body, weight):
        super().__init__()
        self.body = body
        self.register_buffer("weight", weight)

    def forward(self, output, targets):
        return self.body(self.weight, output, targets)


LOSSES = st.tuples(
    st.sampled_from(sorted(BODIES)), st.sampled_from(sorted(FACTORIES)), st.booleans()
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(LOSSES, min_size=1, max_size=4), st.integers(2, 7))
def test_any_loss_is_exact_or_said(caplog, losses, chunks):
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    said = set()
    inputs, targets = batch()
    for body, factory, even in losses:
        loss = FACTORIES[factory](BODIES[body], torch.ones(5) if even else WEIGHT)
        reference = net()
        loss(reference(inputs), targets).backward()
        caplog.clear()
        model.zero_grad()
        model.train_step(inputs, targets, loss)
        said |= {factory} if warnings_of(caplog) else set()
        if factory not in said:  # each has the same code
            assert_same_gradients(model, reference, **CLOSE)


NLL = {
    "function": F.nll_loss,
    "by name": nll,
    "module": nn.NLLLoss(),
    "method": nn.NLLLoss().forward,
    "partial": functools.partial(F.nll_loss, ignore_index=-1),
    "compiled": torch.compile(F.nll_loss, backend="eager"),
    "lambda": lambda o, t: F.nll_loss(o, t),
    "mean": MeanLoss(F.nll_loss, lambda _, t: len(t)),
    "sum": SumLoss(lambda o, t: F.nll_loss(o, t, reduction="sum"), lambda _, t: len(t)),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", NLL)
@pytest.mark.quick_cases(4)
def test_an_nll_of_logits_is_an_error_in_the_first_step(name, chunks):
    inputs, targets = batch()
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    with pytest.raises(ConfigError, match=r"returns logits .*: set loss_fn=cross_entropy"):
        model.train_step(inputs * 9, targets, NLL[name])
    logs = nn.Sequential(*net(), nn.LogSoftmax(-1))
    HybridModel(logs, cpu_world(2), chunks=chunks).train_step(inputs * 9, targets, NLL[name])


def test_log_probabilities_that_round_to_more_than_0_pass():
    class Rounded(nn.Module):
        def forward(self, x):
            return (50 * x).log_softmax(-1).bfloat16() + 0.004

    ours, plain = (nn.Sequential(*net(), Rounded()) for _ in range(2))
    inputs, targets = batch()
    assert (plain(inputs) > 0).any()
    HybridModel(ours, cpu_world(2), chunks=2).train_step(inputs, targets, F.nll_loss)
    plain_step(plain, inputs, targets, F.nll_loss, chunks=2)
    assert_same_gradients(ours, plain)


def test_the_lists_of_a_function_are_not_written_to_by_the_proof():
    seen = []

    def loss(output, targets):
        seen.append(len(output))
        return output.square().mean()

    HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), loss)
    assert seen == [3, 2, 2]


def test_a_decorated_compiled_loss_is_no_known_one():
    compiled = torch.compile(F.cross_entropy, backend="eager")

    @functools.wraps(compiled)
    def with_more(output, targets):
        return compiled(output, targets) + output.square().mean()

    assert resolve(compiled).is_known_reduction
    assert not resolve(with_more).is_known_reduction


def test_class_targets_in_floating_point_are_one_line():
    model = HybridModel(net(), cpu_world(2), chunks=2)
    with pytest.raises(BatchError, match=r"int64 \(targets.long\(\)\), not float32 of shape \("):
        model.train_step(batch()[0], torch.rand(7), F.cross_entropy)


def test_swapped_arguments_of_train_step_name_the_order():
    model, (inputs, targets) = HybridModel(net(), cpu_world(2), chunks=2), batch()
    for args in ((F.cross_entropy, inputs, targets), (inputs, F.cross_entropy, targets)):
        with pytest.raises(ConfigError, match=r"not a Tensor: .*train_step\(inputs, targets, loss"):
            model.train_step(*args)


def test_parameters_of_the_loss_are_refused_where_replicas_would_train_them_apart():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

    two, model = SimpleNamespace(data_parallel_size=2), net()
    loss = Tempered()
    for form in (loss, loss.forward, functools.partial(loss), MeanLoss(loss, len)):
        with pytest.raises(ConfigError, match=r"trainable parameters \(temperature\)"):
            check_loss_function(form, model, two)
        check_loss_function(form, model, SimpleNamespace(data_parallel_size=1))
    check_loss_function(loss.requires_grad_(False), model, two)
    check_loss_function(nn.Sequential(model), model, two)  # of the model itself


def test_a_loss_of_parameters_in_another_process_is_one_line():
    with pytest.raises(UserError, match=r"parameters .* another process holds: with engine="):
        resolve(lambda *_: torch.empty((), device="meta"))(None, None)


def test_a_backward_of_ones_own_names_train_step(caplog):
    model, (inputs, targets) = HybridModel(net(), cpu_world(2), chunks=2), batch()
    for _ in range(2):
        output = model(inputs)
    with pytest.raises(RuntimeError, match="does not require grad"):
        F.cross_entropy(output, targets).backward()
    [said] = [r.message for r in caplog.records if "model(inputs)" in r.message]
    assert "model.train_step(inputs, targets, loss_fn)" in said
    loss = model.train_step(inputs, targets, F.cross_entropy).loss
    with pytest.raises(UserError, match=r"parameter.grad"):
        loss.backward()
    assert type(loss * 2) is type(copy.deepcopy(loss)) is torch.Tensor
    assert repr(loss).startswith("tensor(")
    assert float(loss) == loss.item() == loss.numpy()


def test_an_evaluation_without_gradients_is_silent(caplog):
    model = HybridModel(net(), cpu_world(2), chunks=2)
    with torch.no_grad():
        model(batch()[0])
    model.eval()(batch()[0])
    assert not caplog.records


def test_items_of_the_model_are_those_of_its_net():
    model = HybridModel(net(), cpu_world(2), chunks=2)
    with pytest.raises(TypeError, match=r"model\.net\[0\]"):
        model[0]
