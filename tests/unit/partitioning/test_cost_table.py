"""Measured costs of a chain: between two sizes, and beside other devices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hybridtrain._base.hardware import Hardware
from hybridtrain.models import gpt
from hybridtrain.partitioning import (
    LayerCost,
    cost_table,
    measured_costs,
    observed_chain,
)
from hybridtrain.partitioning.measurements import LayerProfiler
from hybridtrain.price import Choices, StepWork, find_plans

CPU = torch.device("cpu")
MACHINE = Hardware(device="cpu", devices_per_node=2, flops_per_s={"fp32": 1e10}, operator_s=0.0)
TOKENS = torch.zeros(4, 8, dtype=torch.long)


def test_what_layers_lose_to_other_devices_is_on_a_straight_line(monkeypatch):
    class Stub:
        def __init__(self, layers, inputs, devices, **_):
            self.samples = len(inputs)
            assert devices == [CPU, CPU]

        def repeat(self, seconds):
            pass

        def costs(self):
            return [LayerCost("0", 1, 1.0 * self.samples, 3.0 * self.samples)]

        def contention(self):
            return {2: 4.0, 4: 2.0}[self.samples]

    monkeypatch.setattr(cost_table, "LayerProfiler", Stub)
    net = nn.Sequential(nn.Linear(2, 2))
    chain = observed_chain(net, torch.zeros(4, 2))
    table = measured_costs(chain, torch.zeros(4, 2), CPU, "fp32", sharing=2)
    # 2 samples: 8 ms, and 24 are lost; 4 samples: 16 ms, and 16 are lost
    assert [table.contention_at(n) for n in (2, 4)] == [4.0, 2.0]
    assert table.contention_at(3) == pytest.approx(1 + 20 / 12)
    assert table.costs_at(4)[0].backward_ms == 12.0


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_run_at_one_time_are_left_as_they_were(devices):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    layers = observed_chain(net, torch.zeros(4, 4)).layers
    before = copy.deepcopy(net.state_dict())
    profiler = LayerProfiler(layers, torch.randn(4, 4), [CPU] * devices)
    draws = torch.get_rng_state()
    factor = profiler.contention()
    assert factor == 1.0 if devices == 1 else factor >= 1.0
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_plans_of_a_model_without_values_can_be_measured():
    with torch.device("meta"):
        net = gpt(64, 8, n_layer=3, d_model=16)
    plans = find_plans(
        net, TOKENS, MACHINE, StepWork(4), choices=Choices(nb_part=[2]), costs="measured"
    )
    assert plans.table.costs_from == "measured"
    assert plans.prices[0].step_ms > 0
    assert all(p.is_meta for p in net.parameters())
