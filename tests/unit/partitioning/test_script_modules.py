"""Models with a `torch.jit.ScriptModule`, which takes no hooks and copies its parameters anew."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridtrain import HybridModel
from hybridtrain.world import World


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.jit as a whole
        return torch.jit.script(module)


@pytest.mark.parametrize("split", ["size", "time", "balanced", "2"])
@pytest.mark.parametrize("make", [chain, Wrapped])
def test_a_scripted_layer_can_be_cut_and_its_costs_measured_and_no_gradient_is_left(make, split):
    net, plain = make(), make()
    body, prefix = (net, "") if make is chain else (net.body, "body.")
    body[2] = scripted(body[2])
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    options = {"split": [f"{prefix}2"] if split == "2" else split, "chunks": 2}
    world = World.from_env(2, devices="cpu")
    model = HybridModel(net, world, example_inputs=x, **options)
    assert f"{prefix}2" in [name for names in model.plan.layer_names for name in names]
    assert all(parameter.grad is None for parameter in net.parameters())
    model.train_step(x, y, F.cross_entropy)
    F.cross_entropy(plain(x), y).backward()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
