"""torch.export traces the models that torch.fx cannot follow."""

import copy

import pytest
import torch
from support.traced import Shapes, assert_same, hybrid, loss_of, names, sequences


@pytest.fixture(autouse=True)
def _seeded(one_intra_op_thread):
    torch.manual_seed(0)


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
def test_a_model_may_be_created_and_called_without_gradients_before_it_is_trained(grad):
    net = Shapes()
    with grad():
        model = hybrid(net, 2, example_inputs=sequences())
        model(sequences())
    model.train_step(sequences(), None, loss_of)
    assert net.first.weight.grad is not None
