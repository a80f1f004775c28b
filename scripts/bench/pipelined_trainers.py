"""What `pipelined(model)` gains in a loop and in transformers' Trainer, on devices that sleep.

The stages of `emulated_devices`, 5 ms forward and 10 ms backward. "Device after device" is what a
`device_map` does: the same micro-batches, one after another, while one device works. The loss
inside of the model runs the schedule in the call (1F1B), the loss outside all forwards first.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain import HybridModel, World, pipelined
from scripts.bench.common import (
    interleave,
    optional,
    print_footer,
    print_table,
    timed,
)
from scripts.bench.emulated_devices import (
    BACKWARD,
    FORWARD,
    WIDTH,
    backward_s,
    calibrate,
    forward_s,
    network,
    sleeps,
)

CHUNKS = 8
WARM_UP = 33  # steps; the next ones to be checked are 64


class WithLoss(nn.Module):
    """Emulated stages that compute their loss, as models of transformers do."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = network(stages, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the outputs, and with labels the loss."""
        # all stages have a whole backward, the first one too
        output = self.stages(x.detach().requires_grad_())
        return {"logits": output} if labels is None else {"loss": output.mean(), "logits": output}


def split_of(stages: int) -> list[int]:
    """One emulated stage for each device."""
    return [1] * stages


def trainer_steps(stages: int, steps: int) -> list[float]:
    """Returns the seconds of `training_step` of transformers' Trainer, without the first steps."""
    transformers = optional("transformers")
    if transformers is None:
        return []
    seconds: list[float] = []

    class Timed(transformers.Trainer):  # type: ignore[misc,name-defined]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super().training_step(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return result

    rows = [{"x": torch.randn(WIDTH), "labels": torch.tensor(0.0)} for _ in range(CHUNKS)]
    args = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=CHUNKS,
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=10 * steps,
    )
    model = pipelined(WithLoss(stages), nb_part=stages, chunks=CHUNKS, split=split_of(stages))
    Timed(model=model, args=args, train_dataset=rows).train()
    return seconds[3:]


def jobs_of(stages: int) -> dict[str, Callable[[], None]]:
    """Returns a step of each kind, on stages of their own."""
    x, labels = torch.randn(CHUNKS, WIDTH), torch.zeros(CHUNKS)
    plain = WithLoss(stages)
    settings = {"nb_part": stages, "chunks": CHUNKS, "split": split_of(stages)}
    outside = pipelined(WithLoss(stages), **settings)
    inside = pipelined(WithLoss(stages), **settings)
    world = World.from_env(stages, "cpu")
    step = HybridModel(WithLoss(stages), world, chunks=CHUNKS, split=split_of(stages))

    def one_by_one() -> None:
        for part in x.split(1):
            (plain(part)["logits"].mean() / CHUNKS).backward()

    def train_step() -> None:
        step.train_step(x, None, lambda output, _: output["logits"].mean())

    def loss_inside() -> None:
        inside(x, labels=labels)["loss"].backward()

    def loss_outside() -> None:
        outside(x)["logits"].mean().backward()

    return {
        "device after device": one_by_one,
        "train_step": train_step,
        "loss inside": loss_inside,
        "loss outside": loss_outside,
    }


def print_gains(repeats: int) -> None:
    """Prints how many times as fast as device after device each step is."""
    lines = []
    for stages in (2, 4):
        jobs = {name: timed(job) for name, job in jobs_of(stages).items()}
        found = interleave(jobs, repeats, warm_up=3)
        found["transformers' Trainer"] = trainer_steps(stages, repeats + 3)
        ideal = (CHUNKS + stages - 1) * (forward_s() + backward_s())
        alone = statistics.median(found["device after device"])
        for name, seconds in found.items():
            if seconds:
                s = statistics.median(seconds)
                cells = f"{1000 * s:.1f}", f"{ideal / s:.3f}", f"{alone / s:.2f}"
                lines.append((f"{stages} stages: {name}", *cells))
        bound = stages * CHUNKS / (CHUNKS + stages - 1)
        lines.append((f"{stages} stages: bound", f"{1000 * ideal:.1f}", "1", f"{bound:.2f}"))
    print_table(("", "ms", "of the ideal", "times device after device"), lines)


def processor_seconds(job: Callable[[], None]) -> Callable[[], float]:
    """A job that gives the processor's seconds of a step, without its sleeps."""

    def run() -> float:
        start = time.process_time()
        job()
        return time.process_time() - start

    return run


def print_cost(step_ms: float, repeats: int) -> None:
    """Prints what the wrapper adds to `train_step`, where the schedule's ideal is `step_ms`."""
    lines = []
    for stages in (2, 4):
        sleeps.factor = step_ms / 1000 / ((CHUNKS + stages - 1) * (FORWARD + BACKWARD))
        calibrate()
        jobs = jobs_of(stages)
        del jobs["device after device"]
        wall = interleave({n: timed(j) for n, j in jobs.items()}, repeats, warm_up=3)
        host = interleave({n: processor_seconds(j) for n, j in jobs.items()}, repeats, warm_up=3)
        of_step = {name: 1000 * statistics.median(host[name]) for name in jobs}
        for name in jobs:
            ratio = statistics.median(
                ours / steps for ours, steps in zip(wall[name], wall["train_step"], strict=True)
            )
            added = of_step[name] - of_step["train_step"]
            ms = f"{1000 * statistics.median(wall[name]):.2f}"
            cells = ms, f"{ratio:.3f}", f"{of_step[name]:.2f}", f"{100 * added / step_ms:+.1f}%"
            lines.append((f"{stages} stages: {name}", *cells))
    heads = ("", "ms", "/ train_step", "ms of the processor", f"added to {step_ms:g} ms")
    print_table(heads, lines)


def print_calls() -> None:
    """Prints the calls of Python functions in a step: the same on a busy machine."""
    counter, counts = itertools.count(), False

    def note(frame: Any, event: str, argument: Any) -> None:
        if counts and event == "call":
            next(counter)

    threading.setprofile(note)  # of the threads that the pipelines start
    sleeps.factor = 0.0
    lines = []
    for stages in (2, 4):
        jobs = jobs_of(stages)
        del jobs["device after device"]
        for name, job in jobs.items():
            for _ in range(WARM_UP):
                job()
            sys.setprofile(note)
            counts, first = True, next(counter)
            for _ in range(10):
                job()
            counts = False
            sys.setprofile(None)
            lines.append((f"{stages} stages: {name}", round((next(counter) - first) / 10)))
    threading.setprofile(None)  # type: ignore[arg-type]
    print_table(("", "calls"), lines)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--step-ms",
        type=float,
        help="print instead what the wrapper adds to train_step, in a step of this length",
    )
    parser.add_argument(
        "--calls", action="store_true", help="print instead the calls of Python functions in a step"
    )
    options = parser.parse_args()
    if options.calls:
        print_calls()
    elif options.step_ms:
        print_cost(options.step_ms, options.repeats)
    else:
        calibrate()
        print_gains(options.repeats)
    print_footer(f"{CHUNKS} micro-batches; medians; the loops take turns.")


if __name__ == "__main__":
    main()
