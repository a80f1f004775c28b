"""Evaluation in one process: every sample counts once, and nothing of the model changes."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from support.training import assert_same, data, rich_net, trainer
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hybridtrain import HybridModel, World
from hybridtrain.data import EvalLoader
from hybridtrain.errors import ConfigError
from hybridtrain.launch import Phase, activity
from hybridtrain.launch.activity import Work
from hybridtrain.loop import evaluate, predict
from hybridtrain.loss import METRICS, accuracy, cross_entropy, nll
from hybridtrain.observe import MetricsFile

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.mark.parametrize("samples", [1, 4, 11])
@pytest.mark.parametrize("chunks", [1, 3])
def test_evaluation_counts_every_sample_once(samples, chunks):
    world = World.from_env(nb_part=2, devices="cpu")
    net = rich_net()
    reference = copy.deepcopy(net).eval()
    model = HybridModel(net, world, chunks=chunks)
    loader = EvalLoader(data(samples, seed=9), 4, world)
    metrics = {
        "accuracy": accuracy(),
        "torchmetrics": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
    }
    inputs, targets = data(samples, seed=9).tensors
    with torch.no_grad():
        outputs = reference(inputs)
    expected = float((outputs.argmax(1) == targets).double().mean())
    for _ in range(2):  # the second is not affected by the first
        result = evaluate(model, loader, cross_entropy, metrics)
        assert result["samples"] == samples
        assert result["accuracy"] == pytest.approx(expected, abs=1e-12)
        assert result["torchmetrics"] == pytest.approx(expected, abs=1e-6)  # a float32
        # means of micro-batches of 4 and less, in float32, weighted in double precision
        loss = float(F.cross_entropy(outputs, targets))
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("loss", [F.nll_loss, nll, nn.NLLLoss()])
def test_an_evaluation_of_logits_with_an_nll_is_an_error(loss):
    ours = trainer(rich_net())
    with pytest.raises(ConfigError, match="takes log-probabilities, which are never above 0"):
        evaluate(ours.model, ours.evaluation, loss, {})
    assert evaluate(ours.model, ours.evaluation, cross_entropy, {})["loss"] > 0


def test_an_evaluation_without_a_target_that_counts_is_said(caplog):
    inputs, targets = data(8, seed=9).tensors
    nothing = TensorDataset(inputs, torch.full_like(targets, -100))
    ours = trainer(rich_net())
    found = evaluate(ours.model, EvalLoader(nothing, 4, ours.model.world), cross_entropy, {})
    assert math.isnan(found["loss"])
    assert "none of its targets counts for the loss" in caplog.text


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_changes_neither_mode_nor_random_state_nor_weights(mode):
    ours = trainer(rich_net())
    ours.model.train(mode)
    ours.model.rng.step = 5
    before = copy.deepcopy(ours.model.state_dict())
    evaluate(ours.model, ours.evaluation, cross_entropy, {})
    assert ours.model.training is mode
    assert all(module.training is mode for module in ours.model.net.modules())
    assert ours.model.rng.step == 5
    assert_same(ours.model.state_dict(), before, "state")
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_metrics_and_losses_see_micro_batches_and_never_whole_outputs():
    seen = []

    def loss_fn(outputs, targets):
        seen.append(len(outputs))
        return cross_entropy(outputs, targets)

    world = World.from_env(nb_part=2, devices="cpu")
    evaluate(HybridModel(rich_net(), world, chunks=2), EvalLoader(data(7), 4, world), loss_fn, {})
    assert seen == [2, 2, 2, 1]


def test_without_samples_the_values_are_nan_and_nothing_warns():
    world = World.from_env(nb_part=1, devices="cpu")
    loader = EvalLoader(data(0), 4, world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = evaluate(
            HybridModel(rich_net(), world), loader, cross_entropy, {"accuracy": accuracy()}
        )
    assert result["samples"] == 0
    assert result["loss"] != result["loss"]
    assert result["accuracy"] != result["accuracy"]


@pytest.mark.parametrize("shape", [(5,), (5, 4)])
@pytest.mark.parametrize("last", [True, False])
def test_accuracy_takes_the_classes_last_or_in_dim_1(shape, last):
    targets = torch.randint(3, shape, generator=torch.Generator().manual_seed(0))
    wrong = targets.clone()
    wrong[0] = (wrong[0] + 1) % 3
    logits = F.one_hot(wrong, 3).float()
    metric = METRICS["accuracy"]()
    metric.update(logits if last else logits.movedim(-1, 1), targets)
    assert metric.compute() == torch.tensor(4 / 5, dtype=torch.float64)


def test_a_trainer_without_evaluation_data_says_so():
    ours = trainer(eval_every=2, steps=3)
    ours.evaluation = None
    assert ours.fit()["eval"] is None
    with pytest.raises(ConfigError, match="pass evaluation="):
        ours.evaluate()


def test_an_evaluation_that_fails_leaves_the_model_in_its_mode():
    ours = trainer(rich_net())
    ours.model.train()

    def failing(outputs, targets):
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        evaluate(ours.model, EvalLoader(data(4), 4, ours.model.world), failing, {})
    assert all(module.training for module in ours.model.net.modules())


def test_a_trainer_evaluates_again_after_its_run_has_ended(tmp_path):
    ours = trainer(rich_net(), callbacks=[MetricsFile(tmp_path / "metrics.jsonl")])
    ours.fit()
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert "eval/loss" in lines
    assert ours.evaluate()["samples"] == 11
    assert (tmp_path / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("before", [Work(Phase.SETUP), Work(Phase.EVALUATE, 4), None])
def test_an_evaluation_outside_of_training_is_watched(before):
    ours = trainer()
    phases = []

    def loss(outputs, targets):
        phases.append(activity.work.phase)
        return cross_entropy(outputs, targets)

    activity.set(before)
    evaluate(ours.model, EvalLoader(data(4), 4, ours.world), loss, {})
    assert activity.work == before
    assert set(phases) == {Phase.EVALUATE}
    activity.set(None)


def test_a_metric_is_left_as_it_came():
    ours = trainer()
    ours.evaluate()
    copied = pickle.loads(pickle.dumps(ours.metrics["accuracy"]))
    assert copied.compute() == ours.metrics["accuracy"].compute()


def test_the_perplexity_is_exp_of_the_cross_entropy_of_the_targets_that_count():
    logits, targets = torch.randn(6, 4, 5), torch.randint(0, 5, (6, 4))
    targets[::2, 1:] = -100
    metric = METRICS["perplexity"]()
    for part in (slice(0, 1), slice(1, 6)):  # unequal batches
        metric.update(logits[part], targets[part])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).exp()
    assert float(metric.compute()) == pytest.approx(float(expected), rel=1e-6)
    metric.reset()
    metric.update(logits[:1].log_softmax(-1), targets[:1])  # of a loss that takes these
    assert float(metric.compute()) == pytest.approx(
        float(F.cross_entropy(logits[0], targets[0]).exp()), rel=1e-6
    )


class Alone(Dataset):
    """Inputs without targets, one by one."""

    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index]


class AloneInOrder(IterableDataset):
    def __init__(self, inputs):
        self.inputs = inputs

    def __iter__(self):
        return iter(self.inputs)


@pytest.mark.parametrize("kind", [Alone, AloneInOrder])
def test_inputs_without_targets_are_predicted_in_their_order(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    inputs = torch.randn(11, 4)
    with World.from_env(nb_part=2, devices="cpu") as world:
        model = HybridModel(net, world, chunks=2)
        data = EvalLoader(kind(inputs), 4, world, inputs_alone=True)
        found = predict(model, data)
    torch.testing.assert_close(found, net(inputs).detach())


def test_a_metric_with_a_value_per_class_has_a_name_for_each():
    ours = trainer(rich_net())
    world, samples = ours.model.world, data(11, seed=9)
    recall = torchmetrics.classification.MulticlassRecall(3, average=None)
    both = torchmetrics.MetricCollection({"a": recall, "b": recall.clone()})
    names = ["x", "y/z", "0"]
    loader = EvalLoader(samples, 4, world, classes=names)
    found = evaluate(ours.model, loader, cross_entropy, {"r": recall, "both": both})
    values = recall.compute().tolist()
    assert [found[f"r/{name}"] for name in names] == values
    assert [found[f"both/b/{name}"] for name in names] == values
    for classes in (None, names[:2]):  # a metric of other classes than the data
        loader = EvalLoader(samples, 4, world, classes=classes)
        found = evaluate(ours.model, loader, cross_entropy, {"r": recall})
        assert [found[f"r/{number}"] for number in range(3)] == values


class CountsAlone(nn.Module):
    def reset(self):
        self.seen = 0

    def update(self, outputs, targets):
        self.seen += len(targets)

    def compute(self):
        return torch.tensor(float(self.seen))


class CountsTogether(CountsAlone):
    dist_sync_fn = None

    def compute(self):
        gather = self.dist_sync_fn or (lambda counts: [counts])
        return torch.stack(gather(super().compute())).sum()


class NoModule:
    """A metric with all that a Trainer asks for, if there is one replica."""

    reset, update, compute = CountsAlone.reset, CountsAlone.update, CountsAlone.compute

    def to(self, device):
        return self


def evaluated(metric, replicas=None):
    world = World.from_env(nb_part=2, devices="cpu", replicas=replicas)
    metric.reset()
    model = HybridModel(rich_net(), world, chunks=2)
    loader = EvalLoader(data(11, seed=9), 4, world)
    return evaluate(model, loader, cross_entropy, {"counted": metric})["counted"]


@pytest.mark.parametrize("metric", [CountsAlone, NoModule])
def test_a_metric_that_would_report_one_replicas_part_is_refused(metric):
    assert evaluated(metric()) == 11
    with pytest.raises(ConfigError, match=r"counted counts only the samples.*dist_sync_fn"):
        evaluated(metric(), replicas=2)
    assert evaluated(CountsTogether(), replicas=2) == 11  # what the error advises
