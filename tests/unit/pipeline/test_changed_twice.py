"""A recomputation changes nothing twice, and hooks hold in it and in both parts of a backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain import HybridModel, World

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

ROWS, CHUNKS, STEPS = 7, 3, 6


class Statistics:
    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []


class Counts(nn.Module):
    """Counts its forwards in the way that `count` does, and may use the number."""

    def __init__(self, count: Callable[[Counts], int], uses: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.statistics = 0, Statistics()
        self.table: dict[str, Any] = {"seen": [], "inner": {"calls": 0}}
        self.array = np.zeros(2)
        self.pair = (Statistics(), [Statistics()])
        self.count, self.uses = count, uses

    def forward(self, x: Tensor) -> Tensor:
        number = self.count(self)
        return self.linear(x * number if self.uses else x).tanh()


def _attribute(layer: Counts) -> int:
    layer.calls += 1
    return layer.calls


def _object(layer: Counts) -> int:
    layer.statistics.calls += 1
    return layer.statistics.calls


def _list_of_an_object(layer: Counts) -> int:
    layer.statistics.seen.append(1)
    return len(layer.statistics.seen)


def _list_in_a_dict(layer: Counts) -> int:
    layer.table["seen"].append(1)
    return len(layer.table["seen"])


def _dict_in_a_dict(layer: Counts) -> int:
    layer.table["inner"]["calls"] += 1
    return int(layer.table["inner"]["calls"])


def _array(layer: Counts) -> int:
    layer.array[1] += 1
    return int(layer.array[1])


def _object_in_a_list_in_a_tuple(layer: Counts) -> int:
    layer.pair[1][0].calls += 1
    return layer.pair[1][0].calls


COUNTS = [
    _attribute, _object, _list_of_an_object, _list_in_a_dict, _dict_in_a_dict, _array,
    _object_in_a_list_in_a_tuple,
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 8, generator=generator)


def pipeline(net: nn.Module, nb_part: int = 2, **options: Any) -> HybridModel:
    world = World.from_env(nb_part=nb_part, devices="cpu")
    return HybridModel(net, world, chunks=CHUNKS, example_inputs=batch()[0], **options)


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> None:
    for part, target in zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True):
        (F.mse_loss(net(part), target) * (len(part) / len(x))).backward()


def check_gradients(net: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("uses", [False, True], ids=["counts", "uses its count"])
@pytest.mark.parametrize("count", COUNTS)
def test_a_recomputed_layer_counts_each_forward_once(
    count: Callable[[Counts], int], uses: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Counts(count, uses), nn.Linear(8, 8), nn.Linear(8, 8))
    reference = copy.deepcopy(net)
    model = pipeline(net, recompute="always")
    for _ in range(STEPS):  # the first of them look for what a forward changes, later ones do not
        model.train_step(*batch(), F.mse_loss)
        plain_step(reference, *batch())
    assert count(net[1]) == STEPS * CHUNKS + 1
    check_gradients(net, reference)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_hooks_on_saved_tensors_hold_from_the_first_micro_batch_on(schedule: str) -> None:
    def packed(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        rounds = tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
        return tensor.to(torch.bfloat16) if rounds else tensor, tensor.dtype

    hooks = torch.autograd.graph.saved_tensors_hooks(packed, lambda pair: pair[0].to(pair[1]))
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    reference = copy.deepcopy(net)
    model = pipeline(net, schedule=schedule)
    with hooks:
        model.train_step(*batch(), F.mse_loss)
        plain_step(reference, *batch())
    check_gradients(net, reference)


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        if x.grad_fn is not None:
            x.grad_fn.register_hook(
                lambda inputs, _: tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in inputs)
            )
        return torch.tanh(x)


@pytest.mark.parametrize(
    "options",
    [{"schedule": "zb-h1"}, {"schedule": "zb-v", "stages_per_device": 2}, {"schedule": "1f1b"}],
    ids=str,
)
def test_hooks_of_graph_nodes_change_the_gradients_of_weights_in_both_parts_of_a_backward(
    options: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Clipped() for _ in range(6)))
    reference = copy.deepcopy(net)
    model = pipeline(net, self_check=False, **options)
    model.train_step(*batch(), F.mse_loss)
    plain_step(reference, *batch())
    check_gradients(net, reference)
