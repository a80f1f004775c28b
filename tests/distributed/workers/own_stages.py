"""Two processes of one pipeline: each makes, loads and keeps the values of its own stages only."""

import copy
import random
import sys
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.launch import Cells
from support.nets import classification, tied_gpt, token_loss, tokens
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_parameter_registration_hook

from hybridtrain import HybridModel, World
from hybridtrain.checkpoint import CheckpointStore, init_from
from hybridtrain.checkpoint import finishing_saves as finishing
from hybridtrain.checkpoint import save_checkpoint as save
from hybridtrain.errors import ConfigError
from hybridtrain.models.gpt import gpt

torch.set_num_threads(1)
cells = Cells()


def build_gpt():
    return gpt(vocab_size=32, seq_len=8, n_layer=3, n_head=2, d_model=16, dropout=0.1)


class Looks(nn.Module):
    """Has layers that depend on values, and tells how much of it is there at once."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.more = nn.Linear(6, 6) if self.first.weight.sum() > -1000 else nn.Tanh()
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.more(self.first(x)))


class OnMeta(nn.Sequential):
    """Has one layer more on the meta device."""

    def __init__(self):
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
        if layers[0].weight.is_meta:
            layers.insert(1, nn.Linear(6, 6))
        super().__init__(*layers)


class Exported(nn.Module):
    """A model that torch.fx cannot follow, and torch.export can."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            if x.shape[1] > 3:
                x = torch.tanh(layer(x))
            if isinstance(x, torch.Tensor):
                x = x * 1.5
        return self.last(x)


def lazy():
    return nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))


def across():
    return World.from_env(2, "cpu", timeout_s=30, engine="distributed")


def seed():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def constructed(build, **settings):
    """The model of `construct`, and the module of plain construction."""
    seed()
    model = HybridModel.construct(build, across(), **settings)
    drawn = torch.rand(3), random.random(), np.random.rand()
    seed()
    plain = build()
    expected = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(drawn[0], expected[0])
    assert drawn[1:] == expected[1:]
    return model, plain


def assert_own_values(model, plain):
    """Bitwise the initial values of plain construction; both processes together have all."""
    own = dict(model.named_parameters())
    expected = dict(plain.named_parameters())
    for name, parameter in own.items():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad == expected[name].requires_grad
    assert [name for name, _ in model.net.named_parameters()] == list(expected)
    names = model.world.gather(list(own))
    assert sorted(names[0] + names[1]) == sorted(expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name])


def assert_trains_alike(model, plain, batch, loss_fn, **settings):
    """Three steps give the weights of a pipeline of the whole model."""
    whole = HybridModel(plain, across(), **settings)
    assert model.plan.counts == whole.plan.counts
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.02) for each in (model, whole)]
    for step in range(3):
        inputs, targets = batch(8, step)
        for each, optimizer in zip((model, whole), optimizers, strict=True):
            each.train_step(inputs, targets, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name], value), name


class Largest:
    """The most bytes of parameters that were there at one time, looked at as each is registered."""

    def __init__(self):
        self.seen = []  # of each call of the function that builds
        self._made = []

    def __call__(self, build):
        def watched():
            self.seen.append(0)
            hook = register_module_parameter_registration_hook(self._look)
            try:
                return build()
            finally:
                hook.remove()

        return watched

    def _look(self, module, name, parameter):
        self._made.append(weakref.ref(parameter))
        there = [p for p in (made() for made in self._made) if p is not None and not p.is_meta]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in there}
        self.seen[-1] = max(self.seen[-1], sum(storages.values()))


SPLITS = {"by hand": [2, 4], "uniform": "uniform", "size": "size", "measured": "time"}

for _name, _split in SPLITS.items():

    @cells.add(
        f"no process makes more than its stages, split {_name}",
        thorough=_name != "by hand",
    )
    def _(world, split=_split):
        inputs = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
        largest = Largest()
        model, plain = constructed(largest(build_gpt), split=split, example_inputs=inputs)
        own = sum(p.nbytes for p in model.parameters())
        biggest = max(p.nbytes for p in model.net.parameters())
        # an operation on an owned and one on another parameter; then plain construction in the test
        assert max(largest.seen[:-1]) <= own + 2 * biggest
        assert_own_values(model, plain)


@cells.add("a plan file is followed")
def _plan(world):
    inputs = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(0))
    model, _ = constructed(build_gpt, split=[2, 4], example_inputs=inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = world.broadcast(Path(folder, "plan.yaml"))
        world.on_main(lambda: model.plan.write(path))
        again, plain = constructed(build_gpt, split=str(path), example_inputs=inputs)
    assert again.plan.counts == [2, 4]
    assert_own_values(again, plain)


@cells.add("a weight that is tied over processes has its value at the first step")
def _tied(world):
    for settings in ({}, {"stages_per_device": 2}):
        model, plain = constructed(lambda: tied_gpt(uses=3), chunks=2, **settings)
        assert_own_values(model, plain)
        assert_trains_alike(model, plain, tokens, token_loss, chunks=2, **settings)


FALLBACKS = {"its layers depend on values": Looks, "on meta": OnMeta, "lazy": lazy}

for _name, _build in {**FALLBACKS, "by torch.export": Exported}.items():

    @cells.add(
        f"what cannot be made in parts is built whole: {_name}",
        thorough=_name != "its layers depend on values",
    )
    def _(world, build=_build):
        inputs, _ = classification(8)
        if build is not lazy:
            model, plain = constructed(build, chunks=2, example_inputs=inputs)
            assert_own_values(model, plain)
        else:
            seed()
            model = HybridModel.construct(build, across(), chunks=2, example_inputs=inputs)
            seed()
            plain = build()
        assert_trains_alike(
            model, plain, classification, F.cross_entropy, chunks=2, example_inputs=inputs
        )


@cells.add("a module that was there before is taken as it is")
def _existing(world):
    seed()
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)], nn.Linear(6, 3))
    plain = copy.deepcopy(net)
    for split in ("uniform", "time"):
        inputs, _ = classification(8)
        given = copy.deepcopy(net)
        model = HybridModel.construct(
            lambda net=given: net, across(), split=split, example_inputs=inputs
        )
        assert model.net is given
        assert_own_values(model, plain)


@cells.add("what is no function is refused, and so is a split that does not fit")
def _refused(world):
    with pytest.raises(ConfigError, match=r"build= .*Linear"):
        HybridModel.construct(nn.Linear(2, 2), across())
    with pytest.raises(Exception, match="7"):
        HybridModel.construct(build_gpt, across(), split=[3, 4])


def tied_at_the_end():
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    net[3].weight = net[2].weight
    return net


@cells.add("initial weights of a tied model have it under one of its names")
def _init_from(world):
    model, _ = constructed(tied_at_the_end)
    torch.manual_seed(9)
    expected = tied_at_the_end().state_dict()
    weights = {name: value.clone() for name, value in expected.items() if name != "3.weight"}
    with tempfile.TemporaryDirectory() as folder:
        path = world.broadcast(Path(folder, "weights.safetensors"))
        world.on_main(lambda: save_file(weights, path))
        init_from(model, path)
    state = model.state_dict()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


for _writers in ("rank0", "all"):

    @cells.add(
        f"a save in the background copies no stage of another process, {_writers}",
        thorough=_writers == "rank0",
    )
    def _(world, writers=_writers):
        saved_in_background(world, writers)


def saved_in_background(world, writers):
    model, _ = constructed(build_gpt, split=[2, 4])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with tempfile.TemporaryDirectory() as folder:
        path = world.broadcast(Path(folder))
        store = CheckpointStore(path, background=True, writers=writers)
        with finishing(store, world):
            saved = save(store, 1, model, optimizer, {})
        if writers == "rank0":  # it is written at once
            assert store.host_copies.nbytes == 0
        else:
            own = sum(p.nbytes for p in model.parameters())
            assert store.host_copies.nbytes == own
        expected = model.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        init_from(model, saved)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


if __name__ == "__main__":
    cells.main(*sys.argv[1:])
