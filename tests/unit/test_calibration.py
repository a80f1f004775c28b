"""Estimated costs that the measurement of one layer corrects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtrain.graph.chain import ChainBuilder
from hybridtrain.machine import Machine
from hybridtrain.models import gpt
from hybridtrain.planning import LayerCost, calibration
from hybridtrain.planning.calibration import calibrate
from hybridtrain.planning.cost_table import counted_costs
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.priced import find_plans

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

    def costs(self):
        return [LayerCost(layer.name, 1, 70.0, 110.0) for layer in self.layers]


@pytest.fixture
def block(monkeypatch):
    """A GPT whose vocabulary is its largest layer, and the profiler of its calibration."""
    monkeypatch.setattr(calibration, "LayerProfiler", Profiler)
    net = gpt(64, 8, n_layer=5, d_model=32)
    return ChainBuilder(net, TOKENS).chain()


def test_the_layer_that_is_measured_has_its_measured_times_and_equal_layers_too(block):
    factors = calibrate(block.layers, TOKENS, MACHINE, CPU, "fp32")
    assert [layer.name for layer in Profiler.made.layers] == ["blocks.0"]
    assert Profiler.made.inputs.shape == (4, 8, 32)
    assert Profiler.made.inputs.requires_grad
    plain = counted_costs(block, TOKENS, MACHINE, "fp32").costs_at(4)
    table = counted_costs(block, TOKENS, MACHINE, "fp32", calibration=factors)
    costs = table.costs_at(4)
    assert table.costs_from == "calibrated"
    for cost in costs[1:6]:
        assert (cost.forward_ms, cost.backward_ms) == (pytest.approx(70), pytest.approx(110))
    assert costs[0].forward_ms / plain[0].forward_ms == pytest.approx(factors.forward)
    assert costs[-1].backward_ms / plain[-1].backward_ms == pytest.approx(factors.backward)
    assert [c.activation_bytes for c in costs] == [c.activation_bytes for c in plain]


def test_a_host_that_is_slower_than_the_device_is_calibrated_as_well(block):
    slow = Machine(device="cpu", flops_per_s={"fp32": 1e18}, operator_s=1e-3)
    factors = calibrate(block.layers, TOKENS, slow, CPU, "fp32")
    table = counted_costs(block, TOKENS, slow, "fp32", calibration=factors)
    assert table.host_ms[1] == (pytest.approx(70), pytest.approx(110))


def test_many_equal_layers_stand_for_a_model_rather_than_one_that_is_larger(monkeypatch):
    monkeypatch.setattr(calibration, "LayerProfiler", Profiler)
    small = [nn.Linear(64, 64) for _ in range(8)]
    net = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), *small)
    layers = ChainBuilder(net, torch.zeros(4, 64)).chain().layers
    calibrate(layers, torch.zeros(4, 64), MACHINE, CPU, "fp32")
    assert [layer.name for layer in Profiler.made.layers] == ["2"]


def test_plans_of_a_model_without_values_can_be_calibrated():
    with torch.device("meta"):
        net = gpt(64, 8, n_layer=3, d_model=16)
    plans = find_plans(
        net, TOKENS, MACHINE, Job(4), choices=Choices(nb_part=[2]), costs="calibrated"
    )
    assert plans.table.costs_from == "calibrated"
    assert plans.prices[0].step_ms > 0
    assert all(p.is_meta for p in net.parameters())
