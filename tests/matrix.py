"""The exactness matrix: cells, thinned by pairwise choice, and the unsplit model beside them.

A cell trains a model for some steps as a pipeline, and the unsplit model on the same micro-batches
in the same order, one replica after the other. Losses, every gradient, buffer and weight must be
equal, bit for bit wherever both add up the same numbers in the same order.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from allpairspy import AllPairs
from torch import Tensor, nn
from torch.nn import functional as F

from hybridtrain import HybridModel, World
from hybridtrain.graph.layer import layers_of
from hybridtrain.microbatch import chunk_sizes
from hybridtrain.models import transformer
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.skip import pop, stash

STEPS = 3
SEED = 5
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.stashes = (name,)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        stash(self.stashes[0], x)
        return F.max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.pops = (name,)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2)
        return F.relu(self.conv(torch.cat([x, pop(self.pops[0])], dim=1)))


class Tied(nn.Module):
    """The output layer of a language model, with the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def linear_net() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])


def batch_norm_net() -> nn.Module:
    def block(inputs: int, outputs: int) -> nn.Module:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(block(1, 4), block(4, 4), block(4, 1))


def dropout_transformer() -> nn.Module:
    return transformer(
        vocab_size=13, num_classes=3, max_len=6, d_model=8, nhead=2, d_hid=16, nlayers=6,
        dropout=0.2, pad_index=1,
    )  # fmt: skip


def u_net() -> nn.Module:
    return nn.Sequential(
        Down(1, 3, "a"), Down(3, 4, "b"), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, padding=1), Up(8, 3, "b"), Up(6, 3, "a"), nn.Conv2d(3, 1, 1),
    )  # fmt: skip


def tied_gpt() -> nn.Module:
    embedding = nn.Embedding(13, 8)
    return nn.Sequential(embedding, *[Block(8) for _ in range(5)], nn.LayerNorm(8), Tied(embedding))


def rows_of_floats(rows: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, *shape), torch.randn(rows, *shape)


def rows_of_reviews(rows: int) -> tuple[Any, Tensor]:
    tokens = torch.randint(2, 13, (rows, 6))
    mask = torch.arange(6).expand(rows, 6) >= torch.randint(2, 7, (rows, 1))
    return (tokens.masked_fill(mask, 1), mask), torch.randint(0, 3, (rows,))


def rows_of_text(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 13, (rows, 5)), torch.randint(0, 13, (rows, 5))


def classes_last(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Case:
    net: Callable[[], nn.Module]
    rows: Callable[[int], tuple[Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


CASES = {
    "linear": Case(linear_net, lambda n: rows_of_floats(n, 6), F.mse_loss),
    "batch_norm": Case(batch_norm_net, lambda n: rows_of_floats(n, 1, 4, 4), F.mse_loss),
    "transformer": Case(dropout_transformer, rows_of_reviews, classes_last),
    "u_net": Case(u_net, lambda n: rows_of_floats(n, 1, 8, 8), F.mse_loss),
    "tied_gpt": Case(tied_gpt, rows_of_text, classes_last),
}


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
    list(CASES),
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
    torch.manual_seed(1)
    base = case.net()
    net, world = copy.deepcopy(base), World.from_env(cell.nb_part, devices="cpu")
    checkpoint = {"every": 2} if cell.checkpoint == "every-2" else cell.checkpoint
    model = HybridModel(
        net,
        world,
        chunks=cell.chunks,
        schedule=cell.schedule,
        stages_per_device=cell.stages_per_device,
        max_inflight=cell.max_inflight,
        checkpoint=checkpoint,
        precision=cell.precision,
        seed=SEED,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = Unsplit(base, case, cell, replicas)
    # an exact power of two, so that scaling changes no bit unless something overflows
    scale = 2.0**10 if cell.precision == "fp16" else 1.0
    for step in range(STEPS):
        batches = [
            [data(case, cell, step, part, r) for part in range(cell.accumulate)]
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
    """The model as it is, with the gradients of all replicas and micro-batches added up."""

    def __init__(self, net: nn.Module, case: Case, cell: Cell, replicas: int) -> None:
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        self._case, self._cell = case, cell
        self._draws = [LayerRNG(SEED, r) for r in range(replicas)]

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
        sizes = chunk_sizes(len(targets), self._cell.chunks)
        rows = len(targets)
        dtype = AUTOCAST[self._cell.precision]
        mean = torch.zeros(())
        for microbatch, (x, y) in enumerate(parts(inputs, targets, sizes)):
            with torch.autocast("cpu", dtype, cache_enabled=False) if dtype else nullcontext():
                for index, layer in enumerate(layers_of(self.net)):
                    with draws.seeded(index, microbatch):
                        x = layer.module(x)
                loss = self._case.loss(x, y)
            mean += loss.detach() * sizes[microbatch] / rows
            (loss * ((rows / total) * sizes[microbatch] / rows) * scale).backward()
        draws.end_step(False)
        return mean


def data(case: Case, cell: Cell, step: int, part: int, replica: int) -> tuple[Any, Tensor]:
    """Different rows for every step, part and replica; replicas differ in number too."""
    torch.manual_seed(1000 * step + 100 * part + replica)
    return case.rows(cell.rows - replica)


def parts(inputs: Any, targets: Tensor, sizes: list[int]) -> Iterator[tuple[Any, Tensor]]:
    columns = [t.split(sizes) for t in (inputs if isinstance(inputs, tuple) else (inputs,))]
    for number, y in enumerate(targets.split(sizes)):
        x = tuple(column[number] for column in columns)
        yield (x if isinstance(inputs, tuple) else x[0]), y


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
