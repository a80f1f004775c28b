"""A batch, a loss or an option that does not fit is refused with the reason."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import hybrid
from support.engine import in_time
from torch import nn

from hybridtrain.errors import BatchError, UserError


def two_layers():
    return hybrid(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), chunks=2)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (lambda o, t: (o - t) ** 2, BatchError, r"loss_fn must return a 0-dim tensor, the mean"),
        (lambda o, t: 3.0, BatchError, r"loss_fn must return a 0-dim tensor.*not 3\.0"),
        (lambda o, t: None, BatchError, r"0-dim tensor.*not None"),
        (lambda o, t: (o.detach() - t).mean(), UserError, r"depends on no trainable parameter"),
        (lambda o, t: t.mean(), UserError, r"depends on no trainable parameter"),
    ],
)
def test_a_wrong_loss_says_what_it_must_be(loss_fn, error, message):
    model = two_layers()
    outcome = in_time(lambda: model.train_step(torch.randn(4, 4), torch.randn(4, 2), loss_fn))
    with pytest.raises(error, match=message):
        raise outcome["error"]
    assert "micro-batch 0 on stage 1 (1)" in "\n".join(outcome["error"].__notes__)


def test_a_frozen_model_cannot_be_trained_and_says_so():
    model = two_layers()
    model.net.requires_grad_(False)
    outcome = in_time(lambda: model.train_step(torch.randn(4, 4), torch.randn(4, 2), F.mse_loss))
    with pytest.raises(UserError, match="depends on no trainable parameter"):
        raise outcome["error"]


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.randn(4, 4), torch.randn(3, 2), r"shape \(3, 2\), others have 4"),
        (torch.randn(4, 4), {"y": torch.randn(5)}, r"batch\['y'\] has shape \(5,\)"),
        (torch.randn(0, 4), torch.randn(0, 2), r"at least one"),
        (None, None, r"at least one tensor"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused_before_anything_runs(
    inputs, targets, message
):
    model = two_layers()
    with pytest.raises(BatchError, match=message):
        model.train_step(inputs, targets, F.mse_loss)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inputs_of_the_wrong_width_name_the_layer_and_what_it_was_given():
    model = two_layers()
    outcome = in_time(lambda: model.train_step(torch.randn(4, 5), torch.randn(4, 2), F.mse_loss))
    assert isinstance(outcome["error"], RuntimeError)
    notes = "\n".join(outcome["error"].__notes__)
    assert "in layer '0', with the input float32[2, 5]" in notes
    assert "in the forward of micro-batch 0 on stage 0 (0)" in notes


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunks": 0}, r"chunks=0 must be a "),
        ({"schedule": "pipe"}, r"schedule=pipe is unknown: .*gpipe"),
        ({"recompute": "some"}, r"recompute=some is unknown: use never, "),
        ({"precision": "fp8"}, r"precision=fp8 is unknown: .*: fp32, bf16"),
        ({"split": [3, 3]}, r"add up to the model's 2 layers"),
    ],
)
def test_a_wrong_option_is_named_with_the_choices(option, message):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(UserError, match=message):
        hybrid(net, **option)
