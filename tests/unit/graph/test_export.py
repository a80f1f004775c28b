"""torch.export traces the models that torch.fx cannot follow."""

import copy

import pytest
import torch
from support.traced import (
    WIDTH,
    Shapes,
    assert_same,
    hybrid,
    linear,
    loss_of,
    names,
    samples,
    sequences,
)
from torch import nn

from hybridtrain.graph import ChainBuilder

pytestmark = pytest.mark.usefixtures("seeded")


def test_torch_export_follows_where_torch_fx_cannot(capfd):
    inputs = {"x": sequences(), "mask": (sequences()[..., 0] > 0).float()}
    model = assert_same(Shapes(), inputs, 2, example_inputs=inputs)
    assert names(model) == ["first", "second", "drop"]
    assert capfd.readouterr() == ("", "")


def test_exported_models_take_batches_of_any_size_and_sequences_of_any_length():
    net = Shapes()
    whole = copy.deepcopy(net).eval()
    model = hybrid(net, 2, example_inputs=sequences()).eval()
    for given in (sequences()[:1], sequences()[:4], sequences(3), sequences(9)):
        torch.testing.assert_close(model(given)["out"], whole(given)["out"])


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.quick_cases(1)
def test_a_model_may_be_created_and_called_without_gradients_before_it_is_trained(grad):
    net = Shapes()
    with grad():
        model = hybrid(net, 2, example_inputs=sequences())
        model(sequences())
    model.train_step(sequences(), None, loss_of)
    assert net.first.weight.grad is not None


class BranchesInEvaluation(Shapes):
    def forward(self, x):
        if not self.training and x.shape[1] > 5:
            return super().forward(x * 100)
        return super().forward(x)


@pytest.mark.thorough
def test_conditions_on_sizes_in_evaluation_alone_count_in_evaluation():
    net = BranchesInEvaluation()
    whole = copy.deepcopy(net).eval()
    model = hybrid(net, 2, example_inputs=sequences(5))
    model.train_step(sequences(9), None, loss_of)
    model.eval()
    for length in (3, 9, 4):
        inputs = sequences(length)
        torch.testing.assert_close(model(inputs)["out"], whole(inputs)["out"])


class Norms(nn.Module):
    """With a batch norm and a buffer that the forward changes; torch.fx cannot follow all of it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = linear(), nn.BatchNorm1d(WIDTH), linear()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        x = self.first(x)
        if x.dim() == 3:
            x = x.flatten(0, 1)
        return self.last(self.norm(x))


@pytest.mark.thorough
def test_a_batch_norm_that_torch_export_would_lose_is_traced_and_no_buffer_changes_meanwhile():
    net = Norms()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    ChainBuilder(net, samples()).chain()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert_same(net, samples(), 2, example_inputs=samples())
