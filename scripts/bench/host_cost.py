"""What the engine itself costs: stages that do next to nothing, microseconds each.

Both engines compute a loss for every micro-batch in the last stage: this one as `loss_fn`,
torchgpipe as one more layer of its last partition, whose results the caller averages. The first
column is the same layers, losses and backwards in a plain loop: no engine at all.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import (
    gpipe_library,
    interleave,
    mean_loss,
    optional,
    print_footer,
    print_table,
    shown,
    timed,
)


def network(stages: int) -> nn.Sequential:
    """A chain of tiny layers."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(stages)])


class Mean(nn.Module):
    """The loss of a micro-batch, with a batch dimension for torchgpipe to join."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape (1,)."""
        return x.mean().view(1)


def plain(stages: int, x: Tensor, chunks: int) -> Callable[[], None]:
    """The layers and autograd alone."""
    net = network(stages).to(x.device)

    def step() -> None:
        for samples in x.chunk(chunks):
            (net(samples).mean() / chunks).backward()

    return step


def peer(stages: int, x: Tensor, chunks: int) -> Callable[[], None]:
    """A step of torchgpipe's."""
    layers = nn.Sequential(*network(stages), Mean())
    model = gpipe_library(layers, [1] * (stages - 1) + [2], chunks)
    return lambda: model(x).mean().backward()


def hybrid(
    stages: int, x: Tensor, chunks: int, schedule: str, devices: str | list[str] = "cpu"
) -> Callable[[], object]:
    """A step of this project's."""
    world = World.from_env(stages, devices)
    model = HybridModel(network(stages), world, chunks=chunks, schedule=schedule)
    return lambda: model.train_step(x, None, mean_loss)


def several(run: Callable[[], object], times: int) -> Callable[[], None]:
    """`run`, so often in a row."""

    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--inner", type=int, default=5, help="steps in a row for one figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(options.chunks, 4)
    there = optional("torchgpipe") is not None
    rows = []
    for stages in options.stages:
        inner = options.inner
        steps = {
            "plain": plain(stages, x, options.chunks),
            "torchgpipe": peer(stages, x, options.chunks) if there else None,
            "gpipe": hybrid(stages, x, options.chunks, "gpipe"),
            "1f1b": hybrid(stages, x, options.chunks, "1f1b"),
        }
        times = interleave(
            {name: step and timed(several(step, inner)) for name, step in steps.items()},
            options.repeats,
        )
        cells = stages * options.chunks * inner
        cost = {name: [1e6 * t / cells for t in values] for name, values in times.items()}
        ratios = [
            [a / b for a, b in zip(cost[name], cost["torchgpipe"], strict=False)]
            for name in ("gpipe", "1f1b")
        ]
        medians = [f"{statistics.median(ratio):.2f}" if ratio else "" for ratio in ratios]
        costs = [shown(cost[name], "{:.1f}", min) for name in steps]
        rows.append([f"P={stages}", *costs, *medians])
    header = ["", "layers and autograd", "torchgpipe", "hybridtrain gpipe", "hybridtrain 1f1b"]
    print_table([*header, "gpipe / torchgpipe", "1f1b / torchgpipe"], rows)
    print_footer(
        f"Microseconds per stage and micro-batch, forward and backward, nn.Linear(4, 4) per stage, "
        f"one sample per micro-batch, m={options.chunks}; median of {options.repeats}, in brackets "
        f"the best. The ratios are medians of those of neighbours in time."
    )


if __name__ == "__main__":
    main()
