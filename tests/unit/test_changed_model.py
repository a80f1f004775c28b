"""A model that is changed after it was wrapped: the next step is that of the model as it is."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from support.compare import CLOSE, assert_same_gradients, grads, hybrid, plain_step
from support.nets import (
    CLASSES,
    WIDTH,
    TanhLinear,
    classification,
    regression,
    tied_gpt,
    token_loss,
    tokens,
)
from torch import nn

from hybridtrain.errors import ConfigError
from hybridtrain.pipeline.model_watch import Kind, ModelWatch
from hybridtrain.planning import Planner

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


def chain():
    torch.manual_seed(0)
    return nn.Sequential(TanhLinear(), TanhLinear(), nn.Linear(WIDTH, 4), nn.Linear(4, 4))


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = TanhLinear()
        self.body = nn.ModuleList([TanhLinear() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = x + block(x)
        return self.head(x)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


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
def test_a_replaced_head_is_trained_and_run_from_the_next_step_on(nb_part, caplog):
    net = chain()
    model = hybrid(net, nb_part)
    x, _ = regression(10)
    model.train_step(x, x[:, :4], F.mse_loss)
    net[3] = nn.Linear(4, CLASSES)
    with caplog.at_level(logging.WARNING):
        assert_follows(model, net, classification(10), F.cross_entropy)
    assert "3 was replaced (Linear(in_features=4, out_features=4" in caplog.text
    assert "an optimizer that was made before" in caplog.text
    assert model.rng.step == 3


def test_an_evaluation_follows_as_well():
    net = chain()
    model = hybrid(net, 2)
    x, _ = regression(8)
    model(x)
    net[0] = TanhLinear()
    assert torch.equal(model(x), torch.cat([net(part) for part in x.split(2)]))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_head_of_a_traced_model_may_be_replaced(checkpoint):
    torch.manual_seed(0)
    net = Traced()
    batch = regression(8)
    model = hybrid(net, 2, checkpoint=checkpoint)
    model.train_step(*batch, F.mse_loss)
    net.head = nn.Linear(WIDTH, WIDTH)
    assert_follows(model, net, batch)


def test_adapters_that_are_put_into_a_wrapped_model_are_trained():
    torch.manual_seed(0)
    net = Traced()
    batch = regression(8)
    model = hybrid(net, 2)
    model.train_step(*batch, F.mse_loss)
    net.requires_grad_(False)
    for block in net.body:
        block.linear = LoRA(block.linear)
    assert_follows(model, net, batch)
    got = {name for name, gradient in grads(net).items() if gradient is not None}
    assert got == {f"body.{i}.linear.{part}.weight" for i in range(4) for part in ("down", "up")}


class Scaled(TanhLinear):
    def forward(self, x):
        return super().forward(x) * getattr(self, "scale", 1.0)


def test_a_new_parameter_is_trained_and_a_removed_one_is_not_missed():
    net = chain()
    net[0] = Scaled()
    model = hybrid(net, 2)
    x, _ = regression(8)
    batch = x, x[:, :4]
    model.train_step(*batch, F.mse_loss)
    net[0].register_parameter("scale", nn.Parameter(torch.full((WIDTH,), 0.5)))
    assert_follows(model, net, batch)
    assert net[0].scale.grad is not None
    del net[0].scale
    assert_follows(model, net, batch)


@pytest.mark.parametrize("nb_part", [1, 2])
def test_with_one_replica_parameters_may_be_frozen_and_freed_between_steps(nb_part):
    net = tied_gpt()
    model = hybrid(net, nb_part)
    pipeline = model.pipeline
    for trains in (True, False, True):
        net[0].weight.requires_grad_(trains)  # the head has it too, in another stage
        net[1].requires_grad_(not trains)
        assert_follows(model, net, tokens(8), token_loss, **CLOSE)
        assert (net[0].weight.grad is None) is not trains
    assert model.pipeline is pipeline


def test_another_dtype_is_followed_in_tied_parameters_too():
    net = tied_gpt()
    model = hybrid(net, 2)
    model.train_step(*tokens(8), token_loss)
    net.double()
    assert_follows(model, net, tokens(8), token_loss, **CLOSE)
    assert net[0].weight.grad.dtype == torch.float64


def test_other_memory_of_the_same_kind_is_followed_without_a_rebuild():
    net = tied_gpt()
    model = hybrid(net, 2)
    model.train_step(*tokens(8), token_loss)
    pipeline = model.pipeline
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5
    assert_follows(model, net, tokens(8), token_loss, **CLOSE)
    assert model.pipeline is pipeline


def test_deferred_statistics_are_collected_once_after_a_change():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    net, fresh = make(), make()
    model = hybrid(net, 2, batch_norm="deferred")
    net[2] = fresh[2]
    fresh_model = hybrid(copy.deepcopy(fresh), 2, batch_norm="deferred")
    x, _ = regression(10)
    for each in (model, fresh_model):
        each.train_step(x, x[:, :4], F.mse_loss)
    assert torch.equal(net[1].running_mean, fresh_model.net[1].running_mean)
    assert torch.equal(net[1].running_var, fresh_model.net[1].running_var)


def test_layers_that_come_and_go_belong_to_the_stage_around_them():
    net = chain()
    model = hybrid(net, 2)
    x, _ = regression(8)
    net.append(nn.Linear(4, 4))
    assert_follows(model, net, (x, x[:, :4]))
    assert model.plan.layer_names == [["0", "1"], ["2", "3", "4"]]
    net.insert(0, nn.Identity())
    assert_follows(model, net, (x, x[:, :4]))
    assert [len(stage.layers) for stage in model.stages] == [2, 4]


def test_a_searched_order_stays_and_nothing_is_measured_again(monkeypatch):
    net = chain()
    x, _ = regression(8)
    model = hybrid(net, 2, schedule="search", example_inputs=x)
    order, in_flight = model.schedule(4), model.plan.in_flight
    assert model.plan.order

    def measured(*_, **__):
        raise AssertionError("the processes would measure different times")

    monkeypatch.setattr(Planner, "_with_times", measured)
    net.append(nn.Linear(4, 4))
    assert_follows(model, net, (x, x[:, :4]))
    assert model.plan.layer_names == [["0", "1"], ["2", "3", "4"]]
    assert model.schedule(4) == order
    assert model.plan.in_flight == in_flight


def test_a_stage_that_cannot_begin_where_it_did_is_one_line_that_names_the_change():
    net = chain()
    model = hybrid(net, 2)
    del net[3], net[2]
    with pytest.raises(ConfigError, match=r"2 is gone \(Lin.*cannot begin at 2 any more: make"):
        model.train_step(*regression(8), F.mse_loss)
    net.append(TanhLinear())
    assert_follows(model, net, regression(8))


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
    pipeline = model.pipeline
    for _ in range(3):
        model.train_step(*regression(8), F.mse_loss)
    assert model.pipeline is pipeline
    net[1] = TanhLinear()
    model.train_step(*regression(8), F.mse_loss)
    assert net[1].linear.weight.grad is not None


def test_a_change_is_named():
    net = chain()
    watch = ModelWatch(net)
    assert watch.change() is None
    net[2].weight.requires_grad_(False)
    assert watch.change() == (Kind.FROZEN, "requires_grad of 2.weight has changed")
    net.to(torch.bfloat16)
    what = "0.linear.weight is now bfloat16 on cpu, not float32 on cpu"
    assert watch.change() == (Kind.MOVED, what)
    del net[1].linear.bias
    what = f"1.linear.bias is gone (a parameter of shape [{WIDTH}])"
    assert watch.change() == (Kind.REPLACED, what)


def test_a_module_that_is_replaced_inside_whole_weights_is_followed_where_there_is_one_replica():
    model, x = hybrid(chain()), torch.randn(6, WIDTH)
    with model.whole_weights():
        model(x)
        model.net[3] = nn.Linear(4, 4)
        torch.testing.assert_close(model(x), model.net(x).detach())
