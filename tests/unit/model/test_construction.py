"""`construct_part`: the owned parameters of plain construction, and no memory for the others."""

from __future__ import annotations

import copy
import logging
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torchvision import models

from hybridtrain._base.construction import construct_part
from hybridtrain.models.gpt import gpt


class Tied(nn.Module):
    """A tied embedding, initialised by `apply` as well."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=0)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.apply(lambda m: hasattr(m, "weight") and nn.init.xavier_normal_(m.weight))


class Initialised(nn.Module):
    """The usual initialisations, whole and in slices, by every generator."""

    def __init__(self):
        super().__init__()
        ways = [
            *(nn.init.orthogonal_, nn.init.kaiming_uniform_, nn.init.eye_, nn.init.trunc_normal_),
            lambda w: nn.init.trunc_normal_(w, 0, 1, 3, 4),
            *(
                lambda w: nn.init.sparse_(w, 0.3),
                lambda w: w.t().normal_(),
                lambda w: w[2:5].zero_(),
            ),
            lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
            lambda w: w.normal_(std=random.random()).mul_(np.random.rand()),
        ]
        self.weights = nn.ParameterList(torch.rand(24, 12) for _ in ways)
        self.register_buffer("table", torch.arange(4.0).outer(torch.ones(3)).cumsum(0))
        with torch.no_grad():
            for way, weight in zip(ways, self.weights, strict=True):
                way(weight)


MODELS = {
    "tied": Tied,
    "initialised": Initialised,
    "gpt": lambda: gpt(vocab_size=50, seq_len=16, n_layer=2, d_model=32),
    "resnet18": models.resnet18,
    "vit": lambda: models.VisionTransformer(32, 8, 2, 4, 32, 64),
    "encoder, copied": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 3),
    "attention": lambda: nn.MultiheadAttention(32, 4, kdim=16, vdim=8, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(8, 16, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)),
    "half": lambda: nn.Sequential(nn.Linear(30, 30), nn.BatchNorm1d(30)).half(),
    "lazy": lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4)),
}


class Looks(nn.Module):
    """A structure that depends on values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4) if self.first.weight.sum() > 0 else nn.Linear(4, 3)


class LooksBack(nn.Module):
    """Asks for a value that is gone, and makes do without it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        try:
            bias = self.first.weight.detach().numpy().max()
        except Exception:
            bias = 0.0
        nn.init.constant_(self.second.bias, bias)


class Copies(nn.Module):
    """The second layer starts as the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.data.copy_(self.first.weight.data)
        self.third = copy.deepcopy(self.second)


class OnMeta(nn.Module):
    """Has one layer more on the meta device."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        if self.first.weight.is_meta:
            self.between = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class Remembers(nn.Module):
    """Keeps a parameter's memory in a closure."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        weight = self.first.weight.detach()
        self.sum = lambda: weight.sum()


FALLBACKS = [Looks, LooksBack, Copies, OnMeta, Remembers]


def named(net):
    return dict(
        [
            *net.named_parameters(remove_duplicate=False),
            *net.named_buffers(remove_duplicate=False),
        ]
    )


def seeded(build):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return build()


def parts_of(plain):
    """The two halves of the names, the odd ones, and none."""
    names = list(named(plain))
    half = len(names) // 2
    return [names[:half], names[half:], names[1::2], []]


def assert_is_part(net, plain, names):
    ours, theirs = named(net), named(plain)
    assert list(ours) == list(theirs)
    owned = {id(theirs[name]) for name in names}
    for name, expected in theirs.items():
        if nn.parameter.is_lazy(expected):
            assert nn.parameter.is_lazy(ours[name])
            continue
        assert ours[name].is_meta == (id(expected) not in owned), name
        if id(expected) in owned:
            assert torch.equal(ours[name], expected), name
        assert ours[name].shape == expected.shape
        assert ours[name].dtype == expected.dtype
        assert ours[name].requires_grad == expected.requires_grad
        assert type(ours[name]) is type(expected)
    ties = [
        [a is b for b in tensors.values()]
        for tensors in (ours, theirs)
        for a in [*tensors.values()][:50]
    ]
    assert ties[: len(ties) // 2] == ties[len(ties) // 2 :]


@pytest.mark.parametrize(
    "build", [*MODELS.values(), *FALLBACKS], ids=[*MODELS, *(f.__name__ for f in FALLBACKS)]
)
@pytest.mark.quick_cases(2)
def test_owned_parameters_and_the_generator_are_those_of_plain_construction(build):
    plain = seeded(build)
    state = torch.get_rng_state()
    for names in parts_of(plain):
        net = seeded(lambda names=names: construct_part(build, set(names).__contains__))
        assert torch.equal(torch.get_rng_state(), state)
        assert_is_part(net, plain, names)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.quick_cases(3)
def test_usual_models_are_not_built_whole(build, caplog):
    caplog.set_level(logging.DEBUG, "hybridtrain")
    for names in parts_of(build())[:2]:
        construct_part(build, set(names).__contains__)
    assert not caplog.records


@pytest.mark.parametrize("build", FALLBACKS)
def test_a_constructor_that_needs_other_values_is_run_whole_and_the_log_says_so(build, caplog):
    caplog.set_level(logging.DEBUG, "hybridtrain")
    net = construct_part(build, lambda name: name.startswith("second"))
    assert "whole model" in caplog.text
    if isinstance(net, Remembers):
        assert torch.isfinite(net.sum())


def test_a_parameter_with_one_owned_name_is_owned_under_all():
    net = construct_part(Tied, lambda name: name == "head.weight")
    assert net.embed.weight is net.head.weight
    assert not net.embed.weight.is_meta
    assert net.body.weight.is_meta


def test_to_read_a_parameter_that_is_not_owned_is_an_error():
    net = construct_part(lambda: nn.LSTM(8, 16), lambda name: False)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        net.weight_hh_l0.tolist()
    with pytest.raises(RuntimeError, match="meta"):
        net(torch.ones(3, 2, 8))


def test_errors_are_those_of_the_constructor():
    with pytest.raises(ZeroDivisionError) as caught:
        construct_part(lambda: nn.Linear(3, 1 // 0), lambda name: True)
    assert caught.value.__context__ is None


PEAK = """
import resource, torch
from torch import nn
from hybridtrain._base.construction import construct_part
def peak():
    return next(
        int(line.split()[1]) * 1024
        for line in open("/proc/self/status") if line.startswith("VmHWM")
    )
def build():
    return nn.Sequential(*[nn.Linear(1024, 2048) for _ in range(32)])
build_one = construct_part(lambda: nn.Linear(1024, 2048), lambda name: False)
before = peak()
net = construct_part(build, lambda name: int(name.split(".")[0]) < 8)
owned = sum(p.nbytes for p in net.parameters() if not p.is_meta)
print((peak() - before) / owned, owned / 2**20)
"""


@pytest.mark.thorough
def test_peak_memory_is_little_more_than_what_is_owned():
    seen, owned = map(float, subprocess.check_output([sys.executable, "-c", PEAK]).split())
    assert owned > 60
    assert seen < 1.3 + 8 / owned
