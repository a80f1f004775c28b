"""A loss is the mean that it is taken for: known, or compared with its parts in the first step."""

import copy
import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.compare import CLOSE, assert_same_gradients, cpu_world
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import BatchError, ConfigError, UserError
from hybridtrain.losses import MeanLoss, SumLoss, resolve
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
def test_a_plain_function_that_is_no_mean_over_samples_is_said_once(name, chunks, caplog):
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    for _ in range(2):
        model.train_step(*batch(), NO_MEANS[name])
    [said] = [r.message for r in caplog.records if "taken for a mean over samples" in r.message]
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
    with pytest.raises(ConfigError, match=r"[\d.]+ for 3 samples, and [\d.]+ "):
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


def test_a_loss_that_is_a_method_or_gets_outputs_of_other_shapes_is_left_alone(caplog):
    class Own:
        calls = 0

        def loss(self, output, targets):
            self.calls += 1
            return masked(output, targets)

    class Trims(nn.Module):
        def forward(self, x):
            return x[:, : 3 + len(x) % 2]

    own = Own()
    HybridModel(net(), cpu_world(2), chunks=3).train_step(*batch(), own.loss)
    assert own.calls == 3
    model = HybridModel(nn.Sequential(nn.Linear(6, 8), Trims()), cpu_world(2), chunks=2)
    model.train_step(batch()[0], None, lambda output, _: output.square().mean())
    assert not caplog.records


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

    assert resolve(compiled).trusted
    assert not resolve(with_more).trusted


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

    two, model = SimpleNamespace(replicas=2), net()
    loss = Tempered()
    for form in (loss, loss.forward, functools.partial(loss), MeanLoss(loss, len)):
        with pytest.raises(ConfigError, match=r"trainable parameters \(temperature\)"):
            check_loss_function(form, model, two)
        check_loss_function(form, model, SimpleNamespace(replicas=1))
    check_loss_function(loss.requires_grad_(False), model, two)
    check_loss_function(nn.Sequential(model), model, two)  # of the model itself


def test_a_loss_of_parameters_in_another_process_is_one_line():
    with pytest.raises(UserError, match=r"parameters .* another process has: with engine="):
        resolve(lambda *_: torch.empty((), device="meta"))(None, None)


def test_a_backward_of_ones_own_names_train_step(caplog):
    model, (inputs, targets) = HybridModel(net(), cpu_world(2), chunks=2), batch()
    for _ in range(2):
        output = model(inputs)
    with pytest.raises(RuntimeError, match="does not require grad"):
        F.cross_entropy(output, targets).backward()
    [said] = [r.message for r in caplog.records if "has no graph" in r.message]
    assert "model.train_step(inputs, targets, loss_fn)" in said
    loss = model.train_step(inputs, targets, F.cross_entropy).loss
    with pytest.raises(UserError, match="train_step has run the backward already"):
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
    with pytest.raises(TypeError, match=r"write model.net\[0\]"):
        model[0]
