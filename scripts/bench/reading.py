"""Bytes that each process of a pipeline reads from its data set, and its peak memory.

A pipeline with a stage in each process (`world.engine=distributed`) trains on samples of 1 MiB from
a file. The batches are read where they are needed, or everywhere, as in a user's own loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import Batch, TrainLoader
from hybridtrain.model import TrainStepResult
from hybridtrain.options import LoaderOptions
from scripts.bench.big_model import resident
from scripts.bench.common import print_footer, print_table, square_loss

MIB = 1 << 20
SAMPLES, BATCH, WIDTH = 256, 32, 64


class File(Dataset[Any]):
    """Samples of 1 MiB in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns a sample of float32, of shape (MIB / 4,), and its number."""
        with self.path.open("rb") as file:
            file.seek(index * MIB)
            return torch.frombuffer(bytearray(file.read(MIB)), dtype=torch.float32), index


class Everywhere(Trainer):
    """Overrides `training_step`, so that each process reads whole batches."""

    def training_step(self, batches: Sequence[Batch], timeline: bool) -> list[TrainStepResult]:
        """Trains as `Trainer` does."""
        return super().training_step(batches, timeline)


class First(nn.Module):
    """Keeps little of a sample."""

    def forward(self, value: Tensor) -> Tensor:
        """Returns the first numbers of each sample, of shape (samples, WIDTH)."""
        return value[:, :WIDTH]


def read_bytes() -> int:
    """Returns how much this process and its workers that have ended have read, by the kernel."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def work(file: Path, processes: int, everywhere: bool) -> None:
    """Trains one epoch, and prints the figures of all processes."""
    world = World.from_env(processes, "cpu", engine="distributed")
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(world.size - 1)]
    model = HybridModel(nn.Sequential(First(), *layers), world, chunks=4, split="uniform")
    before, memory = read_bytes(), resident("VmRSS")
    loader = TrainLoader(File(file), BATCH, world, options=LoaderOptions())
    kind = Everywhere if everywhere else Trainer
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kind(model, optimizer, square_loss, loader, epochs=1, log_every=100).fit()
    figures = world.gather((read_bytes() - before, resident("VmHWM") - memory))
    if world.is_main:
        print(*(f"{value / MIB:.1f}" for pair in figures for value in pair))
    world.close()


def main() -> None:
    """Starts the processes for both ways, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--everywhere", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file is not None:
        work(options.file, options.processes, options.everywhere)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples"
        with file.open("wb") as written:
            for _ in range(SAMPLES):
                written.write(torch.rand(MIB // 4).numpy().tobytes())
        for name, flags in (("where needed", []), ("everywhere", ["--everywhere"])):
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            processes = str(options.processes)
            command += [processes, "-m", "scripts.bench.reading", "--processes", processes]
            command += ["--file", str(file)]
            output = subprocess.run(
                [sys.executable, *command, *flags], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            values = output.split()
            for what, column in (("read", values[::2]), ("memory", values[1::2])):
                rows.append([f"{what}, {name}", *column])
    print_table(["MiB", *(f"process {rank}" for rank in range(options.processes))], rows)
    print_footer(
        f"One epoch of {SAMPLES} samples of 1 MiB in batches of {BATCH}. Read: all files, by the "
        "kernel's count. Memory: the most resident, less that before the data set was made."
    )


if __name__ == "__main__":
    main()
