"""Deferred models: bit for bit those of plain construction, part by part, as the same objects."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import models

from hybridtrain.deferred import CannotDefer, construct, deferred_init, is_deferred, materialize
from hybridtrain.errors import ConfigError
from hybridtrain.models.basicnet import basicnet
from hybridtrain.models.gpt import gpt
from hybridtrain.models.transformer import transformer

CPU = torch.device("cpu")


class Positions(nn.Module):
    """Buffers and plain attributes, by views, index arithmetic and copies into slices."""

    def __init__(self):
        super().__init__()
        steps = torch.arange(50).unsqueeze(1)
        rates = torch.exp(torch.arange(0, 16, 2) * (-math.log(10000.0) / 16))
        table = torch.zeros(50, 16)
        table[:, 0::2] = torch.sin(steps * rates)
        table[:, 1::2] = torch.cos(steps * rates)
        self.register_buffer("table", table)
        self.grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
        flat = self.grid.flatten(1)
        self.register_buffer("index", (flat[:, :, None] - flat[:, None]).sum(0), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((9, 9), float("-inf")), 1))


class Sharing(nn.Module):
    """Tied parameters, parameters that are views of one another, and changes through `data`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.head.weight)
        self.other = nn.Linear(4, 10)
        self.same = nn.Parameter(self.other.weight.data)
        self.again = copy.copy(self.same.data)
        self.rows = nn.Parameter(self.other.weight.detach()[2:5])
        self.same.data.normal_()
        self.other.bias.data = torch.ones(10)
        with torch.no_grad():
            self.rows.copy_(torch.arange(12.0).view(3, 4))
            self.rows[1] += 5
            self.other.bias[torch.arange(10) % 2 == 0] = torch.from_numpy(np.full(5, 7.0, "f4"))


class Initialised(nn.Module):
    """Every way to draw, and initialisations that look at what they drew."""

    def __init__(self):
        super().__init__()
        of = nn.init
        ways = [
            *(of.orthogonal_, of.xavier_normal_, of.kaiming_uniform_, of.eye_),
            *(of.trunc_normal_, lambda w: of.trunc_normal_(w, 0, 1, -0.3, 0.9)),
            lambda w: of.trunc_normal_(w, 0, 1, 3, 4),
            *(lambda w: of.sparse_(w, 0.3), lambda w: w.t().normal_(), lambda w: w[2:5].uniform_()),
            lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
        ]
        self.weights = nn.ParameterList(torch.zeros(24, 12) for _ in ways)
        with torch.no_grad():
            for way, weight in zip(ways, self.weights, strict=True):
                way(weight)
        self.rng = [
            *(torch.randperm(20), torch.randint(0, 5, (7,)), torch.rand(3) > 0.5),
            *(torch.multinomial(torch.ones(5), 3), torch.poisson(torch.full((5,), 4.0))),
            *(torch.dropout(torch.ones(40), 0.5, True), torch.randn(20, dtype=torch.bfloat16)),
        ]


class Asking(nn.Module):
    """A structure and numbers that depend on values."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 5)]
        self.numbers = (torch.arange(3).tolist(), torch.ones(2).numpy(), np.asarray(torch.ones(2)))
        self.text = f"{torch.ones(2)} {torch.tensor(1.5):.2f}"
        self.layer = nn.Linear(3, 4) if torch.randn(5).sum() > 0 else nn.Linear(4, 3)
        weight = self.layer.weight
        self.place = (weight.device.type, weight.is_meta, weight.is_cpu)
        self.here = weight.detach().to("cpu").cpu().mul_(2)  # no copy: it is there
        self.positive = weight[weight > 0]
        known = torch.rand(4) - 0.5
        self.sums = [known.sum().item()]
        before = known * 2
        nn.functional.rrelu_(known, training=True)  # draws, and changes what has been computed
        self.sums += [torch.rand(3).sum().item(), before.sum().item(), known.sum().item()]
        known = torch.rand(4) - 0.5
        self.sums.append(known.sum().item())
        before = known * 2
        nn.functional.rrelu_(known, training=True)
        torch.rand(3)
        self.sums.append(before.sum().item())
        self.drawn = nn.Parameter(torch.tensor(float(torch.rand(()))))
        values = np.zeros(3)
        seen = torch.from_numpy(values)
        values[:] = 2
        self.at_two = torch.ones(3) * seen
        values[:] = 4
        assert torch.equal(self.at_two, torch.full((3,), 2.0).double())


class OtherDtype(nn.Module):
    """Made under another default type than the one in force later."""

    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.float64)
        try:
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            self.register_buffer("drawn", torch.randn(3) * 2)
        finally:
            torch.set_default_dtype(torch.float32)


FILE = io.BytesIO()
torch.save({"weight": torch.full((4, 3), 2.0), "bias": torch.arange(4.0)}, FILE)


class Loaded(nn.Module):
    """With weights from a file."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        FILE.seek(0)
        self.layer.load_state_dict(torch.load(FILE, weights_only=True))


MODELS = {
    "resnet18": models.resnet18,
    "googlenet": lambda: models.googlenet(init_weights=True, aux_logits=False, num_classes=10),
    "efficientnet": models.efficientnet_b0,
    "densenet": lambda: models.DenseNet(8, (2, 2), 16),
    "swin": lambda: models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [7, 7]),
    "vit": lambda: models.VisionTransformer(32, 8, 2, 4, 32, 64),
    "gpt": lambda: gpt(vocab_size=50, seq_len=16, n_layer=2, d_model=32),
    "transformer": lambda: transformer(
        vocab_size=50, num_classes=2, max_len=16, d_model=32, d_hid=64, nlayers=2
    ),
    "basicnet": basicnet,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 3),
    "attention": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=8, add_bias_kv=True),
    "lstm copied": lambda: copy.deepcopy(nn.LSTM(8, 16, 2)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)),
    "half": lambda: nn.Linear(30, 30).half(),
    **{
        kind.__name__: kind
        for kind in (Positions, Sharing, Initialised, Asking, OtherDtype, Loaded)
    },
}


def seeded(build):
    torch.manual_seed(3)
    return build()


def seeded_and_deferred(build):
    torch.manual_seed(3)
    with deferred_init():
        return build()


def contents(module):
    """Everything that is to be equal: the tensors, and what else a module has for attributes."""
    found = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in ("_parameters", "_buffers"):
                found |= {f"{name}.{k}": v for k, v in value.items()}
            elif not key.startswith("_") or key == "_flat_weights":
                found[f"{name}.{key}"] = value
    return found


def assert_same(one, other, name=""):
    if isinstance(one, torch.Tensor):
        assert isinstance(other, type(one)), name
        assert other.device == one.device, name
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.requires_grad == other.requires_grad, name
        assert torch.equal(one.detach(), other.detach()), name
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), name
        for key in one:
            assert_same(one[key], other[key], f"{name} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), name
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, name)
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), name
    elif isinstance(one, str | int | float | bool | None):
        assert one == other, name


@pytest.mark.parametrize("name", MODELS)
def test_values_and_the_generator_are_those_of_plain_construction(name):
    plain = seeded(MODELS[name])
    state = torch.get_rng_state()
    net = seeded_and_deferred(MODELS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert is_deferred(net)
    materialize(net, CPU)
    assert not is_deferred(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(contents(plain), contents(net))


def test_construct_defers_what_can_be():
    net = construct(MODELS["gpt"])
    assert all(parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize("seed", range(3))
def test_parts_are_materialised_in_any_order_and_one_by_one(seed):
    plain = seeded(MODELS["swin"])
    net = seeded_and_deferred(MODELS["swin"])
    parts = [part for part in net.modules() if not list(part.children())]
    random.Random(seed).shuffle(parts)
    waiting = {id(parameter) for parameter in net.parameters()}
    for part in parts:
        materialize(part, CPU)
        waiting -= {id(parameter) for parameter in part.parameters()}
        assert {id(p) for p in net.parameters() if p.is_meta} >= waiting - {id(None)}
    materialize(net, CPU)  # what no part has: tables that belong to the layers between
    assert_same(contents(plain), contents(net))


def test_one_part_leaves_the_others_without_memory():
    net = seeded_and_deferred(MODELS["gpt"])
    materialize(net.blocks[0], CPU)
    assert not is_deferred(net.blocks[0])
    assert {p.is_meta for p in net.blocks[1].parameters()} == {True}
    assert {p.is_meta for p in net.head.parameters()} == {True}


def test_parameters_stay_the_objects_that_an_optimizer_and_hooks_have():
    def train(net, optimizer):
        fired = []
        net[0].weight.register_hook(lambda grad: fired.append("hook"))
        yield fired
        for _ in range(2):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        yield fired

    def build():
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    plain, net = seeded(build), seeded_and_deferred(build)
    parameters = list(net.parameters())
    runs = [train(n, torch.optim.AdamW(n.parameters(), lr=0.1)) for n in (plain, net)]
    for run in runs:
        next(run)
    materialize(net, CPU)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert [next(run) for run in runs] == [["hook", "hook"]] * 2
    assert_same(contents(plain), contents(net))


def test_tied_parameters_stay_one_and_shared_memory_stays_shared():
    net = seeded_and_deferred(Sharing)
    materialize(net.embed, CPU)
    assert net.head.weight is net.embed.weight
    assert not is_deferred(net.head)
    materialize(net.other, CPU)
    materialize(net, CPU)
    assert net.same is not net.other.weight
    with torch.no_grad():
        net.other.weight.fill_(3)
    assert torch.equal(net.rows, torch.full((3, 4), 3.0))
    assert torch.equal(net.same, net.other.weight)


def test_without_values_a_replica_has_memory_only_but_for_what_is_not_sent_to_it():
    plain, net = seeded(Positions), seeded_and_deferred(Positions)
    materialize(net, CPU, values=False)
    assert not is_deferred(net)
    assert net.table.shape == plain.table.shape
    assert_same(plain.grid, net.grid)


class LayerRNG(TorchDispatchMode):
    """Counts the random operations."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("values", [True, False])
def test_what_is_overwritten_or_sent_is_not_drawn_again(values):
    net = seeded_and_deferred(MODELS["gpt"])  # nn.Linear draws, and gpt then draws otherwise
    with LayerRNG() as draws:
        materialize(net, CPU, values)
    assert draws.number == values * sum(p.dim() == 2 for p in net.parameters())


def test_a_later_layer_can_be_drawn_after_a_deferred_model():
    seeded(MODELS["encoder"])
    plain = torch.rand(3)
    seeded_and_deferred(MODELS["encoder"])
    assert torch.equal(torch.rand(3), plain)


class Catching(nn.Module):
    """Makes do without what it cannot have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        with contextlib.suppress(Exception):
            self.lazy = torch.polar(torch.ones(3), torch.rand(3)).conj().mul(2)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.randn(3)
        self.table = lambda: table


@pytest.mark.parametrize(
    "build",
    [Catching, Outside, lambda: torch.jit.script(nn.Linear(3, 3)), lambda: nn.Linear(3, 3).weight],
)
def test_what_cannot_be_deferred_is_built_as_usual(build):
    plain = seeded(build)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    made = construct(build)
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(made, nn.Module):
        assert not is_deferred(made)
        assert_same(dict(plain.named_parameters()), dict(made.named_parameters()))
        if isinstance(made, Outside):
            assert torch.equal(made.table(), plain.table())
    else:
        assert torch.equal(made, plain)


def test_a_constructor_that_catches_what_cannot_be_deferred_is_noticed():
    with pytest.raises(CannotDefer, match="another kind"), deferred_init():
        Catching()


def test_errors_are_those_of_the_constructor():
    with pytest.raises(ConfigError, match="d_model"):
        construct(lambda: gpt(vocab_size=5, seq_len=4, d_model=30, n_head=4))
    with pytest.raises(ZeroDivisionError) as caught:
        construct(lambda: nn.Linear(3, 1 // 0))
    assert caught.value.__context__ is None


def test_a_lazy_module_gets_its_shape_later():
    net = seeded_and_deferred(lambda: nn.Sequential(nn.LazyLinear(4)))
    materialize(net, CPU)
    assert net(torch.ones(2, 3)).shape == (2, 4)
