"""The activations that are alive at one time on each device, in MiB: measured, not computed.

Every tensor that the layers make in a forward, or are given, is noted by its storage, and struck
off when that storage is freed, whoever held it: autograd's saved tensors, a value on its way to
the next stage, a list somewhere. What is counted is the sum at its highest, looked at whenever a
layer returns. Parameters are left out, gradients, and the batch itself, which is the caller's. A
value that goes from one stage to the next is shared memory here; it is counted where it arrives.
"""

from __future__ import annotations

import argparse
import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridtrain import pipelined
from hybridtrain.model import HybridModel
from hybridtrain.schedule import Placement, place_of, registered
from hybridtrain.world import World
from scripts.bench.common import (
    gpipe_library,
    optional,
    print_footer,
    print_table,
    square_loss,
)

BLOCKS, WIDTH, ROWS, LENGTH = 8, 128, 4, 64


class Ledger:
    """The storages alive on one device."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.ignored: set[int] = set()
        self.peak = 0

    def note(self, tensor: Tensor) -> None:
        """Counts the tensor's storage, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive and key not in self.ignored:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)

    def strike(self, tensor: Tensor) -> None:
        """No longer counts the tensor's storage."""
        self.alive.pop(tensor.untyped_storage()._cdata, None)

    def look(self) -> None:
        """Is this the highest so far?"""
        self.peak = max(self.peak, sum(list(self.alive.values())))


class _Note(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._ledger.note(leaf)
        return result


class Block(nn.Module):
    """A residual MLP that keeps a ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.ledger = Ledger()
        self.sends = False

    def forward(self, x: Tensor) -> Tensor:
        """Shape (N, T, width), in and out."""
        ledger = self.ledger
        ledger.note(x)
        with _Note(ledger):
            y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        if self.sends:
            ledger.strike(y)
        ledger.look()
        return y


def network() -> nn.Sequential:
    """A chain of blocks."""
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def keep_ledgers(
    net: nn.Sequential,
    x: Tensor,
    devices: int,
    per_device: int = 1,
    placement: Placement = "loop",
) -> list[Ledger]:
    """One ledger a device; the blocks are dealt out evenly. `x` is the caller's batch."""
    ledgers = [Ledger() for _ in range(devices)]
    ledgers[0].ignored.add(x.untyped_storage()._cdata)
    per_stage = BLOCKS // (devices * per_device)
    for index, block in enumerate(net):
        stage = index // per_stage
        block.ledger = ledgers[place_of(stage, devices, placement)]
        block.sends = (index + 1) % per_stage == 0 and index + 1 < len(net)
        for parameter in block.parameters():
            block.ledger.ignored.add(parameter.untyped_storage()._cdata)
    return ledgers


def hybrid(
    x: Tensor, devices: int, chunks: int, schedule: str, per_device: int, recompute: str
) -> list[Ledger]:
    """Two steps of this project's."""
    net = network()
    ledgers = keep_ledgers(net, x, devices, per_device, registered(schedule).placement)
    model = HybridModel(
        net,
        World.from_env(devices, devices="cpu"),
        chunks=chunks,
        schedule=schedule,
        stages_per_device=per_device,
        recompute=recompute,
    )
    for _ in range(2):
        model.train_step(x, None, square_loss)
        model.zero_grad()
    return ledgers


class WithLoss(nn.Module):
    """The chain of blocks; with labels it returns a loss too, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the output, and with labels the loss."""
        output = self.blocks(x)
        return {"logits": output} if labels is None else {"loss": square_loss(output, labels)}


def piped(x: Tensor, devices: int, chunks: int, has_loss: bool) -> list[Ledger]:
    """Two steps of `pipelined(model)` after the first one, which always runs all forwards first."""
    net = WithLoss()
    ledgers = keep_ledgers(net.blocks, x, devices)
    split = [BLOCKS // devices] * devices
    model = pipelined(net, nb_part=devices, chunks=chunks, split=split)
    labels = torch.zeros(len(x)) if has_loss else None
    for step in range(3):
        output = model(x, labels)
        loss = output["loss"] if has_loss else square_loss(output["logits"], None)
        loss.backward()
        model.zero_grad()
        if step == 0:
            for ledger in ledgers:
                ledger.peak = 0
    return ledgers


def peer(x: Tensor, devices: int, chunks: int, checkpoint: str) -> list[Ledger]:
    """Two steps of torchgpipe's."""
    net = network()
    ledgers = keep_ledgers(net, x, devices)
    model = gpipe_library(net, [BLOCKS // devices] * devices, chunks, checkpoint)
    for _ in range(2):
        square_loss(model(x), None).backward()
        model.zero_grad()
    return ledgers


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16, 32])
    options = parser.parse_args()
    torch.set_num_threads(1)
    devices = options.devices
    kinds = {
        "gpipe": ("gpipe", 1, "never"),
        "1f1b": ("1f1b", 1, "never"),
        "interleaved, 2 stages per device": ("1f1b", 2, "never"),
        "zb-v, 2 stages per device": ("zb-v", 2, "never"),
        "v-half, 2 stages per device": ("v-half", 2, "never"),
        "v-min, 2 stages per device": ("v-min", 2, "never"),
        "gpipe, recompute always": ("gpipe", 1, "always"),
        "1f1b, recompute always": ("1f1b", 1, "always"),
    }
    wrapped = {"pipelined, the model's loss": True, "pipelined, a loss outside of it": False}
    peers = {"torchgpipe": "never", "torchgpipe, checkpoint always": "always"}
    rows: list[list[object]] = []
    for kind in [*kinds, *wrapped, *peers]:
        for chunks in options.chunks:
            x = torch.randn(chunks * ROWS, LENGTH, WIDTH)
            cells = ["not installed"] * devices
            ledgers = None
            if kind in kinds:
                ledgers = hybrid(x, devices, chunks, *kinds[kind])
            elif kind in wrapped:
                ledgers = piped(x, devices, chunks, wrapped[kind])
            elif optional("torchgpipe"):
                ledgers = peer(x, devices, chunks, peers[kind])
            if ledgers is not None:
                cells = [f"{ledger.peak / 2**20:.2f}" for ledger in ledgers]
            rows.append([kind, chunks, *cells])
            gc.collect()
    print_table(["", "m", *(f"device {d}" for d in range(devices))], rows)
    print_footer(
        f"MiB of activations alive at the peak; {BLOCKS} residual MLPs of width {WIDTH}, "
        f"{ROWS} samples of {LENGTH} per micro-batch ({ROWS * LENGTH * WIDTH * 4 / 2**20:.3f} MiB "
        f"in and out), so that a batch grows with m."
    )


if __name__ == "__main__":
    main()
