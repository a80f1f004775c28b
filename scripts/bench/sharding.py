"""The memory of a replica with each value of `shard`: outside a step, and the most in one.

Two replicas of a GPT in two processes, each with all stages. Bytes of weights, gradients and the
optimizer's state are those of the tensors that a process has after `optimizer.step()`, before
`zero_grad()`. Resident memory is the kernel's, less what the same process had after a tiny model
was trained: `VmRSS` there, and `VmHWM` over a step, which begins with `train_step`.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from hybridtrain import HybridModel, ShardedOptimizer
from hybridtrain.construction import give_back_memory
from hybridtrain.models import gpt
from hybridtrain.options import SHARD_MODES
from hybridtrain.world import World
from scripts.bench.big_model import VOCABULARY, loss, resident
from scripts.bench.common import print_footer, print_table


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """The bytes that this process has of tensors."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def work(options: argparse.Namespace) -> None:
    """Trains a tiny model, then the large one, and writes down this process's figures."""
    world = World.from_env(1, "cpu", timeout_s=3600)
    found: dict[str, float] = {}

    def train(layers: int, width: int) -> None:
        torch.manual_seed(0)
        net = gpt(VOCABULARY, options.length, layers, 16, width)
        net = net.to(getattr(torch, options.dtype))
        model = HybridModel(net, world, chunks=4, shard=options.shard)
        del net
        if options.shard == "optimizer":
            optimizer = ShardedOptimizer(model, AdamW)
        else:
            optimizer = AdamW(model.parameters())
        g = torch.Generator().manual_seed(world.rank)
        norms = []
        for step in range(options.steps):
            tokens = torch.randint(VOCABULARY, (4, options.length + 1), generator=g)
            world.gather(None)
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
            start = time.perf_counter()
            model.train_step(tokens[:, :-1], tokens[:, 1:], loss)
            norms.append(float(model.grad_norm()))
            optimizer.step()
            found["seconds"] = time.perf_counter() - start
            found["most in a step"] = resident("VmHWM")
            if step + 1 < options.steps:
                optimizer.zero_grad()
        parameters = list(model.parameters())
        found["norm"] = norms[-1]
        found["weights"] = bytes_of(parameters)
        found["gradients"] = bytes_of(p.grad for p in parameters)
        state = (value for entry in optimizer.state.values() for value in entry.values())
        found["state"] = bytes_of(value for value in state if value.dim() > 0)
        give_back_memory()
        found["resident"] = resident("VmRSS")

    train(2, 32)
    gc.collect()
    give_back_memory()
    before = resident("VmRSS")
    train(options.layers, options.width)
    found["resident"] -= before
    found["most in a step"] -= before
    Path(options.folder, f"rank{world.rank}.json").write_text(json.dumps(found))
    gc.collect()
    world.gather(None)
    world.close()


def main() -> None:
    """Starts the processes for each value of `shard`, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=32, help="tokens of a sample")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights, gradients and state: bfloat16 has room for a model twice as large",
    )
    parser.add_argument("--shard", nargs="+", default=list(SHARD_MODES))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        (options.shard,) = options.shard
        work(options)
        return
    names = ["weights", "gradients", "state", "resident", "most in a step"]
    rows = []
    for shard in options.shard:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", "2", "-m", "scripts.bench.sharding"]
            command += ["--layers", str(options.layers), "--width", str(options.width)]
            command += ["--length", str(options.length), "--steps", str(options.steps)]
            command += ["--dtype", options.dtype]
            subprocess.run([*command, "--shard", shard, "--folder", folder], check=True)
            ranks = [json.loads(Path(folder, f"rank{i}.json").read_text()) for i in range(2)]
        mib = [" ".join(f"{rank[name] / 2**20:.0f}" for rank in ranks) for name in names]
        rows.append([shard, *mib, f"{ranks[0]['norm']!r}", f"{ranks[0]['seconds']:.1f}"])
    print_table(["shard", *(f"{name}, MiB" for name in names), "norm", "seconds"], rows)
    print_footer(
        f"gpt with {options.layers} blocks of width {options.width} in {options.dtype}, AdamW, "
        f"2 replicas of one process each: the figures of both. {options.steps} steps of "
        f"4 micro-batches of {options.length} tokens."
    )


if __name__ == "__main__":
    main()
