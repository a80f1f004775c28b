"""Estimated costs: FLOPs and bytes by their formulas, and cuts like those by analytic costs."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from support.hf import causal_lm
from torch import nn

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.torch_private import TorchDispatchMode
from hybridtrain.errors import SplitError
from hybridtrain.graph import layers_of
from hybridtrain.models import gpt, lora, transformer
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LayerCost,
    LossOfStep,
    StageOwners,
    model_flops,
    observed_chain,
    plan,
)
from hybridtrain.partitioning.estimates import count_work, estimate_costs
from hybridtrain.partitioning.measurements import LayerProfiler
from hybridtrain.price import StepWork, find_plans

CPU = torch.device("cpu")
ARITHMETIC = {"flops_per_s": 1e9, "bytes_per_s": float("inf")}
TRAFFIC = {"flops_per_s": float("inf"), "bytes_per_s": 1e9}


def estimated(net, inputs, **options):
    return estimate_costs(observed_chain(net, inputs).layers, inputs, **options)


def mlp(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_arithmetic_is_that_of_the_matrix_products_there_and_back():
    first, second = estimated(mlp(16, 64, 8), torch.randn(32, 16), **ARITHMETIC)
    product = 2 * 32 * 16 * 64 / 1e6  # milliseconds at 1e9 FLOP/s
    assert first.forward_ms == pytest.approx(product)
    assert first.backward_ms == pytest.approx(product)  # the inputs need no gradient
    assert second.forward_ms == pytest.approx(2 * 32 * 64 * 8 / 1e6)
    assert second.backward_ms == pytest.approx(2 * second.forward_ms)


def test_traffic_is_what_operations_read_and_write_without_views():
    net = nn.Sequential(nn.Tanh(), nn.Unflatten(1, (4, 25)))
    tanh, view = estimated(net, torch.randn(10, 100), **TRAFFIC)
    assert tanh.forward_ms == pytest.approx(2 * 4000 / 1e6)
    assert view.forward_ms == 0


class Dispatched(TorchDispatchMode):
    """Counts the operators that PyTorch dispatches."""

    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def test_operators_are_those_that_pytorch_dispatches_for_real_tensors():
    net = transformer(20, max_len=8, d_model=8, nhead=2, d_hid=8, nlayers=1)
    inputs = torch.zeros(4, 8, dtype=torch.long), torch.zeros(4, 8, dtype=torch.bool)
    layer = count_work(observed_chain(net, inputs).layers, inputs)[1]
    x = torch.randn(4, 8, 8, requires_grad=True)
    with Dispatched() as forward:
        y, _ = net.layers[0]((x, inputs[1]))
    with Dispatched() as backward:
        y.backward(torch.ones_like(y))
    # fake tensors take some more views
    assert layer.forward.operators == pytest.approx(forward.operators, rel=0.1)
    assert layer.backward.operators == pytest.approx(backward.operators, rel=0.1)


def test_time_is_the_longer_one_of_arithmetic_and_traffic():
    net, x = mlp(64, 64), torch.randn(32, 64)
    each = [estimated(net, x, **h)[0].forward_ms for h in (ARITHMETIC, TRAFFIC)]
    both = estimated(net, x, flops_per_s=1e9, bytes_per_s=1e9)
    assert both[0].forward_ms == max(each)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x + self.norm(self.up(x)))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: mlp(16, 64, 8), torch.randn(32, 16)),
        (lambda: nn.Sequential(Residual(), nn.Dropout(), Residual()), torch.randn(2, 3, 8, 8)),
        (lambda: gpt(16, 8, n_layer=2, d_model=16), torch.randint(16, (4, 8))),
    ],
    ids=["mlp", "residual", "gpt"],
)
def test_bytes_are_those_that_are_measured_also_on_the_meta_device(make, inputs):
    def in_bytes(costs):
        return [(c.name, c.weight_bytes, c.activation_bytes, c.crossing_bytes) for c in costs]

    net = make()
    found = estimated(net, inputs)
    layers = observed_chain(net, inputs).layers
    assert in_bytes(found) == in_bytes(LayerProfiler(layers, inputs, [CPU]).costs())
    with torch.device("meta"):
        assert estimated(make(), inputs) == found


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_linear_layers_of_different_widths_are_cut_as_by_their_analytic_flops(stages):
    widths = [256, 512, 128, 1024, 256, 256, 2048, 64, 512, 512]
    net, x = mlp(*widths), torch.randn(64, 256)

    def analytic(layers, inputs):
        return [
            LayerCost(
                layer.name,
                forward_ms=layer.module.weight.numel(),
                backward_ms=(2 if index else 1) * layer.module.weight.numel(),
            )
            for index, layer in enumerate(layers)
        ]

    options, owners = PipelineOptions(split="time"), StageOwners.of_cpus(stages)
    by_flops = partial(estimate_costs, **ARITHMETIC)
    expected = plan(net, options, x, owners, costs=analytic).counts
    assert plan(net, options, x, owners, costs=by_flops).counts == expected


def test_a_plan_by_estimates_needs_no_weights():
    with torch.device("meta"):
        net = mlp(64, 64, 64, 64, 4096, 64)
    options = PipelineOptions(chunks=2, split="time")
    found = plan(net, options, torch.randn(8, 64), StageOwners.of_cpus(2), costs="estimated")
    assert found.costs_from == "estimated"
    assert found.counts == [4, 1]
    assert all(parameter.is_meta for parameter in net.parameters())


def test_estimating_changes_neither_weights_buffers_nor_generators():
    net = nn.Sequential(Residual(), nn.Dropout())
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    estimated(net, torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_layer_whose_control_flow_depends_on_values_is_named():
    class Either(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    message = r"costs='estimated': layer '1' does not run on fake tensors .*: use costs='measured'"
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(2, 2), Either())
    with pytest.raises(SplitError, match=message):
        estimate_costs(layers_of(net), torch.randn(2, 2))


class Sparse(nn.Module):
    """Computes with the rows that it chooses by their values, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(2, 64), nn.Linear(64, 2)

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return self.down(self.up(x[rows]).relu())


def test_a_model_whose_shapes_depend_on_values_is_counted_with_its_values():
    inputs = torch.tensor([[1.0, 0.0], [2.0, 1.0], [-1.0, 0.0]])
    net = Sparse()
    up, down = estimate_costs(observed_chain(net, inputs).layers, inputs, **ARITHMETIC)
    assert up.forward_ms == pytest.approx(2 * 2 * 2 * 64 / 1e6)
    assert down.backward_ms == pytest.approx(2 * down.forward_ms)
    assert all(parameter.grad is None for parameter in net.parameters())


class Shared(nn.Module):
    """Calls one layer twice, changes values between layers, and has weights outside of layers."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = (nn.Linear(8, 8, bias=False) for _ in "abc")
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.again(self.first(x)) * self.scale
        return self.last(self.again(x) @ x.mT)


def test_code_between_layers_counts_to_the_layer_before_it_there_and_back():
    x = torch.randn(8, 8)
    layers = observed_chain(Shared(), x).layers
    assert [layer.name for layer in layers] == ["first", "again", "again@2", "last"]
    costs = estimate_costs(layers, x, **ARITHMETIC)
    product = 2 * 8**3 / 1e6
    assert [cost.forward_ms / product for cost in costs] == pytest.approx([1, 1, 2, 1])
    # the first product has no gradient of an input
    assert [cost.backward_ms / product for cost in costs] == pytest.approx([1, 2, 4, 2])
    assert [cost.parameters for cost in costs] == [64, 64 + 8, 0, 64]


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral"])
@pytest.mark.quick_cases("Llama")
def test_models_with_grouped_queries_and_a_mask_are_priced(name):
    pytest.importorskip("transformers")
    net = causal_lm(name)
    tokens = torch.randint(50, (4, 8))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    options, owners = PipelineOptions(chunks=2, split="time"), StageOwners.of_cpus(2)
    found = plan(net, options, inputs, owners, costs="estimated")
    assert len(found.stages) == 2
    hardware = Hardware(devices_per_node=2, flops_per_s={"fp32": 1e12}, memory_gib=8)
    loss = LossOfStep(lambda output, _: output.loss, tokens)
    priced = find_plans(net, inputs, hardware, StepWork(4), loss=loss)
    with torch.device("meta"):
        outline = type(net)(net.config)
    same = find_plans(outline, inputs, hardware, StepWork(4), loss=loss)
    assert same.prices[0].step_ms == priced.prices[0].step_ms > 0
    products = sum(p.numel() for n, p in net.named_parameters() if "embed" not in n and p.dim() > 1)
    assert priced.table.flops_per_sample == pytest.approx(6 * 8 * products, rel=0.1)


def test_a_frozen_base_of_an_adapter_has_no_gradient_no_state_and_no_weight_backward():
    pytest.importorskip("peft")
    plain, adapted = (
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))) for _ in "ab"
    )
    lora(adapted, rank=1, targets=["0", "1", "2", "3"])
    whole, frozen = (estimated(net, torch.randn(512, 64), **ARITHMETIC) for net in (plain, adapted))
    for cost, of_base in zip(whole[1:], frozen[1:], strict=True):  # the first input has no gradient
        assert cost.backward_ms == pytest.approx(2 * cost.forward_ms)
        assert of_base.backward_ms < 1.1 * of_base.forward_ms
    products = 2 * 512 * 64 * 64
    counted = count_work(layers_of(adapted), torch.randn(512, 64))
    flops = model_flops(counted, layers_of(adapted))
    assert 7 * products < flops < 7.6 * products  # the first input has no gradient
    assert model_flops(count_work(layers_of(plain), torch.randn(512, 64)), layers_of(plain)) == (
        12 * products
    )
    base, adapter = 64 * 64, 2 * 64
    assert {cost.weight_bytes for cost in whole} == {4 * 4 * base}
    assert {cost.weight_bytes for cost in frozen} == {4 * (base + 4 * adapter)}
