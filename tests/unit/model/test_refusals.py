"""A batch, a loss or an option that does not fit is refused with the reason."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import hybrid
from support.engine import in_time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain import Session, Trainer, World
from hybridtrain.data import TrainLoader
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


SCALE = torch.full((4,), 0.5, requires_grad=True)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return super().forward(x * self.scale)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.quick_cases("never-1f1b", "always-zb-h1")
def test_inputs_with_a_graph_are_refused_and_train_detached_or_computed_in_the_model(
    recompute, schedule
):
    inputs, targets = torch.randn(4, 4), torch.randn(4, 2)

    def model(first):
        net = nn.Sequential(first, nn.Linear(4, 2))
        return hybrid(net, chunks=2, recompute=recompute, schedule=schedule)

    for _ in range(2):
        with pytest.raises(BatchError, match=r"^inputs was computed .*MulBackward0.*inputs\.det"):
            model(nn.Linear(4, 4)).train_step(inputs * SCALE, targets, F.mse_loss)
    nested = {"t": [targets * SCALE[:2]]}
    with pytest.raises(BatchError, match=r"^targets\['t'\]\[0\] was computed"):
        model(nn.Linear(4, 4)).train_step(inputs, nested, lambda o, t: F.mse_loss(o, t["t"][0]))
    model(nn.Linear(4, 4)).train_step((inputs * SCALE).detach(), targets, F.mse_loss)
    model(Scaled()).train_step(inputs, targets, F.mse_loss)
    leaf = inputs.clone().requires_grad_()
    model(nn.Linear(4, 4)).train_step(leaf, targets, F.mse_loss)
    assert leaf.grad.abs().sum() > 0


def test_a_session_and_a_trainer_refuse_inputs_with_a_graph():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    world = World.from_env(nb_part=2, devices="cpu")
    session = Session(world=world, chunks=2)
    data = TensorDataset(torch.randn(4, 4), torch.randn(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(net, optimizer, DataLoader(data, batch_size=4))
    for inputs, targets in loader:
        with pytest.raises(BatchError, match="inputs was computed"):
            session.forward_backward(inputs * SCALE, targets, F.mse_loss)
        session.forward_backward(inputs, targets, F.mse_loss)

    class WithGraph(TensorDataset):
        def __getitem__(self, index):
            inputs, targets = super().__getitem__(index)
            return inputs * SCALE, targets

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = TrainLoader(WithGraph(*data.tensors), 4, model.world)
    with pytest.raises(BatchError, match="inputs was computed"):
        Trainer(model, optimizer, F.mse_loss, train, steps=1).fit()
