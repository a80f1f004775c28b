"""`engine="local"` with stages on several devices: each value is copied once per micro-batch.

The devices are stand-ins, see `support.stand_in_gpus`: an operation on tensors of two of them is an
error.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, copied, micro_batches
from support.forward_nets import CHUNKS, ROWS, Net
from support.nets import CASES
from support.stand_in_gpus import StandInGPUs, on_host, stand_in_gpus
from torch import Tensor, nn

from hybridtrain import HybridModel, World
from hybridtrain.errors import SplitError

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

COMPARED = 4  # the first steps, which compare what layers change


def model_on(gpus: StandInGPUs, net: nn.Module, **options: Any) -> HybridModel:
    devices = [str(device) for device in gpus.devices]
    world = World.from_env(len(devices), devices)
    return HybridModel(net, world, **{"chunks": CHUNKS, **options})


def check_exact(net: nn.Module, batch: Any, loss: Any, count: int = 2, **options: Any) -> None:
    """Trains two steps on several devices, and the same in plain PyTorch."""
    plain = copy.deepcopy(net)
    inputs, targets = batch
    with stand_in_gpus(count, copy_s=1e-3) as gpus:
        model = model_on(gpus, net, example_inputs=inputs, **options)
        for _ in range(2):
            model.train_step(inputs, targets, loss)
        gradients = {name: on_host(p.grad) for name, p in model.named_parameters()}
        buffers = {name: on_host(buffer) for name, buffer in model.net.named_buffers()}
    chunks, rows = options.get("chunks", CHUNKS), len(targets)
    for _ in range(2):
        for x, y in micro_batches(inputs, targets, chunks):
            # a device has copies, which are aligned unlike views of the batch
            (loss(plain(copied(x)), y.clone()) * (len(y) / rows)).backward()
    assert_same(gradients, {name: p.grad for name, p in plain.named_parameters()})
    assert_same(buffers, dict(plain.named_buffers()))


KINDS = ["linear", "conv", "inplace", "nested", "pytree", "transformer", "u_net", "tied_gpt"]
SETTINGS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "recompute": "always"},
    {"schedule": "1f1b", "stages_per_device": 2, "recompute": {"every": 2}},
    {"schedule": "zb-h1"},
    {"schedule": "zb-v", "stages_per_device": 2},
    {"schedule": "v-min", "stages_per_device": 2},
]
CELLS = [
    *((kind, SETTINGS[0]) for kind in KINDS),
    *((kind, settings) for kind in ("conv", "u_net") for settings in SETTINGS[1:]),
]


@pytest.mark.parametrize(("kind", "settings"), CELLS, ids=str)
@pytest.mark.quick_cases(2)
def test_training_on_several_devices_equals_plain_pytorch(
    kind: str, settings: dict[str, Any]
) -> None:
    case = CASES[kind]
    count = 3 if len(settings) < 3 else 2
    check_exact(case.net(), case.batch(10, 0), case.loss, count, chunks=4, **settings)


class Masked(Net):
    """Makes a mask and positions once, and uses them between layers and in them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor, *, positions: Any) -> Tensor:
            return self.linear(x).masked_fill(mask, 0.5) + positions[0]

    def prepare(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.register_buffer("frequency", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        mask, positions = x > 1, self.frequency.cos()
        x = self.a(x)
        for layer in self.layers:
            x = layer(x, mask, positions=(positions,))
            steps = torch.arange(x.shape[-1], device=mask.device)  # a device asked of any value
            x = x * steps.to(x.dtype) + torch.ones(8, device=x.device) * self.frequency
        return self.d(x.masked_fill(mask, 0.0))


class InContainers(Net):
    """Passes values with and without gradients in containers and objects that layers add to."""

    class Cache:
        def __init__(self) -> None:
            self.values: list[Tensor] = []

    @dataclass
    class Output:
        x: Tensor
        mask: Tensor

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, output: Any, cache: Any, table: dict[str, Any]) -> Any:
            x = self.linear(output.x).masked_fill(output.mask, 0.0)
            cache.values.append(x)
            table["sum"] = table["sum"] + x
            mean = torch.stack([value.to(x.device) for value in cache.values]).mean(0)
            return InContainers.Output(mean + table["sum"], output.mask)

    def prepare(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache, table = self.Cache(), {"sum": x.cos()}
        output = self.Output(self.a(x), x > 1)
        for layer in self.layers:
            output = layer(output, cache, table)
        return self.d(output.x) + sum(cache.values[:2]) + table["sum"]


class ChangesInPlace(Net):
    """Changes earlier stages' values in place, without using what the changes return."""

    def forward(self, x: Tensor) -> Tensor:
        count, x = torch.zeros_like(x), self.a(x).tanh()
        first = x * 1
        for layer in (self.b, self.c, self.d):
            x = layer(x).tanh()
            count.add_(x.detach())
            first.mul_(x)
        return x * count + first


class SharedParts(Net):
    """Ties a weight and a buffer, and uses a parameter between layers."""

    class Layer(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).tanh() * self.table

    def prepare(self) -> None:
        table = torch.linspace(0.5, 1, 8)
        self.layers = nn.ModuleList(self.Layer(table) for _ in range(3))
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        self.d.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.scale
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.d(x) @ self.a.weight


class SkipsStages(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x).tanh()
        return self.d(self.c(self.b(first).tanh()).tanh()) * x + first


NETS = [Masked, InContainers, ChangesInPlace, SharedParts, SkipsStages]


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "zb-h1"}, {"schedule": "zb-v", "stages_per_device": 2}, SETTINGS[1]],
    ids=["1f1b", "zb-h1", "zb-v", "recomputed"],
)
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.quick_cases(3)
def test_values_move_to_the_device_of_the_stage_that_uses_them(
    kind: type[nn.Module], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    check_exact(kind(), batch, F.mse_loss, 2 if settings else 3, **settings)


@pytest.mark.parametrize("kind", NETS)
def test_evaluation_on_several_devices_equals_the_module(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = kind().eval()
    plain, x = copy.deepcopy(net), torch.randn(ROWS, 8)
    with stand_in_gpus(3) as gpus, torch.no_grad():
        model = model_on(gpus, net, example_inputs=x).eval()
        outputs = [on_host(model(x)) for _ in range(2)]
        expected = torch.cat([plain(part.clone()) for part in x.tensor_split(CHUNKS)])
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_value_is_copied_once_for_all_uses_in_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)

    class Uses(Net):
        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 1).to(torch.float64)  # recognised by its type
            x = self.b(self.a(x))
            for _ in range(3):
                x = self.c(x) * mask.float() + mask.shape[0]
            return self.d(x * mask.float())

    batch = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    with stand_in_gpus(2) as gpus:
        model = model_on(gpus, Uses(), example_inputs=batch[0], self_check=False)
        copied_masks = []
        copy_to = gpus.copy

        def counted(tensor: Tensor, device: torch.device) -> Tensor:
            if tensor.dtype == torch.float64:
                copied_masks.append(device)
            return copy_to(tensor, device)

        monkeypatch.setattr(gpus, "copy", counted)
        model.train_step(*batch, F.mse_loss)
    assert copied_masks == [gpus.devices[1]] * CHUNKS


class ChangesABuffer(Net):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(self.c(self.b(self.a(x))))
        self.count.add_(1)
        return x * self.count


class ChangesAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = x * 1  # without a gradient
        row = first[0]
        x = self.c(self.b(self.a(x)))
        first.mul_(2)
        return self.d(x) * first + row


class ChangesAViewOfTwoStages(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * 1
        row = x[0]
        x.mul_(self.b(x).detach())
        return self.d(self.c(x.tanh())) + row


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChangesABuffer, "changes 'count' in place"),
        (ChangesAView, "through another view"),
        (ChangesAViewOfTwoStages, "through another view"),
    ],
)
def test_a_change_that_another_device_cannot_see_is_refused(
    kind: type[nn.Module], message: str
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    with stand_in_gpus(2) as gpus:
        split = [1, 3] if kind is ChangesAViewOfTwoStages else "uniform"
        model = model_on(gpus, kind(), example_inputs=x, self_check=False, split=split)
        with pytest.raises(SplitError, match=message):
            model.train_step(x, y, F.mse_loss)


def test_steps_after_the_first_that_are_compared_wait_for_no_device() -> None:
    with stand_in_gpus(3) as gpus:
        model = model_on(gpus, CASES["linear"].net(), chunks=4)
        for seed in range(COMPARED + 2):
            if seed == COMPARED:
                gpus.syncs = 0
            model.train_step(*CASES["linear"].batch(10, seed), CASES["linear"].loss)
        assert gpus.syncs == 0
