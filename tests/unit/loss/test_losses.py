"""Losses that count: the mean over valid elements is that of the unsplit model."""

import copy
import functools

import pytest
import torch
from support.compare import CLOSE, assert_same_gradients, cpu_world
from support.training import trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel
from hybridtrain.data import EvalLoader, TrainLoader
from hybridtrain.errors import BatchError, ConfigError, DataError
from hybridtrain.loop import evaluate
from hybridtrain.loss import MeanLoss, SumLoss, accuracy, cross_entropy

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

CLASSES = 5
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.7, 0.0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch(samples=12):
    g = torch.Generator().manual_seed(1)
    targets = torch.randint(CLASSES, (samples,), generator=g)
    targets[:5] = -100  # with 4 micro-batches of 12 samples the first has no target
    return torch.randn(samples, 6, generator=g), targets


def valid(_, targets):
    return (targets != -100).sum()


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


class Summed(nn.Module):
    """A module that has a count."""

    def forward(self, output, targets):
        return summed(output, targets)

    def count(self, inputs, targets):
        return int(valid(inputs, targets))


def by_hand(output, targets):
    """Divides zero by zero where nothing counts, and so would its backward."""
    mask = targets != -100
    each = F.cross_entropy(output, targets.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum()


LOSSES = {
    "function": (F.cross_entropy, F.cross_entropy),
    "by name": (cross_entropy, F.cross_entropy),
    "module": (nn.CrossEntropyLoss(), F.cross_entropy),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1),) * 2,
    "class weights": (nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),) * 2,
    "other index": (functools.partial(F.cross_entropy, ignore_index=2),) * 2,
    "sum": (SumLoss(summed, valid), F.cross_entropy),
    "sum with a method": (Summed(), F.cross_entropy),
    "mean": (MeanLoss(by_hand, valid), by_hand),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunks", [1, 2, 4, 5])
@pytest.mark.quick_cases(3)
def test_a_step_is_the_mean_over_what_counts(name, chunks):
    ours, plain = LOSSES[name]
    inputs, targets = batch()
    if name == "other index":
        targets = targets.clamp(min=2)
    reference = net()
    expected = plain(reference(inputs), targets)
    expected.backward()
    model = HybridModel(net(), cpu_world(2), chunks=chunks)
    out = model.train_step(inputs, targets, ours)
    torch.testing.assert_close(out.loss, expected.detach(), **CLOSE)
    assert_same_gradients(model, reference, name, **CLOSE)
    if name in ("function", "by name", "module"):
        assert out.count == 7
        if chunks == 1:
            assert torch.equal(out.loss, expected.detach())
            assert_same_gradients(model, reference, name)  # to the last bit


def test_targets_that_are_probabilities_count_samples():
    inputs = batch()[0]
    targets = torch.rand(12, CLASSES).softmax(1)
    reference = net()
    F.cross_entropy(reference(inputs), targets).backward()
    model = HybridModel(net(), cpu_world(2), chunks=5)
    assert model.train_step(inputs, targets, F.cross_entropy).count == 12
    assert_same_gradients(model, reference, **CLOSE)


@pytest.mark.parametrize("loss_fn", [cross_entropy, SumLoss(summed, valid)])
def test_batches_of_a_step_are_weighed_by_what_counts(loss_fn):
    inputs, targets = batch()
    batches = [(inputs[a:b], targets[a:b]) for a, b in ((0, 5), (5, 7), (7, 12))]
    reference = net()
    F.cross_entropy(reference(inputs), targets).backward()
    model = HybridModel(net(), cpu_world(1), chunks=2)
    weights = model.step_weights(batches, loss_fn)
    assert weights.total == 7
    for (x, y), weight in zip(batches, weights, strict=True):
        model.train_step(x, y, loss_fn, weight=weight)
    assert_same_gradients(model, reference, **CLOSE)


def test_weights_are_by_samples_without_a_count():
    inputs, _ = batch()
    model, reference = HybridModel(net(), cpu_world(1), chunks=2), net()
    batches = [(inputs[:4], None), (inputs[4:], None)]
    for (x, y), weight in zip(batches, model.step_weights(batches, mean_square), strict=True):
        model.train_step(x, y, mean_square, weight=weight)
    mean_square(reference(inputs), None).backward()
    assert_same_gradients(model, reference, **CLOSE)


def mean_square(output, _):
    return output.square().mean()


def test_the_weight_of_another_batch_is_refused():
    inputs, targets = batch()
    model = HybridModel(net(), cpu_world(1), chunks=3)
    weights = model.step_weights([(inputs[:2], targets[:2])], cross_entropy)
    with pytest.raises(BatchError, match=r"weight= .*step_weights"):
        model.train_step(inputs, targets, cross_entropy, weight=weights[0])


def test_a_contrastive_loss_is_seen_whole_in_two_passes():
    def contrastive(features):
        features = F.normalize(features, dim=1)
        return F.cross_entropy(features @ features.T / 0.1, torch.arange(len(features)))

    inputs, _ = batch()
    model, reference = HybridModel(net(), cpu_world(2), chunks=4), net()
    features = model(inputs).requires_grad_()
    contrastive(features).backward()
    parts = SumLoss(lambda output, gradient: (output * gradient).sum(), lambda *_: 1)
    model.train_step(inputs, features.grad, parts, weight=1.0)
    contrastive(reference(inputs)).backward()
    assert_same_gradients(model, reference, **CLOSE)


def of_ignored_targets(**options):
    ours = trainer(net(), steps=4, **options)
    ignored = TensorDataset(torch.randn(8, 6), torch.full((8,), -100))
    ours.train = TrainLoader(ignored, 4, cpu_world(2))
    ours.evaluation = None
    return ours


def test_a_run_in_which_nothing_counts_says_so_at_its_first_step_and_ends_as_an_error(caplog):
    ours = of_ignored_targets()
    with pytest.raises(DataError, match=r"in all 4 steps no target counted.* ignore_index="):
        ours.fit()
    [said] = [r.message for r in caplog.records if "none of its targets counts" in r.message]
    assert said.startswith("skipping step 1 ")


def test_a_step_in_which_nothing_counts_is_skipped_and_counted():
    ours = of_ignored_targets()
    before = copy.deepcopy(ours.model.state_dict())
    ours._finite.check_not_all_empty = lambda steps: None
    summary = ours.fit()
    assert summary["steps"] == summary["empty_steps"] == 4
    assert summary["skipped_steps"] == 0
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, before[name]), name  # AdamW would have decayed it


def test_the_trainer_and_its_loss_go_by_what_counts():
    inputs, targets = batch(16)
    reference = net()
    ours = trainer(net(), steps=1, accumulate=4, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    ours.train = TrainLoader(TensorDataset(inputs, targets), 4, ours.world)
    ours.evaluation = None
    summary = ours.fit()
    optimizer = torch.optim.SGD(reference.parameters(), lr=1.0)
    loss = F.cross_entropy(reference(inputs), targets)
    loss.backward()
    optimizer.step()
    assert summary["train_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], value, **CLOSE)


def test_the_accuracy_of_several_labels_is_the_share_of_exact_matches():
    metric = accuracy()
    outputs = torch.tensor([[2.0, -1.0, 0.5], [1.0, 1.0, 1.0], [-2.0, -1.0, 3.0]])
    metric.update(outputs, torch.tensor([[1.0, 0, 1], [1, 0, 1], [0, 0, 1]]))
    metric.update(outputs[:1], torch.tensor([[0.0, 0, 1]]))
    assert float(metric.compute()) == 2 / 4
    with pytest.raises(ConfigError, match="compares classes, or labels of 0 and 1"):
        metric.update(outputs, outputs)


def test_evaluation_and_accuracy_leave_ignored_targets_out():
    inputs, targets = batch(16)
    targets[12:] = -100  # the last batch has no target
    model = HybridModel(net(), cpu_world(2), chunks=3)
    loader = EvalLoader(TensorDataset(inputs, targets), 4, model.world)
    result = evaluate(model, loader, cross_entropy, {"accuracy": accuracy()})
    with torch.no_grad():
        output = net()(inputs)
    assert result["samples"] == 16
    assert result["loss"] == pytest.approx(float(F.cross_entropy(output, targets)), rel=1e-5)
    right = (output.argmax(1) == targets)[targets != -100]
    assert result["accuracy"] == pytest.approx(float(right.double().mean()))


def test_labels_to_ignore_are_refused_for_a_loss_without_a_count():
    def mine(output, targets):
        return F.cross_entropy(output, targets)

    inputs, targets = batch()
    with pytest.raises(BatchError, match=r"contain -100, but loss_fn=mine .* MeanLoss"):
        HybridModel(net(), cpu_world(2), chunks=2).train_step(inputs, targets, mine)
    model = HybridModel(net(), cpu_world(2))
    loader = EvalLoader(TensorDataset(inputs, targets), 4, model.world)
    with pytest.raises(BatchError, match="contain -100"):
        evaluate(model, loader, mine, {})
    # a micro-batch that is the whole step is right
    model.train_step(inputs, targets, mine)


def test_a_tuple_is_refused_with_the_loss_to_write():
    model = HybridModel(net(), cpu_world(1))
    with pytest.raises(BatchError, match=r"SumLoss\(loss_sum, count\)"):
        model.train_step(*batch(), lambda output, targets: (summed(output, targets), 3))


@pytest.mark.parametrize("loss_fn", [
    nn.CrossEntropyLoss(reduction="sum"), nn.MSELoss(reduction="none"),
    functools.partial(F.cross_entropy, reduction="sum"),
])  # fmt: skip
def test_a_sum_without_a_count_is_refused(loss_fn):
    model = HybridModel(net(), cpu_world(1))
    with pytest.raises(ConfigError, match=r'reduction="(sum|none)".*SumLoss'):
        model.train_step(*batch(), loss_fn)


@pytest.mark.parametrize("count", [-1, float("nan")])
def test_a_count_that_cannot_be_is_refused(count):
    model = HybridModel(net(), cpu_world(1))
    with pytest.raises(BatchError, match="count of a loss"):
        model.train_step(*batch(), SumLoss(summed, lambda *_: count))


def test_the_accuracy_of_one_output_per_sample_is_that_of_its_sign():
    metric = accuracy()
    metric.update(torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([1, 0, 0, 0]))
    assert metric.compute() == 0.75
