"""The exactness matrix: its cells, thinned by pairwise choice, and the check of one cell.

A cell trains a model for some steps as a pipeline, and the unsplit model on the same micro-batches
in the same order, one replica after the other. Losses, every gradient, buffer and weight must be
equal, bit for bit wherever both add up the same numbers in the same order.
"""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from allpairspy import AllPairs
from torch import Tensor, nn

from hybridtrain.graph.layer import layers_of
from hybridtrain.pipeline.layer_rng import LayerRNG
from support.compare import hybrid, micro_batches
from support.nets import CASES, Case

STEPS = 3
SEED = 5
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    case: str
    nb_part: int
    stages_per_device: int
    chunks: int
    schedule: str
    max_inflight: int | None
    checkpoint: Any
    precision: str
    rows: int
    accumulate: int

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


AXES: list[list[Any]] = [
    ["linear", "conv", "dropout", "u_net", "tied_gpt"],
    [1, 2, 3, 4],
    [1, 2],
    [1, 4, 7],
    ["gpipe", "1f1b"],
    [None, 2],
    ["never", "except_last", "always", "every-2"],
    list(AUTOCAST),
    [10, 12, 3],
    [1, 2],
]


def cells(more: int = 0) -> list[Cell]:
    """Every pair of values of any two axes is in at least one cell; and `more` at random."""
    chosen = [tuple(row) for row in AllPairs(AXES)]
    chosen += random.Random(0).sample(list(itertools.product(*AXES)), more)
    return [Cell(*row) for row in dict.fromkeys(chosen)]


def check_cell(cell: Cell, rank: int = 0, replicas: int = 1) -> None:
    """Trains `cell` and the unsplit model side by side; all ranks call it together."""
    case = CASES[cell.case]
    base = case.net()
    model = hybrid(
        copy.deepcopy(base),
        cell.nb_part,
        cell.stages_per_device,
        chunks=cell.chunks,
        schedule=cell.schedule,
        max_inflight=cell.max_inflight,
        checkpoint={"every": 2} if cell.checkpoint == "every-2" else cell.checkpoint,
        precision=cell.precision,
        seed=SEED,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = Unsplit(base, case, cell, replicas)
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
        losses = []
        for part, (inputs, targets) in enumerate(batches[rank]):
            out = model.train_step(
                inputs,
                targets,
                case.loss,
                weight=len(targets) * replicas / total,
                sync=part + 1 == cell.accumulate,
                scale_loss=lambda loss: loss * scale,
            )
            losses.append(out.loss)
        expected = reference.gradients(batches, scale)
        where = f"{cell}, step {step}, rank {rank}"
        # one replica, one parameter each: the same numbers are added in the same order
        exact = replicas == 1 and cell.case != "tied_gpt"
        for mine, theirs in zip(losses, expected[rank], strict=True):
            # the mean over micro-batches is summed in another order than the engine does
            compare(mine, theirs, False, cell, f"{where}: loss")
        own = dict(reference.net.named_parameters())
        for name, parameter in model.named_parameters():
            compare(parameter.grad, own[name].grad, exact, cell, f"{where}: gradient of {name}")
        for parameter in [*model.parameters(), *reference.net.parameters()]:
            assert parameter.grad is not None
            parameter.grad /= scale
        optimizer.step()
        reference.optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            compare(parameter, own[name], exact, cell, f"{where}: {name} after the step")
            if not exact:  # the next step is compared from equal weights again
                own[name].data.copy_(parameter.data)
    model.sync_buffers()
    state = model.state_dict()
    assert list(state) == list(reference.net.state_dict())
    for name, value in reference.net.state_dict().items():
        compare(state[name], value, exact, cell, f"{cell}, rank {rank}: {name} at the end")


class Unsplit:
    """The unsplit model, with the gradients of all replicas and micro-batches added up."""

    def __init__(self, net: nn.Module, case: Case, cell: Cell, replicas: int) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self._case, self._cell = case, cell
        self._draws = [
            LayerRNG(SEED, r, [(layer, 0) for layer in range(64)]) for r in range(replicas)
        ]

    def gradients(self, batches: list[list[tuple[Any, Tensor]]], scale: float) -> list[Any]:
        total = sum(len(targets) for own in batches for _, targets in own)
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

    def _train_step(
        self, inputs: Any, targets: Tensor, draws: LayerRNG, total: int, scale: float
    ) -> Tensor:
        rows = len(targets)
        dtype = AUTOCAST[self._cell.precision]
        mean = torch.zeros(())
        for microbatch, (x, y) in enumerate(micro_batches(inputs, targets, self._cell.chunks)):
            with torch.autocast("cpu", dtype, cache_enabled=False) if dtype else nullcontext():
                for index, layer in enumerate(layers_of(self.net)):
                    with draws.seeded(index, microbatch):
                        x = layer.module(x)
                loss = self._case.loss(x, y)
            mean += loss.detach() * len(y) / rows
            (loss * ((rows / total) * len(y) / rows) * scale).backward()
        draws.end_step(False)
        return mean


def restore(net: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])


def compare(mine: Any, theirs: Any, exact: bool, cell: Cell, where: str) -> None:
    assert mine is not None, where
    if exact:
        assert torch.equal(mine, theirs), f"{where}: differs by {(mine - theirs).abs().max()}"
        return
    # the sums over replicas, or over both uses of a tied weight, are taken in another order; in
    # half precision, a last bit of a weight can tip the rounding of an activation, of 8 or 11 bits
    tolerance = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[cell.precision]
    biggest = max(float(theirs.detach().abs().max()), 1e-3) if theirs.numel() else 1.0
    difference = float((mine.detach().double() - theirs.detach().double()).abs().max())
    assert difference <= tolerance * biggest, f"{where}: {difference} of {biggest}"
