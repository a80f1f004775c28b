"""How even the stages are that `split="time"` makes: the largest over the mean, planned and run.

Planned is by the costs that the cut was made from. Alone and together are what the timelines of
later steps show of each stage, in milliseconds of forward and backward, the median of several: of a
single micro-batch, so that one stage after the other has the machine, and of a whole step. With
more stages than cores the stages' threads share these in the latter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model

from hybridtrain.losses import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.pipeline.timeline import stage_times
from hybridtrain.planning.objective import stage_costs
from hybridtrain.world import World
from scripts.bench.common import print_footer, print_table

SAMPLES, CHUNKS, PIXELS = 8, 4, 96

Case = tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]


def images(name: str, **options: Any) -> Case:
    """A classifier of torchvision's."""
    net = get_model(name, num_classes=10, **options)
    pixels = torch.randn(SAMPLES, 3, PIXELS, PIXELS)
    return net, pixels, torch.randint(10, (SAMPLES,)), F.cross_entropy


def text() -> Case:
    """The project's GPT."""
    tokens = torch.randint(256, (SAMPLES, 128))
    return gpt(256, 128, n_layer=8, d_model=256), tokens, tokens, cross_entropy


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-50": lambda: images("resnet50"),
    "ViT-B/16": lambda: images("vit_b_16", image_size=PIXELS),
    "gpt, 8 blocks of width 256": text,
}


def unevenness(times: Sequence[float]) -> float:
    """The largest over the mean."""
    return max(times) / statistics.mean(times)


def shown(values: Sequence[float], digits: int) -> str:
    """The median and, in brackets, the smallest and the largest."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def stage_ms(
    model: HybridModel, x: Tensor, targets: Tensor, loss_fn: Any, repeats: int
) -> list[float]:
    """Milliseconds of forward and backward of each stage in a step, the median of `repeats`."""
    seen: list[list[float]] = []
    for _ in range(1 + repeats):
        timeline = model.train_step(x, targets, loss_fn, timeline=True).timeline
        assert timeline is not None
        spent = stage_times(timeline.spans(), len(model.stages))
        seen.append([stage.forward_ms + stage.backward_ms for stage in spent])
    return [statistics.median(times) for times in zip(*seen[1:], strict=True)]


def decide(make: Callable[[], Case], stages: int, repeats: int) -> tuple[float, ...]:
    """One decision: the unevenness as planned, alone and together, and the seconds it took."""
    torch.manual_seed(0)
    net, x, targets, loss_fn = make()
    world = World.from_env(stages, devices="cpu")
    start = time.perf_counter()
    model = HybridModel(net, world, chunks=CHUNKS, split="time", example_inputs=x)
    seconds = time.perf_counter() - start
    plan = model.plan
    planned = [stage.time_ms for stage in stage_costs(plan.costs, plan.counts, plan.in_flight)]
    together = stage_ms(model, x, targets, loss_fn, repeats)
    with tempfile.TemporaryDirectory() as folder:
        plan.write(Path(folder) / "plan.yaml")
        one = HybridModel(make()[0], world, split=f"{folder}/plan.yaml", example_inputs=x)
    few = slice(SAMPLES // CHUNKS)
    alone = stage_ms(one, x[few], targets[few], loss_fn, repeats)
    return *map(unevenness, (planned, alone, together)), seconds


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--decisions", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="steps after each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(name, stages) for name in CASES for stages in options.stages]
    found: dict[tuple[str, int], list[tuple[float, ...]]] = {case: [] for case in cases}
    for _ in range(options.decisions):
        for name, stages in cases:
            found[name, stages].append(decide(CASES[name], stages, options.repeats))
    rows: list[list[object]] = []
    for (name, stages), decisions in found.items():
        *evenness, seconds = zip(*decisions, strict=True)
        rows.append([name, stages, *(shown(values, 3) for values in evenness), shown(seconds, 1)])
    print_table(["", "stages", "planned", "alone", "together", "seconds"], rows)
    print("\nThe largest stage over the mean, and how long a decision took; medians of")
    print(f"{options.decisions} decisions; {SAMPLES} samples in {CHUNKS} micro-batches, 1f1b.  ")
    print_footer()


if __name__ == "__main__":
    main()
