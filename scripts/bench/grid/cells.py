"""The cells of the grid, and why some of them are impossible.

The sweep is that of the IDRIS page *PyTorch: parallélisme hybride (modèle et données)*: 4 and 8
devices; 1 to 4 and 2 to 8 processes; batches of 32 to 256 samples per device; 1 to 32 chunks. The
page gives the ends of each range, and the powers of two between them are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

DEVICES = (4, 8)
BATCHES = (32, 64, 128, 256)
CHUNKS = (1, 2, 4, 8, 16, 32)

# Devices of a pipeline, up to those of a node of Jean Zay, which a process cannot leave.
NB_PARTS = (4, 2, 1)


@dataclass(frozen=True, order=True)
class Cell:
    """One configuration.

    Attributes:
        devices: all of them.
        ntasks: processes, each with one copy of the model (Slurm's word for them).
        batch_per_device: samples; a process with a pipeline of n devices has n times as many.
        chunks: micro-batches that the batch of a process is cut into.
    """

    devices: int
    ntasks: int
    batch_per_device: int
    chunks: int

    @property
    def nb_part(self) -> int:
        """The devices of a process, and so the stages of its pipeline."""
        return self.devices // self.ntasks

    @property
    def samples(self) -> int:
        """The samples of a step, over all processes."""
        return self.devices * self.batch_per_device

    @property
    def micro_batch(self) -> int:
        """The samples of a micro-batch."""
        return self.nb_part * self.batch_per_device // self.chunks

    def __str__(self) -> str:
        return (
            f"{self.devices} devices, {self.ntasks} tasks, batch {self.batch_per_device}, "
            f"{self.chunks} chunks"
        )


def grid(
    devices: Sequence[int] = DEVICES,
    batches: Sequence[int] = BATCHES,
    chunks: Sequence[int] = CHUNKS,
    ntasks: Sequence[int] | None = None,
) -> list[Cell]:
    """Returns all cells, the impossible ones too.

    Args:
        devices: one figure for each.
        batches: samples per device.
        chunks: micro-batches per process.
        ntasks: None for pipelines of 4, 2 and 1 devices.
    """
    return [
        Cell(number, tasks, batch, m)
        for number in devices
        for tasks, batch, m in product(
            ntasks or [number // n for n in NB_PARTS if number % n == 0], batches, chunks
        )
    ]


def why_impossible(cell: Cell, layers: int, devices_per_node: int) -> str:
    """Returns why a cell has no value; an empty string if it can run.

    Args:
        cell: the configuration.
        layers: those of the model, embedding and classifier included.
        devices_per_node: devices that one process can reach.
    """
    if cell.devices % cell.ntasks:
        return f"{cell.ntasks} tasks do not divide {cell.devices} devices"
    if cell.nb_part == 1 and cell.chunks > 1:
        return "one device per task is no pipeline, and has nothing to cut into chunks"
    if cell.nb_part > devices_per_node:
        return f"a task cannot have {cell.nb_part} devices on nodes of {devices_per_node}"
    # the first and the last stage have the embedding and the classifier beside a layer
    if cell.nb_part > layers - 2:
        return f"{cell.nb_part} stages for {layers - 2} Transformer layers"
    if cell.nb_part * cell.batch_per_device % cell.chunks:
        return f"{cell.chunks} chunks do not divide the batch of a task"
    return ""


def stage_layers(layers: int, nb_part: int) -> list[int]:
    """Returns the layers of each stage, cut as on the page.

    The Transformer layers in equal parts, the embedding with the first, the classifier with the
    last. Where they do not divide evenly, the middle stages get one more: the ends have enough.
    """
    each, rest = divmod(layers - 2, nb_part)
    counts = [each] * nb_part
    middle_out = sorted(range(nb_part), key=lambda stage: abs(stage - (nb_part - 1) / 2))
    for stage in middle_out[:rest]:
        counts[stage] += 1
    counts[0] += 1
    counts[-1] += 1
    return counts
