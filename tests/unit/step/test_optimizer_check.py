"""A trainer says so if its optimizer is that of another model."""

import logging

import pytest
import torch
from support.training import plain_net, trainer
from torch import nn

from hybridtrain.errors import ConfigError
from hybridtrain.step.optimizer_step import check_optimizers


def test_a_head_that_is_replaced_during_training_is_one_line():
    net = plain_net()
    training = trainer(net, steps=4)

    def replace_head(run, samples):
        if run.step == 2:
            net[4] = nn.Linear(8, 3)

    training.recorder.on_step = replace_head
    with pytest.raises(ConfigError, match=r"4 was replaced .*make a new HybridModel"):
        training.fit()
    assert training.step == 2


def test_an_optimizer_of_another_model_is_refused():
    net = plain_net()
    others = torch.optim.SGD(plain_net().parameters(), lr=0.1)
    training = trainer(net, steps=2, optimizer=lambda _: others)
    with pytest.raises(ConfigError, match=r"holds 6 parameters .* not 0\.weight, 0\.bias"):
        training.fit()


def test_parameters_that_an_optimizer_leaves_out_are_a_warning(caplog):
    net = plain_net()
    with caplog.at_level(logging.WARNING):
        head = torch.optim.SGD(net[4].parameters(), lr=0.1)
        trainer(net, steps=1, optimizer=lambda _: head).fit()
    assert "leaves out 4 of 6 trainable parameters: 0.weight, 0.bias, 2.weight, ..." in caplog.text


def test_an_optimizer_of_all_parameters_is_no_warning(caplog):
    net = plain_net()
    net[0].requires_grad_(False)
    with caplog.at_level(logging.WARNING):
        trainer(net, steps=1).fit()
    assert "optimizer=" not in caplog.text


def head_alone(poison=None, **options):
    """A trainer whose optimizer holds the head alone; `poison` is a step with a NaN batch."""
    net = plain_net()
    training = trainer(
        net, optimizer=lambda _: torch.optim.SGD(net[4].parameters(), lr=0.1), **options
    )
    calls = []

    def poisoned(module, args):
        calls.append(None)
        return (args[0] * float("nan"),) if (len(calls) + 1) // 2 == poison else None

    net[0].register_forward_pre_hook(poisoned)
    return training


def test_one_bad_batch_costs_one_step_also_where_the_optimizer_leaves_parameters_out():
    training = head_alone(poison=2, steps=6)
    net = training.model.net
    before = net[4].weight.clone()
    # the search for the origin repeats the forward of the step, whose calls are counted too
    assert training.fit()["skipped_steps"] in (1, 2)
    assert not torch.equal(net[4].weight, before)


def test_parameters_that_are_left_out_do_not_count_in_the_norm_that_is_clipped():
    frozen = plain_net()
    for layer in frozen[:4]:
        layer.requires_grad_(False)
    norms = []
    for training in (head_alone(steps=4, clip_norm=0.1), trainer(frozen, steps=4, clip_norm=0.1)):
        training.optimizer.param_groups[0]["lr"] = 0.0
        training.fit()
        names = [key for key in training.recorder.values if key[1] == "train/grad_norm"]
        norms.append([training.recorder.values[key] for key in names])
    assert norms[0] == norms[1]


def test_a_stand_in_for_a_group_of_other_processes_is_no_foreign_parameter(caplog):
    model = trainer().model
    bias = dict(model.named_parameters())["0.bias"]
    held = [p for p in model.parameters() if p is not bias]
    optimizer = torch.optim.SGD([{"params": held}, {"params": [nn.Parameter(torch.empty(0))]}])
    assert check_optimizers(model, optimizer.param_groups) == [bias]


def test_parameters_that_are_freed_later_and_not_held_are_a_warning_then(caplog):
    net = plain_net()
    net[0].requires_grad_(False)
    training = trainer(
        net,
        steps=4,
        optimizer=lambda all: torch.optim.SGD([p for p in all if p.requires_grad], lr=0.1),
    )

    def free(run, samples):
        if run.step == 2:
            assert "leaves out" not in caplog.text
            net[0].requires_grad_(True)

    training.recorder.on_step = free
    with caplog.at_level(logging.WARNING):
        training.fit()
    assert "leaves out 2 of 6 trainable parameters: 0.weight, 0.bias" in caplog.text


def test_parameters_that_an_optimizer_is_given_later_are_trained_from_then_on():
    training = head_alone(steps=4)
    net = training.model.net
    before = net[0].weight.clone()

    def add(run, samples):
        if run.step == 2:
            assert torch.equal(net[0].weight, before)
            training.optimizer.add_param_group({"params": list(net[0].parameters())})

    training.recorder.on_step = add
    training.fit()
    assert not torch.equal(net[0].weight, before)
