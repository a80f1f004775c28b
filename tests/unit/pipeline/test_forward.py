"""One process: a pipelined forward equals the net itself."""

import copy
from dataclasses import dataclass

import pytest
import torch
from support.compare import assert_same, copied, hybrid
from support.nets import CASES, DictToTuple, ToDict, floats
from torch import nn

from hybridtrain.data import EvalLoader
from hybridtrain.errors import BatchError
from hybridtrain.loop import predict

KINDS = [kind for kind in CASES if kind not in ("u_net", "tied_gpt")]

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nb_part", [1, 2, 3, 4])
@pytest.mark.quick_cases(3)
def test_the_forward_in_eval_mode_equals_the_net_itself(kind, nb_part):
    case = CASES[kind]
    net = case.net()
    if kind == "conv":  # running statistics worth the name
        for seed in range(3):
            net(case.batch(16, 50 + seed)[0])
    reference = copy.deepcopy(net).eval()
    model = hybrid(net, nb_part).eval()
    before = copy.deepcopy(model.state_dict())
    for rows in (10, 13, 2):
        inputs, _ = case.batch(rows, rows)
        output = model(copied(inputs))
        assert not output.requires_grad
        expected = reference(copied(inputs)).detach()
        # the kernels choose their blocks by the number of samples: the last bits differ
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert_same(model.state_dict(), before)


def test_the_forward_gives_back_pytrees_of_all_samples():
    net = nn.Sequential(ToDict(), DictToTuple())
    x = floats(10)
    h, (mask, none, skips), _ = hybrid(net).eval()(x)
    expected, (expected_mask, _, expected_skips), _ = net(x)
    torch.testing.assert_close(h, expected.detach())
    assert torch.equal(mask, expected_mask)
    assert none is None
    torch.testing.assert_close(skips["again"], expected_skips["again"].detach())


class Recurrent(nn.Module):
    """Returns what an LSTM returns, with the samples in dim 1 of its states."""

    def __init__(self, layers):
        super().__init__()
        self.inner = nn.LSTM(3, 6, layers, batch_first=True)

    def forward(self, x):
        y, (h, _) = self.inner(x)
        return {"y": y, "h": h}


def sequences(rows):
    return torch.rand(rows, 5, 3, generator=torch.Generator().manual_seed(0))


# as many layers as samples in a micro-batch, 2 with 8 rows, would be told by no shape
@pytest.mark.parametrize(("layers", "rows"), [(1, 8), (4, 8), (1, 10), (2, 10), (4, 10)])
def test_an_output_without_the_samples_in_dim_0_is_refused_by_name(layers, rows):
    model = hybrid(nn.Sequential(Recurrent(layers)), 1).eval()
    with pytest.raises(
        BatchError, match=r"output\['h'\] of a micro-batch with [23] samples has sh"
    ):
        model(sequences(rows))


def test_predictions_of_several_batches_need_the_samples_in_dim_0_too():
    model = hybrid(nn.Sequential(Recurrent(1)), 1, chunks=1)
    with torch.no_grad():  # an LSTM has other kernels there
        expected = model.net(sequences(8))
        for name, value in model(sequences(8)).items():  # one micro-batch is not joined
            assert torch.equal(value, expected[name])
    rows = [(row, 0) for row in sequences(8)]
    with pytest.raises(BatchError, match=r"output\['h'\]"):
        predict(model, EvalLoader(rows, 4, model.world))


@dataclass
class Parts:
    tokens: torch.Tensor
    loss: torch.Tensor
    number: int


class Flat(nn.Module):
    """Returns the tokens of all samples in one dimension, and the loss of the micro-batch."""

    def forward(self, x):
        return Parts(x.flatten(0, 1), x.mean(), 7)


def test_several_rows_a_sample_are_joined_and_a_loss_has_a_value_for_each_micro_batch():
    x = sequences(10)
    found = hybrid(nn.Sequential(nn.Identity(), Flat())).eval()(x)
    assert torch.equal(found.tokens, x.flatten(0, 1))
    assert torch.equal(found.loss, torch.stack([part.mean() for part in x.split([3, 3, 2, 2])]))
    assert found.number == 7


@pytest.mark.parametrize(
    "first",
    [
        lambda: nn.LSTM(3, 3),
        lambda: nn.TransformerEncoderLayer(3, 1, 4),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(3, 1, 4), 2, enable_nested_tensor=False
        ),
    ],
    ids=["lstm", "layer", "encoder"],
)
def test_a_first_layer_that_takes_the_samples_in_dim_1_is_refused_where_the_batch_is_cut(first):
    net = nn.Sequential(first())
    x = sequences(8)
    for run in (lambda m: m(x), lambda m: m.train_step(x, None, lambda y, _: y.mean())):
        with pytest.raises(BatchError, match=r"the first layer, '0', .*dim 1.*batch_first=True"):
            run(hybrid(net, 1))
    hybrid(net, 1, chunks=1).eval()(x)
