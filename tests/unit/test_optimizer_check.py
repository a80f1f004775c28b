"""A trainer says so if its optimizer is that of another model."""

import logging

import pytest
import torch
from support.training import plain_net, trainer
from torch import nn

from hybridtrain.errors import ConfigError


def test_a_head_that_is_replaced_after_the_optimizer_is_refused_before_the_next_step():
    net = plain_net()
    training = trainer(net, steps=2)
    net[4] = nn.Linear(8, 3)
    with pytest.raises(ConfigError, match=r"holds 2 parameters .* not 4\.weight, 4\.bias.*anew"):
        training.fit()


def test_a_head_that_is_replaced_during_training_is_refused_too():
    net = plain_net()
    training = trainer(net, steps=4)

    def replace_head(step, samples):
        if step == 2:
            net[4] = nn.Linear(8, 3)

    training.monitor.step = replace_head
    with pytest.raises(ConfigError, match=r"not 4\.weight, 4\.bias"):
        training.fit()
    assert training.step == 2


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
