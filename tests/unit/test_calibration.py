"""Estimated costs that the measurement of one layer corrects."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hybridtrain.graph.chain import ChainBuilder
from hybridtrain.machine import Machine
from hybridtrain.models import gpt
from hybridtrain.planning import LayerCost, calibration, cost_table
from hybridtrain.planning.calibration import calibrated_costs
from hybridtrain.planning.cost_table import counted_costs, measured_costs
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.priced import find_plans
from hybridtrain.planning.profiler import LayerProfiler

CPU = torch.device("cpu")
MACHINE = Machine(device="cpu", devices_per_node=2, flops_per_s={"fp32": 1e10}, operator_s=0.0)
TOKENS = torch.zeros(4, 8, dtype=torch.long)


class Profiler:
    """Gives layers the times that a test wants."""

    def __init__(self, layers, inputs, devices, **_):
        self.layers, self.inputs = layers, inputs
        self.run = Profiler.made = self

    def repeat(self, seconds):
        pass

    def contention(self):
        return 1.0

    def costs(self):
        return [LayerCost(layer.name, 1, 70.0, 110.0) for layer in self.layers]


@pytest.fixture
def block(monkeypatch):
    """A GPT whose vocabulary is its largest layer, and the profiler of its calibration."""
    monkeypatch.setattr(calibration, "LayerProfiler", Profiler)
    net = gpt(64, 8, n_layer=5, d_model=32)
    return ChainBuilder(net, TOKENS).chain()


def test_the_layer_that_is_measured_has_its_measured_times_and_equal_layers_too(block):
    table = calibrated_costs(block, TOKENS, MACHINE, CPU, "fp32")
    assert [layer.name for layer in Profiler.made.layers] == ["blocks.0"]
    assert Profiler.made.inputs.shape == (4, 8, 32)
    assert Profiler.made.inputs.requires_grad
    assert table.costs_from == "calibrated"
    plain = counted_costs(block, TOKENS, MACHINE, "fp32").costs_at(4)
    costs = table.costs_at(4)
    for cost in costs[1:6]:
        assert (cost.forward_ms, cost.backward_ms) == (pytest.approx(70), pytest.approx(110))
    for cost, before in ((costs[0], plain[0]), (costs[-1], plain[-1])):
        assert cost.forward_ms / before.forward_ms == pytest.approx(70 / plain[1].forward_ms)
        assert cost.backward_ms / before.backward_ms == pytest.approx(110 / plain[1].backward_ms)
    assert [c.activation_bytes for c in costs] == [c.activation_bytes for c in plain]


def test_a_host_that_is_slower_than_the_device_is_calibrated_as_well(block):
    slow = Machine(device="cpu", flops_per_s={"fp32": 1e18}, operator_s=1e-3)
    cost = calibrated_costs(block, TOKENS, slow, CPU, "fp32").costs_at(4)[1]
    assert (cost.forward_ms, cost.backward_ms) == (pytest.approx(70), pytest.approx(110))


def test_many_equal_layers_stand_for_a_model_rather_than_one_that_is_larger(monkeypatch):
    monkeypatch.setattr(calibration, "LayerProfiler", Profiler)
    small = [nn.Linear(64, 64) for _ in range(8)]
    net = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), *small)
    chain = ChainBuilder(net, torch.zeros(4, 64)).chain()
    calibrated_costs(chain, torch.zeros(4, 64), MACHINE, CPU, "fp32")
    assert [layer.name for layer in Profiler.made.layers] == ["2"]


def test_what_layers_lose_to_other_devices_is_on_a_straight_line(monkeypatch):
    class Stub(Profiler):
        def __init__(self, layers, inputs, devices, **_):
            super().__init__(layers, inputs, devices)
            self.samples = len(inputs)
            assert devices == [CPU, CPU]

        def costs(self):
            return [LayerCost("0", 1, 1.0 * self.samples, 3.0 * self.samples)]

        def contention(self):
            return {1: 3.0, 4: 2.0}[self.samples]

    monkeypatch.setattr(cost_table, "LayerProfiler", Stub)
    net = nn.Sequential(nn.Linear(2, 2))
    chain = ChainBuilder(net, torch.zeros(4, 2)).chain()
    table = measured_costs(chain, torch.zeros(4, 2), CPU, "fp32", sharing=2)
    # 1 sample: 4 ms, and 8 are lost; 4 samples: 16 ms, and 16 are lost
    assert [table.contention_at(n) for n in (1, 4)] == [3.0, 2.0]
    assert table.contention_at(7) == pytest.approx(1 + 24 / 28)
    assert table.costs_at(4)[0].backward_ms == 12.0


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_run_at_one_time_are_left_as_they_were(devices):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    layers = ChainBuilder(net, torch.zeros(4, 4)).chain().layers
    before = copy.deepcopy(net.state_dict())
    profiler = LayerProfiler(layers, torch.randn(4, 4), [CPU] * devices)
    draws = torch.get_rng_state()
    factor = profiler.contention()
    assert factor == 1.0 if devices == 1 else factor >= 1.0
    assert torch.equal(torch.get_rng_state(), draws)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_plans_of_a_model_without_values_can_be_calibrated():
    with torch.device("meta"):
        net = gpt(64, 8, n_layer=3, d_model=16)
    plans = find_plans(
        net, TOKENS, MACHINE, Job(4), choices=Choices(nb_part=[2]), costs="calibrated"
    )
    assert plans.table.costs_from == "calibrated"
    assert plans.prices[0].step_ms > 0
    assert all(p.is_meta for p in net.parameters())
