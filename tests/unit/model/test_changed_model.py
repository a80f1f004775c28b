"""A model that is changed after it was wrapped: freezing is followed, all else is one line."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support.compare import CLOSE, assert_same_gradients, hybrid, plain_step
from support.nets import WIDTH, TanhLinear, regression, tied_gpt, token_loss, tokens
from torch import nn

from hybridtrain.errors import ConfigError
from hybridtrain.pipeline.model_watch import ModelWatch

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def chain():
    torch.manual_seed(0)
    return nn.Sequential(TanhLinear(), TanhLinear(), nn.Linear(WIDTH, 4), nn.Linear(4, 4))


def assert_follows(model, net, batch, loss=F.mse_loss, **tolerance):
    """The next steps and forwards are those of `net` as it is now."""
    plain = copy.deepcopy(net)
    for each in (net, plain):
        each.zero_grad()
    plain_step(plain, *batch, loss)
    model.train_step(*batch, loss)
    assert_same_gradients(net, plain, **tolerance)
    output = torch.cat([net(part) for part in batch[0].tensor_split(model.options.chunks)])
    assert torch.equal(model(batch[0]), output)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_with_one_replica_parameters_may_be_frozen_and_freed_between_steps(nb_part):
    net = tied_gpt()
    model = hybrid(net, nb_part)
    for trains in (True, False, True):
        net[0].weight.requires_grad_(trains)  # the head has it too, in another stage
        net[1].requires_grad_(not trains)
        assert_follows(model, net, tokens(8), token_loss, **CLOSE)
        assert (net[0].weight.grad is None) is not trains
    assert model.changes == 3


def replace_head(net):
    net[3] = nn.Linear(4, 4)


def append(net):
    net.append(nn.Linear(4, 4))


def convert(net):
    net.double()


def remove_bias(net):
    del net[1].linear.bias


CHANGES = {
    r"3 was replaced \(Linear\(in_features=4.* by Linear\(in_features=4": replace_head,
    r"4 is new \(Linear\(": append,
    "0.linear.weight is now float64 on cpu, not float32 on cpu": convert,
    r"1.linear.bias is gone \(a parameter of shape": remove_bias,
}


@pytest.mark.parametrize("trains", [True, False], ids=["train_step", "forward"])
@pytest.mark.parametrize("message", CHANGES)
def test_another_change_is_one_line_that_names_it(message, trains):
    net = chain()
    model = hybrid(net, 2)
    x, _ = regression(8)
    model.train_step(x, x[:, :4], F.mse_loss)
    CHANGES[message](net)
    with pytest.raises(ConfigError, match=message + ".*HybridModel.*optimizer"):
        model.train_step(x, x[:, :4], F.mse_loss) if trains else model(x)


def test_other_memory_of_the_same_kind_is_followed():
    net = tied_gpt()
    model = hybrid(net, 2)
    model.train_step(*tokens(8), token_loss)
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5
    assert_follows(model, net, tokens(8), token_loss, **CLOSE)


def test_what_a_forward_replaces_itself_is_no_change():
    class Averaged(TanhLinear):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

        def forward(self, x):
            y = super().forward(x)
            self.mean = nn.Parameter(0.9 * self.mean + y.detach().mean(0), requires_grad=False)
            return y + self.mean

    torch.manual_seed(0)
    net = nn.Sequential(Averaged(), TanhLinear())
    model = hybrid(net, 2)
    for _ in range(3):
        model.train_step(*regression(8), F.mse_loss)
    assert model.changes == 0


def test_frozen_parameters_are_named():
    net = chain()
    watch = ModelWatch(net)
    assert watch.frozen_or_freed() == []
    net[2].requires_grad_(False)
    assert watch.frozen_or_freed() == ["2.weight", "2.bias"]
