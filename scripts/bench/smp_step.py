"""What `@smp.step` costs over `train_step`, on devices that sleep.

The stages of `emulated_devices`, 5 ms forward and 10 ms backward, are all in one process. Each
body of a step runs in its own thread, and waits in its call of the model.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import hybridtrain.smp as smp
from hybridtrain.model import HybridModel
from hybridtrain.smp import runtime
from hybridtrain.world import World
from scripts.bench.common import interleave, mean_loss, print_footer, print_table, timed
from scripts.bench.emulated_devices import BACKWARD, FORWARD, WIDTH, calibrate, network


@smp.step
def train_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The step that is measured."""
    loss = mean_loss(model(inputs), None)
    model.backward(loss)
    return loss


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    calibrate()
    lines = []
    for stages, chunks in ((2, 4), (4, 8), (4, 32)):
        inputs = torch.randn(chunks, WIDTH)
        plain = HybridModel(network(stages, 1), World.from_env(stages, "cpu"), chunks=chunks)
        runtime._runtime = None
        own = {"engine": "local", "devices": "cpu", "split": [1] * stages}
        smp.init({"pipeline_parallel_degree": stages, "microbatches": chunks, "hybridtrain": own})
        model = smp.DistributedModel(network(stages, 1))

        def run_plain(plain: Any = plain, inputs: torch.Tensor = inputs) -> None:
            plain.train_step(inputs, None, mean_loss)

        def run_smp(model: Any = model, inputs: torch.Tensor = inputs) -> None:
            train_step(model, inputs)

        jobs = {"train_step": timed(run_plain), "smp.step": timed(run_smp)}
        found = interleave(jobs, options.repeats, warm_up=2)
        ideal = (chunks + stages - 1) * (FORWARD + BACKWARD)
        a, b = (statistics.median(found[name]) for name in jobs)
        cells = (f"{1000 * ideal:.1f}", f"{1000 * a:.1f}", f"{1000 * b:.1f}", f"{b / a - 1:+.1%}")
        lines.append((f"{stages} stages, {chunks} micro-batches", *cells))
    print_table(("", "ideal, ms", "train_step, ms", "smp.step, ms", "smp.step costs"), lines)
    print_footer("Medians; the two take turns.")


if __name__ == "__main__":
    main()
