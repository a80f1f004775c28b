"""Milliseconds of an optimizer's step, and bytes of its state, by option of `optim`.

The parameters are square matrices and a bias for each, in fp32. On a CPU the times are those of the
process's CPU clock with one thread, so that other processes count little.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import nn

from hybridtrain import HybridModel, World
from hybridtrain.cli.config.compose import compose_config
from hybridtrain.cli.run.components import build_model_optimizer
from scripts.bench.common import print_footer, print_table

# the name in the table, and the overrides
CASES = {
    "adamw, optim.fused=false": ("optim=adamw", "optim.fused=false"),
    "adamw": ("optim=adamw",),
    "sgd, optim.fused=false": ("optim=sgd", "optim.fused=false"),
    "sgd": ("optim=sgd",),
    "muon": ("optim=muon",),
    "adamw8bit": ("optim=adamw8bit",),
}


def row(config: dict[str, Any], options: argparse.Namespace) -> list[str]:
    """Returns the milliseconds of a step, and the bytes of state for each parameter."""
    torch.manual_seed(0)
    layers = (nn.Linear(options.width, options.width) for _ in range(options.matrices))
    model = HybridModel(nn.Sequential(*layers), World.from_env(devices=options.device))
    optimizer = build_model_optimizer(config, model)
    on_gpu = model.world.devices[0].type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    taken = []
    for _ in range(options.steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if on_gpu:
            torch.cuda.synchronize()
        begin = clock()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        taken.append((clock() - begin) * 1e3)
    count = sum(parameter.numel() for parameter in model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    nbytes = sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    return [f"{median(taken[1:]):.1f}", f"{nbytes / count:.2f}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--matrices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, overrides in CASES.items():
        if name == "adamw8bit" and find_spec("bitsandbytes") is None:
            continue
        rows.append([name, *row(compose_config(["recipe=digits", *overrides]).optim, options)])
    print_table(["`optim`", "ms per step", "bytes of state per parameter"], rows)
    print_footer("Medians of the steps after the first.")


if __name__ == "__main__":
    main()
