"""The memory of a replica: the most in a step, and between two steps, in multiples of the weights.

Replicas of one process each, with all layers of a stack of linear ones, and AdamW. Resident memory
is the kernel's: `VmHWM` over the last step, which begins with `train_step`, and `VmRSS` after it,
with the gradients, less that of the same process after it has trained a tiny model. glibc gives
blocks back as they are freed (`MALLOC_MMAP_THRESHOLD_`), so that what is free is not counted.

A second table is of one process that runs several logical replicas.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, ShardedOptimizer, World
from hybridtrain.data import TrainLoader
from hybridtrain.options import SHARD_MODES
from scripts.bench.big_model import resident
from scripts.bench.common import print_footer, print_table, square_loss


def work(options: argparse.Namespace) -> None:
    """Trains a tiny model, then the large one, and prints this process's figures."""
    world = World.from_env(1, "cpu", timeout_s=3600, replicas=options.logical[0] or None)

    def train(width: int) -> tuple[int, int, int]:
        layers = [nn.Linear(width, width, bias=False) for _ in range(options.layers)]
        net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        weights = sum(parameter.nbytes for parameter in net.parameters())
        model = HybridModel(net, world, chunks=options.chunks[0], shard=options.shard[0])
        del net, layers
        if options.shard[0] == "optimizer":
            optimizer = ShardedOptimizer(model, AdamW)
        else:
            optimizer = AdamW(model.parameters())
        inputs = torch.randn(8 * world.logical_replicas, width)
        loader = TrainLoader(TensorDataset(inputs, inputs), len(inputs), world)
        batch = next(loader.stream())
        for _ in range(4):  # DDP's buckets are made anew in the second step
            optimizer.zero_grad()
            world.gather(None)
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
            model.train_step(batch.inputs, batch.targets, square_loss)
            optimizer.step()
        return weights, resident("VmHWM"), resident("VmRSS")

    train(8)
    gc.collect()
    _, _, before = train(8)
    gc.collect()
    weights, most, between = train(options.width)
    figures = world.gather(((most - before) / weights, (between - before) / weights))
    if world.is_main:
        print(*max(figures))
    world.close()


def main() -> None:
    """Starts the processes for each row, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--replicas", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--logical", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--shard", nargs="+", default=list(SHARD_MODES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return

    def measure(processes: int, logical: int, chunks: int, shard: str) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), "-m", "scripts.bench.replicas_memory"]
        command += ["--worker", "--layers", str(options.layers), "--width", str(options.width)]
        command += ["--chunks", str(chunks), "--shard", shard, "--logical", str(logical)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        most, between = map(float, done.stdout.split())
        return [f"{most:.2f} W", f"{between:.2f} W"]

    rows = [
        [shard, str(replicas), str(chunks), *measure(replicas, 0, chunks, shard)]
        for replicas, chunks, shard in product(options.replicas, options.chunks, options.shard)
    ]
    if rows:
        columns = ["shard", "replicas", "micro-batches", "most in a step", "between steps"]
        print_table(columns, rows)
    rows = [[str(logical), *measure(1, logical, 2, "none")] for logical in options.logical]
    if rows:
        print_table(["replicas in one process", "most in a step", "between steps"], rows)
    print_footer(
        f"{options.layers} linear layers of width {options.width} without bias, AdamW, fp32; W are "
        f"the bytes of the weights; the replica with the most"
    )


if __name__ == "__main__":
    main()
