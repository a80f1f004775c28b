"""What a backward in two parts takes, over a whole one, for stages of several kinds and sizes.

One thread, one micro-batch at a time, each with its forward before it, which is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hybridtrain.pipeline.split_backward import SplitBackward, divide, run_from
from scripts.bench.common import print_footer, print_table, square_loss


def encoder(width: int, layers: int) -> nn.Sequential:
    """Layers of a transformer."""
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        ]
    )


def linear(width: int, layers: int) -> nn.Sequential:
    """Linear layers."""
    return nn.Sequential(
        *[module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    )


def convolutions(channels: int, layers: int) -> nn.Sequential:
    """Convolutions, with batch norms."""
    return nn.Sequential(
        *[
            module
            for _ in range(layers)
            for module in (
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            )
        ]
    )


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "2 encoder layers of 64": (lambda: encoder(64, 2), (4, 64, 64)),
    "2 encoder layers of 256": (lambda: encoder(256, 2), (2, 112, 256)),
    "2 encoder layers of 512": (lambda: encoder(512, 2), (4, 128, 512)),
    "1 encoder layer of 1024": (lambda: encoder(1024, 1), (2, 128, 1024)),
    "4 linear layers of 1024": (lambda: linear(1024, 4), (64, 1024)),
    "4 convolutions, 64 channels": (lambda: convolutions(64, 4), (4, 64, 28, 28)),
}


def milliseconds(net: nn.Module, x: Tensor, repeats: int) -> dict[str, float]:
    """Returns the medians of a whole backward and of the parts, taken in turn."""
    times: dict[str, list[float]] = defaultdict(list)
    one = torch.ones((), device=x.device)

    def timed(name: str, run: Callable[[], object]) -> None:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        start = time.perf_counter()
        run()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times[name].append(1e3 * (time.perf_counter() - start))

    for _ in range(repeats + 2):
        loss = square_loss(net(x), None)
        timed("whole", partial(run_from, [(loss, one)]))
        loss = square_loss(net(x), None)
        begun = time.perf_counter()
        division = divide([loss], [x])
        assert division is not None
        parts = SplitBackward(division, [(loss, one)], [x])
        times["graph"].append(1e3 * (time.perf_counter() - begun))
        timed("to the input", parts.to_input)
        timed("to the weights", parts.to_weights)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (make, shape) in STAGES.items():
        torch.manual_seed(0)
        net = make().to(options.device)
        x = torch.randn(*shape, device=options.device, requires_grad=True)
        ms = milliseconds(net, x, options.repeats)
        parts = [ms[key] for key in ("graph", "to the input", "to the weights")]
        cells = [f"{one:.2f}" for one in (ms["whole"], *parts, sum(parts) / ms["whole"])]
        rows.append([f"{name}, {'x'.join(map(str, shape))}", *cells])
    header = [
        "",
        "whole, ms",
        "walking the graph",
        "to the input",
        "to the weights",
        "parts / whole",
    ]
    print_table(header, rows)
    print_footer(f"Medians of {options.repeats}; {options.device}, one thread.")


if __name__ == "__main__":
    main()
