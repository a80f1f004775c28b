"""How even the stages are that `split="time"` makes: the largest over the mean, planned and run.

Planned is by the costs that the cut was made from; run is what a traced step then measured of each
stage, in milliseconds of forward and backward, the median of several. With more stages than cores
the stages' threads share these, so the run's figure is the noisier one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import print_footer, print_table

from hybridtrain.losses import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.partitioning.objective import stage_costs
from hybridtrain.pipeline.trace import stage_times
from hybridtrain.world import World

ROWS, CHUNKS, PIXELS = 8, 4, 96

Case = tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]


def images(name: str, **options: Any) -> Case:
    """A classifier of torchvision's."""
    net = get_model(name, num_classes=10, **options)
    rows = torch.randn(ROWS, 3, PIXELS, PIXELS)
    return net, rows, torch.randint(10, (ROWS,)), F.cross_entropy


def text() -> Case:
    """The project's GPT."""
    tokens = torch.randint(256, (ROWS, 128))
    return gpt(256, 128, n_layer=8, d_model=256), tokens, tokens, cross_entropy


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-50": lambda: images("resnet50"),
    "ViT-B/16": lambda: images("vit_b_16", image_size=PIXELS),
    "gpt, 8 blocks of width 256": text,
}


def unevenness(times: list[float]) -> str:
    """The largest over the mean."""
    return f"{max(times) / statistics.mean(times):.3f}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for name, make in CASES.items():
        for stages in options.stages:
            torch.manual_seed(0)
            net, x, targets, loss_fn = make()
            world = World.from_env(stages, devices="cpu")
            model = HybridModel(net, world, chunks=CHUNKS, split="time", sample=x)
            plan = model.plan
            planned = [s.time_ms for s in stage_costs(plan.costs, plan.counts, plan.held)]
            seen: list[list[float]] = []
            for _ in range(1 + options.repeats):
                trace = model.train_step(x, targets, loss_fn, trace=True).trace
                assert trace is not None
                times = stage_times(trace.spans(), stages)
                seen.append([time.forward_ms + time.backward_ms for time in times])
            run = [statistics.median(stage) for stage in zip(*seen[1:], strict=True)]
            rows.append([name, stages, len(plan.costs), unevenness(planned), unevenness(run)])
    print_table(["", "stages", "layers", "planned", "run"], rows)
    print(f"\nThe largest stage over the mean; {ROWS} rows, {CHUNKS} micro-batches, 1f1b.  ")
    print_footer()


if __name__ == "__main__":
    main()
