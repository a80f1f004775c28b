"""`engine="local"`: random draws depend on seed, step, unit and micro-batch, and on no split."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.nets import GPUGenerator
from support.stand_in_gpus import on_host, stand_in_gpus
from torch import Tensor, nn

from hybridtrain import HybridModel, World
from hybridtrain.pipeline import LayerRNG

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

ROWS, CHUNKS = 7, 3


class Inner(nn.Module):
    """Draws before, between and after its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.q(F.dropout(self.p(F.dropout(x, 0.3)), 0.3)), 0.3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Inner(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(F.dropout(self.inner(F.dropout(x, 0.2)).tanh(), 0.2)), 0.2)


class Activations(nn.Module):
    """A block without parameters, which a model may be cut in although it is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.second(F.dropout(self.first(F.dropout(x, 0.2)), 0.2)), 0.2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.twice = Activations()
        self.rest = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))  # so that a block is small

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1)
        x = self.twice(self.twice(x) + 1)
        for layer in self.rest:
            x = layer(x)
        return F.dropout(x, 0.1)


def step(stages: int, **options: Any) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(0)
    net, x, y = Net(), torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    world = World.from_env(nb_part=stages, devices="cpu")
    model = HybridModel(net, world, chunks=CHUNKS, example_inputs=x, **options)
    model.train_step(x, y, F.mse_loss)
    return model.train_step(x, y, F.mse_loss).loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": ["blocks.0.inner.q"]},
        {"split": ["blocks.1.last"], "recompute": "always"},
        {"split": ["blocks.0.last", "blocks.1.inner.q"], "schedule": "zb-h1"},
        {"split": ["blocks.2.inner.p"]},
        {"split": ["twice.second"]},
        {"split": ["twice.first@2"]},
        {"split": ["twice.second@2"], "recompute": "always"},
    ],
    ids=str,
)
@pytest.mark.quick_cases(4)
def test_draws_are_the_same_for_every_split(options: dict[str, Any]) -> None:
    loss, gradients = step(1)
    split_loss, split_gradients = step(len(options.get("split", [""])) + 1, **options)
    assert torch.equal(split_loss, loss)
    assert all(map(torch.equal, split_gradients, gradients))


class ForeignDropout(nn.Module):
    """Draws as a CUDA extension does: from its device's default generator, which nobody sees."""

    generators: ClassVar[dict[torch.device, GPUGenerator]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.draw(self.linear(self.draw(x)))
        return self.draw(x)

    def draw(self, x: Tensor) -> Tensor:
        return x * (self.generators[x.device].rand(x.shape) > 0.5).to(x.device)


class ForeignBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = ForeignDropout(), ForeignDropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(
    "options",
    [
        {"split": ["0.b"]},
        {"split": ["1.b"], "recompute": "always"},
        {"split": ["2"], "schedule": "zb-h1"},
    ],
    ids=str,
)
@pytest.mark.quick_cases(1)
def test_kernels_that_draw_from_the_devices_generator_draw_the_same_for_every_split(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    here = threading.local()
    generators = ForeignDropout.generators
    init = LayerRNG.__init__

    def with_generators(rng: LayerRNG, *args: Any, **kwargs: Any) -> None:
        init(rng, *args, **kwargs)
        rng.own_generator = lambda: generators[here.device]  # type: ignore[return-value]

    monkeypatch.setattr(LayerRNG, "__init__", with_generators)
    found = []
    for stages in (1, 2):
        with stand_in_gpus(stages) as gpus:
            set_device = gpus.set_device

            def noting(device: torch.device, set_device: Any = set_device) -> None:
                here.device = device
                set_device(device)

            monkeypatch.setattr(gpus, "set_device", noting)
            generators.clear()
            generators[torch.device("cpu")] = GPUGenerator()  # the calls are observed there
            for device in gpus.devices:
                generators[device] = GPUGenerator()
                generators[device].set_offset(8)
            torch.manual_seed(0)
            net, x, y = nn.Sequential(*(ForeignBlock() for _ in range(4))), *torch.randn(2, ROWS, 8)
            world = World.from_env(stages, [str(d) for d in gpus.devices])
            settings = options if stages == 2 else {}
            model = HybridModel(
                net, world, chunks=CHUNKS, example_inputs=x, self_check=False, **settings
            )
            loss = model.train_step(x, y, F.mse_loss).loss
            found.append([on_host(v) for v in (loss, *(p.grad for p in model.parameters()))])
            # others find the generators as they were
            of_gpus = [generators[device] for device in gpus.devices]
            assert all((g.initial_seed(), g.get_offset()) == (0, 8) for g in of_gpus)
    assert all(map(torch.equal, *found))
