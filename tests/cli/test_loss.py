"""The loss of a run by its config: a name or a `_target_`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridtrain import loss as losses
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import build_loss
from hybridtrain.errors import ConfigError

MY_LOSSES = """
from torch.nn import functional as F
from hybridtrain.loss import SumLoss

def focal(output, targets, gamma=2.0):
    return gamma * F.cross_entropy(output, targets)

def make(factor):
    return SumLoss(lambda o, t: factor * o.sum(), lambda i, t: len(t))

summed = make(3)
"""


@pytest.fixture(autouse=True)
def my_losses(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(MY_LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def loss_of(text):
    return build_loss(compose_config([f"trainer.loss={text}", "allow_targets=[my_losses]"]))


OUTPUT, TARGETS = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])


@pytest.mark.parametrize(("text", "expected"), [
    ("nll", F.nll_loss(OUTPUT, TARGETS)),
    (
        "{_target_: torch.nn.CrossEntropyLoss, label_smoothing: 0.1, weight: [1, 2, 3]}",
        nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]), label_smoothing=0.1)(OUTPUT, TARGETS),
    ),
    (
        "{_target_: torch.nn.functional.cross_entropy, label_smoothing: 0.1}",
        F.cross_entropy(OUTPUT, TARGETS, label_smoothing=0.1),
    ),
    ("{_target_: my_losses.focal, gamma: 3.0}", 3 * F.cross_entropy(OUTPUT, TARGETS)),
    ("{_target_: my_losses.focal}", 2 * F.cross_entropy(OUTPUT, TARGETS)),
    ("{_target_: my_losses.make, factor: 2}", 2 * OUTPUT.sum()),
    ("{_target_: my_losses.summed}", 3 * OUTPUT.sum()),
])  # fmt: skip
@pytest.mark.quick_cases(1)
def test_a_loss_is_named_or_made_by_its_target(text, expected):
    torch.testing.assert_close(loss_of(text)(OUTPUT, TARGETS), expected)


@pytest.mark.parametrize(("text", "message"), [
    ("focal", "trainer.loss=focal is unknown"),
    ("{_target_: os.system}", "trainer.loss._target_=os.system is not allowed"),
    ("{_target_: torch.nn.CrossEntropyLos}", "did you mean CrossEntropyLoss"),
    ("{_target_: my_losses.focal, gama: 3.0}", "did you mean trainer.loss.gamma"),
    ("{_target_: torch.nn.CrossEntropyLoss, smoothing: 1}", "trainer.loss.smoothing: unknown key"),
])  # fmt: skip
@pytest.mark.quick_cases(1)
def test_a_mistake_names_its_key(text, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(text)


def test_accuracy_is_the_default_metric_where_the_targets_are_classes():
    assert losses.resolve(loss_of("{_target_: torch.nn.CrossEntropyLoss}")).has_class_targets
    assert losses.resolve(losses.nll).has_class_targets
    assert not losses.resolve(losses.model_output).has_class_targets
    assert not losses.resolve(losses.mse).has_class_targets
