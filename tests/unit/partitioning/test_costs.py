"""The costs that need no run: parameters, and the bytes of weights, gradients and optimizer."""

import pytest
import torch
from torch import nn

from hybridtrain.graph import layers_of
from hybridtrain.partitioning.costs import count


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_counted_with_gradients_and_optimizer_state_on_any_device(device):
    net = nn.Sequential(
        nn.Linear(3, 5, device=device),
        nn.BatchNorm1d(5, device=device),
        nn.ReLU(),
        nn.Linear(5, 2, bias=False, device=device, dtype=torch.float64),
    )
    costs = count(layers_of(net))
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert [cost.parameters for cost in costs] == [20, 10, 0, 10]
    buffers = 2 * 5 * 4 + 8  # the running mean and variance, and how many batches
    assert [cost.weight_bytes for cost in costs] == [20 * 16, 10 * 16 + buffers, 0, 10 * 32]
    assert all(
        cost.forward_ms == cost.activation_bytes == cost.crossing_bytes == 0 for cost in costs
    )


def test_frozen_parameters_have_no_gradient_and_no_state():
    layer = nn.Linear(3, 5)
    layer.bias.requires_grad_(False)
    chain = layers_of(nn.Sequential(layer))
    assert count(chain)[0].weight_bytes == 15 * 16 + 5 * 4
    assert count(chain, optimizer_tensors_per_param=0)[0].weight_bytes == 15 * 8 + 5 * 4
    assert count(chain, optimizer_tensors_per_param=1)[0].weight_bytes == 15 * 12 + 5 * 4


def test_what_layers_share_counts_in_the_first_of_them():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    mask = torch.ones(7)
    net[0].register_buffer("mask", mask)
    net[2].register_buffer("mask", mask)
    costs = count(layers_of(net))
    assert [cost.parameters for cost in costs] == [20, 0, 4]
    assert [cost.weight_bytes for cost in costs] == [20 * 16 + 28, 0, 4 * 16]
