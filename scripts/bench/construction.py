"""What it costs to construct a part of a GPT: seconds, and the most memory that the process held.

Each way runs in processes that do nothing else, in turn with the others. The peak is `VmHWM`, all
resident memory, less what Python and PyTorch held before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from hybridtrain._base.construction import construct_part
from hybridtrain.models import gpt
from scripts.bench.common import interleave, print_footer, print_table

# The share of the blocks that the process owns, with the embedding; None for plain construction.
SHARES = {"plain: gpt()": None, "construct_part, 1/2": 2, "construct_part, 1/4": 4}


def resident(key: str) -> int:
    """A field of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def measure(share: int | None, layers: int, width: int) -> dict[str, float]:
    """Constructs the model, or a part of it, in this process."""
    owned = tuple(f"blocks.{index}." for index in range(layers // (share or 1)))
    before, start = resident("VmRSS"), time.perf_counter()

    def build() -> gpt:
        return gpt(1024, 1024, n_layer=layers, n_head=16, d_model=width)

    net = build() if share is None else construct_part(build, lambda name: name.startswith(owned))
    return {
        "seconds": time.perf_counter() - start,
        "peak": resident("VmHWM") - before,
        "owned": sum(p.nbytes for p in net.parameters() if not p.is_meta),
        "largest": max(p.nbytes for p in net.parameters()),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        print(json.dumps(measure(options.share or None, options.layers, options.width)))
        return
    command = [sys.executable, "-m", "scripts.bench.construction"]
    command += [f"--layers={options.layers}", f"--width={options.width}"]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in SHARES}

    def job(name: str) -> float:
        output = subprocess.check_output([*command, f"--share={SHARES[name] or 0}"])
        seen[name].append(json.loads(output))
        return seen[name][-1]["seconds"]

    interleave({name: lambda name=name: job(name) for name in SHARES}, options.repeats, warm_up=0)
    plain, *_ = seen.values()
    rows = []
    for name, runs in seen.items():
        owned = runs[0]["owned"]
        peak = statistics.median(run["peak"] for run in runs)
        seconds = [run["seconds"] for run in runs]
        ratios = [a / b["seconds"] for a, b in zip(seconds, plain, strict=True)]
        bytes_shown = [f"{owned / 2**20:.0f}", f"{peak / 2**20:.0f}"]
        beyond = f"{(peak - runs[0]['largest']) / owned:.2f}"
        medians = [f"{statistics.median(values):.2f}" for values in (seconds, ratios)]
        rows.append([name, *bytes_shown, beyond, *medians])
    header = ["", "owned MiB", "peak MiB", "(peak - largest) / owned", "seconds", "/ plain"]
    print_table(header, rows)
    print_footer(
        f"gpt with {plain[0]['owned'] / 4e6:.0f} million parameters, the largest of "
        f"{plain[0]['largest'] / 2**20:.0f} MiB; medians of {options.repeats} processes each."
    )


if __name__ == "__main__":
    main()
