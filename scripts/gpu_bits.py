"""The same bits on any number of processes, and what they cost.

Run it by `scripts/gpu_check.sh --bits`. It trains a GPT of 354M parameters in bf16 with dropout,
with `replicas=4` on 1, 2 and 4 processes, which share the GPU over NCCL, and compares a digest of
weights, optimizer state and losses. The cost is the step of one process with `replicas=4` compared
with one by default, which chooses its kernels freely. More processes on one GPU show nothing about
speed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from hybridtrain import HybridModel, Loader, OptimizerStep, World
from hybridtrain.loss import cross_entropy
from hybridtrain.models.gpt import gpt
from scripts.bench.common import print_table
from scripts.gpu_check import COLUMNS, Size, facts_of

REPLICAS = 4
MOST_COST = 0.05
"""The part of a step that the same bits may cost."""
_DROPOUT = 0.1
_BATCHES = 8  # different ones
_SMALL = Size(2, 64, 4, 32, 256, 1, 8)


def train(device: str, size: Size, steps: int, replicas: int | None) -> dict[str, Any]:
    """Trains on all ranks, and returns the digest and the seconds of a step.

    Args:
        device: `cuda` or `cpu`.
        size: the model, and the micro-batches of a step of all replicas.
        steps: of these, the second half is timed.
        replicas: the number of logical replicas; None: the default, for one process.
    """
    world = World.from_env(1, device, replicas=replicas, share_gpus=device == "cuda")
    torch.manual_seed(0)
    net = gpt(size.vocabulary, size.length, size.layers, size.heads, size.width, _DROPOUT)
    net.head.linear.weight = net.embed.token.weight
    chunks = size.chunks // (replicas or 1)
    model = HybridModel(net, world, chunks=chunks, split="size", precision="bf16", seed=2)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    step = OptimizerStep(model, optimizer, clip_norm=1.0)
    batch_size = size.samples * size.chunks
    ids = torch.randint(size.vocabulary, (_BATCHES * batch_size, size.length + 1))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loader = Loader(data, batch_size, world, seed=1)
    losses, half, began = [], steps // 2, 0.0
    while step.number < steps:
        for batch in loader.batches():
            if step.number == half:
                losses.append(step.mean_loss())  # waits for the device
                began = time.perf_counter()
            step.run([batch], cross_entropy)
            if step.number == steps:
                break
    losses.append(step.mean_loss())
    seconds = (time.perf_counter() - began) / (steps - half)
    digests = world.gather(_digest(model.state_dict(), optimizer.state_dict(), losses))
    world.close()
    if len(set(digests)) > 1:
        raise RuntimeError(f"the ranks have different weights: {digests}")
    return {"digest": digests[0], "step_s": seconds, "loss": losses[-1]}


def _digest(*values: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    return digest.hexdigest()


def run_ranks(processes: int, arguments: Sequence[str]) -> int:
    """Runs this script in so many ranks; returns the exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", __file__, *arguments]
    return subprocess.run(command).returncode


def rows_of(results: dict[str, dict[str, Any]], steps: int, limit: float | None) -> list[list[str]]:
    """Returns the rows of the table.

    Args:
        results: by the number of processes, and of `default`, what `train` has returned.
        steps: of a run.
        limit: the part of a step that the same bits may cost; None: no verdict about time.
    """
    default, *counts = results
    first = results[counts[0]]
    rows = []
    for count in counts:
        same = results[count]["digest"] == first["digest"]
        said = f"{results[count]['digest'][:16]}, loss {results[count]['loss']:.4f}"
        several = f"{count} process{'es' * (count != '1')}"
        beside = "" if count == counts[0] else f"{counts[0]} process{'es' * (counts[0] != '1')}"
        row = [f"bits after {steps} steps, world.replicas={REPLICAS}", several, said, beside]
        rows.append([*row, "ok" if same else "FAILED other weights"])
    if "1" in counts:
        cost = results["1"]["step_s"] / results[default]["step_s"] - 1
        verdict = (
            "" if limit is None else "ok" if cost <= limit else f"FAILED more than {limit:.0%}"
        )
        said = f"{results['1']['step_s'] * 1e3:.1f} ms per step, {cost:+.1%}"
        beside = f"{results[default]['step_s'] * 1e3:.1f} ms by default"
        rows.append(["the cost of the same bits", "1 process", said, beside, verdict])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Launches the runs and prints the table; in a rank, trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny GPT, to try the script")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, default=Path("gpu_bits.json"), help="the table")
    # given to the ranks
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    # a rank of a test has its folder as the first argument
    options, _ = parser.parse_known_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script without")
    size = _SMALL if options.small else Size()
    if options.name:
        torch.set_num_threads(1)
        replicas = None if options.name == "default" else REPLICAS
        result = train(options.device, size, options.steps, replicas)
        if int(os.environ["RANK"]) == 0:
            path = Path(options.folder) / f"{options.name}.json"
            path.write_text(json.dumps(result), encoding="utf-8")
        return 0
    table: dict[str, Any] = {**facts_of(options.device), "cut_off": [], "rows": []}
    table["note"] = "Processes share the GPU." if options.device == "cuda" else ""
    table["not_shown"] = ["the speed of more than one process"]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        given = ["--device", options.device, "--steps", f"{options.steps}", "--folder", folder]
        given += ["--small"] * options.small
        for name, count in [("default", 1), *((f"{count}", count) for count in options.processes)]:
            status = run_ranks(count, [folder, *given, "--name", name])
            if status:
                print(f"gpu_bits: {count} ranks ended with {status}", file=sys.stderr)
                return status
            results[name] = json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
    limit = MOST_COST if options.device == "cuda" and not options.small else None
    rows = rows_of(results, options.steps, limit)
    table["rows"] = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    table["failed"] = any(row[-1] not in ("", "ok") for row in rows)
    options.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print_table(COLUMNS, rows)
    print("FAILED" if table["failed"] else "the same bits")
    return int(table["failed"])


if __name__ == "__main__":
    sys.exit(main())
