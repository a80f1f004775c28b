"""Stages on several devices, where an operation on tensors of two of them is an error."""

import pytest
import torch
from support.compare import CLOSE
from support.stand_in_gpus import on_host, stand_in_gpus
from torch import nn
from torch.nn import functional as F

from hybridtrain import pipelined

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        x = self.first(x).tanh()
        logits = self.last(x + self.middle(x).tanh())  # a value that skips the middle
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "out": logits}


def backward(net, x, labels, step):
    output = net(x, labels=labels)
    loss = output["loss"]
    if step == 2:
        loss = loss + output["out"].square().mean()
    loss.backward()


def test_both_forms_an_evaluation_and_calls_of_single_layers():
    g = torch.Generator().manual_seed(0)
    x, labels = torch.randn(7, 6, generator=g), torch.randint(3, (7,), generator=g)
    plain, net = Net(), Net()
    with stand_in_gpus(2) as gpus:
        model = pipelined(net, devices=[str(d) for d in gpus.devices], chunks=3, split=[1, 2])
        for step in range(4):
            backward(model, x, labels, step)
        gradients = {name: on_host(p.grad) for name, p in model.named_parameters()}
        model.eval()
        with torch.no_grad():
            out = on_host(model(x)["out"])
            of_layers = on_host(model.last(model.first(x)))
    for step in range(4):
        backward(plain, x, labels, step)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(gradients, expected, **CLOSE)
    torch.testing.assert_close(out, plain(x)["out"].detach(), **CLOSE)
    torch.testing.assert_close(of_layers, plain.last(plain.first(x)).detach(), **CLOSE)
