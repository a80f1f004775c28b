"""The exactness matrix: its cells, thinned by pairwise choice, and the check of one cell.

A cell trains a model for some steps as a pipeline, and the unsplit model on the same micro-batches
in the same order, one replica after the other. Losses, every gradient, buffer and weight must be
equal, bit for bit wherever both add up the same numbers in the same order.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain import HybridModel, World
from hybridtrain._base.microbatch import chunk_sizes, split
from hybridtrain._base.precision import AUTOCAST, autocast
from hybridtrain.graph import layers_of
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.schedule import registered

from .compare import micro_batches
from .nets import CASES, Case
from .schedules import BUILT_IN

STEPS = 3
SEED = 5
# Of the largest entry of a tensor, where sums are taken in another order. In half precision a last
# bit of a weight can tip the rounding of an activation, of 8 or 11 bits.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Cell:
    case: str
    nb_part: int
    stages_per_device: int
    chunks: int
    schedule: str
    max_inflight: int | None
    recompute: Any
    precision: str
    rows: int
    accumulate: int

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


AXES: list[list[Any]] = [
    [
        *("linear", "conv", "dropout", "u_net", "tied_gpt"),
        *("stateful", "padded", "masked_lm", "weighted"),
    ],
    [1, 2, 3, 4],
    [1, 2],
    [1, 4, 7],
    list(BUILT_IN),
    [None, 2],
    ["never", "except_last", "always", "every-2"],
    list(AUTOCAST),
    [10, 12, 3],
    [1, 2],
]


# So many of `cells` have every value of every axis. The others are thorough.
FIRST = 9


def cells() -> list[Cell]:
    """Every pair of values of any two axes is in at least one cell."""
    from allpairspy import AllPairs

    return list(dict.fromkeys(Cell(*row) for row in AllPairs(AXES, filter_func=can_be)))


def can_be(row: list[Any]) -> bool:
    """Whether the schedule of a row, which may still be incomplete, has its stages per device."""
    return len(row) < 5 or registered(row[4]).stages_per_device in (None, row[2])


def random_cells(count: int) -> list[Cell]:
    """The same choice each time."""
    possible = [row for row in itertools.product(*AXES) if can_be(list(row))]
    return [Cell(*row) for row in random.Random(0).sample(possible, count)]


def check_cell(cell: Cell, rank: int = 0, replicas: int = 1, **world: Any) -> None:
    """Trains `cell` and the unsplit model side by side; all ranks call it together.

    `rank` is that of the replica; `world` are further arguments of `World.from_env`.
    """
    for where, mine, theirs, exact in compared(cell, rank, replicas, **world):
        found = difference(mine, theirs)
        allowed = 0.0 if exact else TOLERANCE[cell.precision]
        assert found <= allowed, f"{cell}, rank {rank}, {where}: differs by {found}"


def compared(
    cell: Cell,
    rank: int = 0,
    replicas: int = 1,
    devices: str | Sequence[str] = "cpu",
    **world: Any,
) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
    """Trains `cell` on `devices`, and the unsplit model on the first of them.

    Yields what is compared, the pipeline's tensor, the unsplit model's, and whether they must be
    equal bit for bit. They must not where sums are taken in another order: over replicas, over both
    uses of a tied weight, or by a device.
    """
    case = CASES[cell.case]
    device = torch.device(devices if isinstance(devices, str) else devices[0])
    base = case.net()
    model = HybridModel(
        copy.deepcopy(base),
        World.from_env(cell.nb_part, devices, timeout_s=60, **world),
        stages_per_device=cell.stages_per_device,
        chunks=cell.chunks,
        schedule=cell.schedule,
        max_inflight=cell.max_inflight,
        recompute={"every": 2} if cell.recompute == "every-2" else cell.recompute,
        precision=cell.precision,
        seed=SEED,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = Unsplit(base.to(device), case, cell, replicas)
    exact = replicas == 1 and cell.case != "tied_gpt" and device.type == "cpu"
    # the unsplit model adds up sums and divides once
    exact = exact and case.loss_sum is None
    # an exact power of two, so that scaling changes no bit unless something overflows
    scale = 2.0**10 if cell.precision == "fp16" else 1.0
    for step in range(STEPS):
        batches = [
            # replicas differ in the number of samples too
            [
                case.batch(cell.rows - r, 100 * step + 10 * part + r)
                for part in range(cell.accumulate)
            ]
            for r in range(replicas)
        ]
        total = sum(len(targets) for own in batches for _, targets in own)
        weights: Any = [len(targets) * replicas / total for _, targets in batches[rank]]
        if case.loss_sum is not None:
            weights = model.step_weights(batches[rank], case.loss)
        losses = []
        for part, (inputs, targets) in enumerate(batches[rank]):
            out = model.train_step(
                inputs,
                targets,
                case.loss,
                weight=weights[part],
                sync=part + 1 == cell.accumulate,
                scale_loss=lambda loss: loss * scale,
            )
            losses.append(out.loss)
        moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
        expected = reference.gradients(moved, scale)
        for mine, theirs in zip(losses, expected[rank], strict=True):
            if not model.owns_output:
                break
            yield f"loss of step {step}", mine, theirs, exact
        own = dict(reference.net.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            yield f"gradient of {name} in step {step}", parameter.grad, own[name].grad, exact
        gradients = [p.grad for p in reference.net.parameters() if p.grad is not None]
        yield f"norm in step {step}", model.grad_norm(), get_total_norm(gradients), exact
        for parameter in [*model.parameters(), *reference.net.parameters()]:
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step()
        reference.optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            yield f"{name} after step {step}", parameter, own[name], exact
            if not exact:  # the next step is compared from equal weights again
                own[name].data.copy_(parameter.data)
    inputs, targets = case.batch(cell.rows, 999)
    model.sync_buffers()
    state = model.state_dict()
    assert list(state) == list(reference.net.state_dict())
    for name, value in reference.net.state_dict().items():
        yield f"{name} at the end", state[name], value, exact
    model.eval()
    output, expected_output = model(inputs), reference.outputs(inputs)
    if model.owns_output:
        yield "output", output, expected_output, exact


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest entry; 0 if all are equal bit for bit."""
    mine = mine.detach().to(theirs.device)
    if torch.equal(mine, theirs):
        return 0.0
    biggest = max(float(theirs.detach().abs().max()), 1e-3)
    found = float((mine.double() - theirs.detach().double()).abs().max()) / biggest
    return math.inf if math.isnan(found) else found


class Unsplit:
    """The unsplit model, with the gradients of all replicas and micro-batches added up."""

    def __init__(self, net: nn.Module, case: Case, cell: Cell, replicas: int) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self._case, self._cell = case, cell
        self._draws = [LayerRNG(SEED, r) for r in range(replicas)]
        for draws in self._draws:
            draws.follow([(layer, 0) for layer in range(64)])

    def gradients(self, batches: list[list[tuple[Any, Tensor]]], scale: float) -> list[Any]:
        total = sum(self._case.count(targets) for own in batches for _, targets in own)
        # every replica begins a train_step with the buffers of replica 0
        buffers = {name: b.clone() for name, b in self.net.named_buffers()}
        first: dict[str, Tensor] = {}
        losses: list[list[Tensor]] = [[] for _ in batches]
        for part in range(self._cell.accumulate):
            for r, own in enumerate(batches):
                restore(self.net, buffers)
                losses[r].append(self._train_step(*own[part], self._draws[r], total, scale))
                if r == 0:
                    first = {name: b.clone() for name, b in self.net.named_buffers()}
            buffers = first
        restore(self.net, first)
        return losses

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Tensor:
        """The outputs of an evaluation, in the micro-batches of the pipeline."""
        self.net.eval()
        rows = len(tree_leaves(inputs)[0])
        parts = split(inputs, chunk_sizes(rows, self._cell.chunks))
        device = next(self.net.parameters()).device
        with autocast(self._cell.precision, device.type):
            moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), parts)
            return torch.cat([self.net(part) for part in moved])

    def _train_step(
        self, inputs: Any, targets: Tensor, draws: LayerRNG, total: float, scale: float
    ) -> Tensor:
        rows = self._case.count(targets)
        losses = []
        for microbatch, (x, y) in enumerate(micro_batches(inputs, targets, self._cell.chunks)):
            with autocast(self._cell.precision, targets.device.type):
                for index, layer in enumerate(layers_of(self.net)):
                    with draws.drawing_in(microbatch) as own:
                        own.at(index, index)
                        x = layer.module(x)
                if self._case.loss_sum is not None:
                    loss = self._case.loss_sum(x, y)
                else:
                    loss = self._case.loss(x, y)
            if self._case.loss_sum is not None:
                losses.append(loss.detach().float())
                (loss * (scale / total)).backward()
                continue
            losses.append(loss.detach().float() * len(y))
            (loss * ((rows / total) * len(y) / rows) * scale).backward()
        draws.end_step()
        return torch.stack(losses).sum() / (rows or 1)


def restore(net: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
