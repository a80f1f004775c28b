"""The memory and time of a last linear layer and its cross-entropy: plain, and without logits.

A forward and a backward, each in a process of its own with one thread. Memory is the kernel's
`VmHWM`, less what the process had before; time is that of the CPU, because others may use the
machine. Differences are the largest ones, relative to the largest entry of the plain tensor.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain.head import install, lazily
from scripts.bench.big_model import resident
from scripts.bench.common import print_footer, print_table

TOKENS, WIDTH, SHOWN = 4096, 512, 2000
CASES = list(product(["float32", "bfloat16"], ["trained", "frozen"]))


def step(vocabulary: int, dtype: str, training: str, head: str, tokens: int) -> list[Tensor]:
    """Returns the loss and the gradients of a forward and backward."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.empty(tokens, WIDTH).normal_(generator=generator)
    hidden = hidden.to(getattr(torch, dtype)).requires_grad_()
    with torch.device("meta"):
        layer = nn.Linear(WIDTH, vocabulary, bias=False, dtype=hidden.dtype)
    net = nn.Sequential(layer.to_empty(device="cpu"))
    nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)
    net.requires_grad_(training == "trained")
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[::7] = -100
    install(net, ["0"] if head == "fused" else [])
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    before, begin = resident("VmHWM"), time.process_time()
    with lazily():
        loss = F.cross_entropy(net(hidden).float(), targets)
    loss.backward()
    seconds, more = time.process_time() - begin, resident("VmHWM") - before
    if tokens == TOKENS:
        print(f"{seconds} {more}")
    tensors = [loss.detach(), hidden.grad, layer.weight.grad]
    return [t[:SHOWN].float() if t.dim() else t for t in tensors if t is not None]


def measure(vocabulary: int, dtype: str, training: str, head: str, to: Path) -> tuple[float, int]:
    """Returns the seconds and bytes of a step in another process, which writes its results."""
    arguments = [str(vocabulary), dtype, training, head, str(to)]
    command = [sys.executable, "-m", "scripts.bench.head_loss", "--one", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, more = done.stdout.split()
    return float(seconds), int(more)


def differences(first: Path, second: Path) -> str:
    """Returns the largest differences between two results, in words."""
    pairs = zip(torch.load(first), torch.load(second), strict=True)
    return ", ".join(f"{((a - b).abs().max() / b.abs().max()).item():.0e}" for a, b in pairs)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 131_072])
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(1)
        vocabulary, dtype, training, head, to = options.one
        step(1024, dtype, training, head, 64)  # loads the kernels
        torch.save(step(int(vocabulary), dtype, training, head, TOKENS), to)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, (dtype, training) in product(options.vocabulary, CASES):
            files = {head: Path(folder, f"{head}.pt") for head in ("plain", "fused")}
            (plain_s, plain), (fused_s, fused) = (
                measure(vocabulary, dtype, training, head, to) for head, to in files.items()
            )
            rows.append(
                [
                    f"{vocabulary:,}, {dtype}, {training}",
                    *(f"{plain / 2**30:.2f}", f"{fused / 2**30:.2f}"),
                    *(f"{plain_s:.1f}", f"{fused_s:.1f}", f"{fused_s / plain_s:.2f}"),
                    differences(files["fused"], files["plain"]),
                ]
            )
    header = ["vocabulary, dtype, head", "plain GiB", "fused GiB", "plain s", "fused s", "ratio"]
    print_table([*header, "differences: loss, hidden, weight"], rows)
    print_footer(f"{TOKENS:,} tokens of width {WIDTH}; one thread.")


if __name__ == "__main__":
    main()
