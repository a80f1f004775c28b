"""Measures how even the stages of `split="time"` are: the largest over the mean, planned and run.

Planned is by the costs that the cut was made from. Alone and together are the forward and backward
times of each stage in the timelines of training steps, the median of several: of steps of a single
micro-batch, in which one stage after the other has the machine, and of whole 1F1B steps. With more
stages than cores the stages' threads share these in the latter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model

from hybridtrain.loss import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import StageOwners, plan
from hybridtrain.partitioning.planner import COST_SOURCES
from hybridtrain.pipeline import measured_ms
from hybridtrain.world import World
from scripts.bench.common import print_footer, print_table

SAMPLES, CHUNKS, PIXELS = 8, 4, 96

Case = tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]


def images(name: str, **options: Any) -> Case:
    """Returns a classifier of torchvision and its batch."""
    net = get_model(name, num_classes=10, **options)
    inputs = torch.randn(SAMPLES, 3, PIXELS, PIXELS)
    return net, inputs, torch.randint(10, (SAMPLES,)), F.cross_entropy


def text() -> Case:
    """Returns the project's GPT and its batch."""
    tokens = torch.randint(256, (SAMPLES, 128))
    return gpt(256, 128, n_layer=8, d_model=256), tokens, tokens, cross_entropy


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-50": lambda: images("resnet50"),
    "ViT-B/16": lambda: images("vit_b_16", image_size=PIXELS),
    "gpt, 8 blocks of width 256": text,
}


def unevenness(times: Sequence[float]) -> float:
    """Returns the largest over the mean."""
    return max(times) / statistics.mean(times)


def shown(values: Sequence[float], digits: int) -> str:
    """Returns the median and, in brackets, the smallest and the largest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def stage_ms(model: HybridModel, batch: tuple[Tensor, Tensor, Any], repeats: int) -> list[float]:
    """Returns the milliseconds of forward and backward of each stage, the median of `repeats`."""
    seen: list[list[float]] = []
    for _ in range(1 + repeats):
        timeline = model.train_step(*batch, timeline=True).timeline
        assert timeline is not None
        spent = measured_ms(timeline.spans(), len(model.stages))
        seen.append([forward + backward for forward, backward in spent])
    return [statistics.median(times) for times in zip(*seen[1:], strict=True)]


def decide(make: Callable[[], Case], stages: int, repeats: int, costs: str) -> tuple[float, ...]:
    """Returns the unevenness of a plan as planned, alone and together, and the seconds it took."""
    torch.manual_seed(0)
    net, x, targets, loss_fn = make()
    start = time.perf_counter()
    options = PipelineOptions(chunks=CHUNKS, split="time")
    found = plan(net, options, x, StageOwners.of_cpus(stages), costs=costs)
    seconds = time.perf_counter() - start
    world = World.from_env(stages, devices="cpu")
    few = slice(SAMPLES // CHUNKS)
    with tempfile.TemporaryDirectory() as folder:
        found.write(path := f"{folder}/plan.yaml")
        whole = HybridModel(net, world, chunks=CHUNKS, split=path, example_inputs=x)
        single = HybridModel(make()[0], world, split=path, example_inputs=x)
    together = stage_ms(whole, (x, targets, loss_fn), repeats)
    alone = stage_ms(single, (x[few], targets[few], loss_fn), repeats)
    planned = [stage.time_ms for stage in found.stage_costs()]
    return *map(unevenness, (planned, alone, together)), seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--decisions", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="steps after each")
    parser.add_argument("--costs", choices=list(COST_SOURCES), default="measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(name, stages) for name in CASES for stages in options.stages]
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {case: [] for case in cases}
    for _ in range(options.decisions):
        for name, stages in cases:
            found[name, stages].append(decide(CASES[name], stages, options.repeats, options.costs))
    rows: list[list[object]] = []
    for (name, stages), decisions in found.items():
        *evenness, seconds = zip(*decisions, strict=True)
        rows.append([name, stages, *(shown(values, 3) for values in evenness), shown(seconds, 1)])
    print_table(["", "stages", "planned", "alone", "together", "seconds"], rows)
    print_footer(
        f"The largest stage over the mean, and how long a decision took; medians of "
        f"{options.decisions} decisions; {SAMPLES} samples in {CHUNKS} micro-batches, 1f1b."
    )


if __name__ == "__main__":
    main()
