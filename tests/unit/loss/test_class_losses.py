"""Losses by name with smoothed labels and weighted classes, and metrics of a classification."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.compare import cpu_world
from torch import nn

from hybridtrain import HybridModel
from hybridtrain.errors import ConfigError
from hybridtrain.loss import LOSSES, METRICS, balanced_weights, named_values, resolve

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


SMOOTH = {"weight": WEIGHTS, "label_smoothing": 0.2}


@pytest.mark.parametrize(
    ("name", "settings", "expected", "targets"),
    [
        ("cross_entropy", SMOOTH, partial(F.cross_entropy, **SMOOTH), "classes"),
        ("cross_entropy", {"label_smoothing": 0.1}, None, "probabilities"),
        ("bce", {}, F.binary_cross_entropy_with_logits, "labels"),
        (
            *("bce", {"weight": WEIGHTS}),
            *(partial(F.binary_cross_entropy_with_logits, pos_weight=WEIGHTS), "labels"),
        ),
    ],
    ids=["weighted", "mixed", "several", "several-weighted"],
)
@pytest.mark.quick_cases("weighted", "several-weighted")
def test_a_step_in_micro_batches_is_the_loss_of_the_whole_batch(name, settings, expected, targets):
    torch.manual_seed(1)
    inputs = torch.randn(7, 5)
    of_kind = {
        "classes": torch.tensor([0, 1, 2, 0, 0, -100, 2]),
        "probabilities": torch.rand(7, 3).softmax(1),
        "labels": (torch.rand(7, 3) > 0.5).float(),
    }[targets]
    expected = expected or partial(F.cross_entropy, **settings)
    plain = net()
    loss = expected(plain(inputs), of_kind)
    loss.backward()
    model = HybridModel(net(), cpu_world(2), chunks=3)
    ours = model.train_step(inputs, of_kind, partial(LOSSES[name], **settings)).loss
    torch.testing.assert_close(ours.as_subclass(torch.Tensor), loss.detach())
    for mine, theirs in zip(gradients(model.net), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_balanced_weights_are_inverse_to_the_frequency():
    labels = torch.tensor([0, 0, 0, 2, -100])
    weights = balanced_weights(labels, 3)
    assert weights.tolist() == pytest.approx([4 / 6, 1, 2])
    several = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert balanced_weights(several, 2).tolist() == pytest.approx([1 / 3, 3])


def test_a_loss_of_a_model_in_half_precision_is_computed_in_float32():
    logits = torch.randn(4, 3, dtype=torch.bfloat16)
    targets = torch.tensor([0, 1, 2, 1])
    loss = LOSSES["cross_entropy"](logits, targets)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float(), targets))


def metric(name, **settings):
    made = METRICS[name](**settings)
    made.to(torch.device("cpu"))
    made.reset()
    return made


def test_metrics_by_name_count_each_class_the_same_and_leave_out_ignored_targets():
    logits = torch.tensor([[3.0, 1, 0], [2, 1, 0], [0, 3, 1], [0, 1, 2], [9, 0, 0]])
    targets = torch.tensor([0, 0, 1, 1, -100])
    f1 = metric("f1", num_classes=3)
    f1.update({"logits": logits[:2]}, targets[:2])
    f1.update({"logits": logits[2:]}, targets[2:])
    # precision and recall: 1, 1; 1, 1/2; 0, -
    assert float(f1.compute()) == pytest.approx((1 + 2 / 3 + 0) / 3)
    per_class = metric("recall_per_class", num_classes=3)
    per_class.update(logits, targets)
    assert named_values("recall", per_class.compute(), ["a", "b", "c"]) == {
        "recall/a": 1, "recall/b": 0.5, "recall/c": 0,
    }  # fmt: skip
    confusion = metric("confusion", num_classes=3)
    confusion.update(logits, targets)
    values = named_values("confusion", confusion.compute(), ["a", "b", "c"])
    assert values["confusion/b/c"] == 1
    assert sum(values.values()) == 4


def test_words_with_several_classes_have_metrics_too():
    logits = torch.randn(2, 4, 3)
    targets = logits.argmax(-1)
    targets[0, 1] = -100
    for name in ("f1", "mcc"):
        made = metric(name, num_classes=3)
        made.update(logits, targets)
        assert float(made.compute()) > 0.6


def test_the_auc_is_that_of_the_probabilities():
    logits = torch.tensor([[0.0, 1], [0, 2], [0, -1], [0, 0.5]])
    auc = metric("auc", num_classes=2)
    auc.update(logits, torch.tensor([0, 1, 0, 1]))
    assert float(auc.compute()) == pytest.approx(0.75)
    several = metric("auc_per_class", num_classes=2, several=True)
    several.update(logits.T.contiguous().T, torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))
    assert named_values("auc", several.compute())["auc/1"] == pytest.approx(0.75)


def test_a_metric_without_a_number_of_classes_says_so():
    with pytest.raises(ConfigError, match="the metric f1 needs the number of classes"):
        METRICS["f1"]().reset()
    assert METRICS["f1"]().higher_is_better is True
    assert resolve(partial(LOSSES["cross_entropy"], label_smoothing=0.1)).has_class_targets


def test_class_weights_may_change_during_a_run():
    torch.manual_seed(1)
    x, t = torch.randn(7, 5), torch.tensor([0, 1, 2, 0, 0, -100, 2])
    loss_fn = nn.CrossEntropyLoss()
    model, plain = HybridModel(net(), cpu_world(2), chunks=3), net()
    for weight, ignored in ((None, -100), (WEIGHTS, -100), (WEIGHTS * 2, -100), (WEIGHTS * 2, 0)):
        loss_fn.weight, loss_fn.ignore_index = weight, ignored
        targets = t.clamp(min=0) if ignored == 0 else t
        for module in (model.net, plain):
            module.zero_grad()
        ours = model.train_step(x, targets, loss_fn).loss
        loss = loss_fn(plain(x), targets)
        loss.backward()
        torch.testing.assert_close(ours.as_subclass(torch.Tensor), loss.detach())
        torch.testing.assert_close(gradients(model.net), gradients(plain))
    loss_fn.reduction = "sum"
    with pytest.raises(ConfigError, match='reduction="sum"'):
        model.train_step(x, t, loss_fn)
