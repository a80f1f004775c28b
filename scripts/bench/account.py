"""Does each delay show up in its own part of a step's account, and does the advice come true?

    python -m scripts.bench.account

The devices are emulated: layers and data sleep for a known time for each sample. Each case is run
without and with its delay, in turn, five times each, and the medians are compared. A replica's case
is two processes, which this script starts with torchrun.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from hybridtrain import HybridModel, Trainer, World
from hybridtrain.data import TrainLoader
from hybridtrain.loss import cross_entropy
from hybridtrain.pipeline.forward.engine import StepRun
from hybridtrain.schedule import Account
from scripts.bench.common import print_footer, print_table
from tests.support.slow import SlowData, SlowLinear

_ROUNDS, _STEPS, _BATCH, _CHUNKS = 5, 9, 32, 8
_SAMPLE_S = 5e-4
_LINK_S = 5e-3
_UNEVEN = [s * _SAMPLE_S for s in (0.5, 0.5, 0.5, 0.5, 1, 1, 1, 1)]

Row = dict[str, float]


def run(
    layers: Sequence[float] = (_SAMPLE_S, _SAMPLE_S),
    loading: float = 0.0,
    chunks: int = _CHUNKS,
    split: str = "uniform",
    workers: int = 0,
    link: float = 0.0,
    recompute: str = "never",
) -> tuple[Row, list[str]]:
    """Trains some steps; returns the mean account in milliseconds, its step, and the advice."""
    torch.manual_seed(0)
    world = World.from_env(min(2, len(layers)), "cpu")
    net = nn.Sequential(*map(SlowLinear, layers))
    samples = SlowData(loading)
    example = samples.inputs[:_BATCH]
    model = HybridModel(
        net, world, chunks=chunks, split=split, recompute=recompute, example_inputs=example
    )
    data = TrainLoader(samples, _BATCH * world.data_parallel_size, world, workers=workers)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with slow_link(link):
        trainer = Trainer(
            model, optimizer, cross_entropy, data, steps=_STEPS, log_every=_STEPS // 3
        )
        summary = trainer.fit()
    own = next(d for d in summary["account"]["devices"] if d["replica"] == 0)
    parts = summary["account"]["mean"] if world.data_parallel_size == 1 else own
    row = {name: parts[name] for name in Account._fields}
    return {**row, "step": sum(row.values())}, summary["advice"]


@contextmanager
def slow_link(seconds: float) -> Iterator[None]:
    """Lets each message between stages arrive `seconds` after it was sent."""
    sent: dict[tuple[object, ...], float] = {}
    enter, leave, backward = StepRun._enter, StepRun._leave, StepRun.backward

    def wait_for(*message):
        if message in sent:
            time.sleep(max(0.0, sent.pop(message) + seconds - time.perf_counter()))

    def slow_enter(run, stage, microbatch):
        wait_for(run, "F", stage, microbatch)
        enter(run, stage, microbatch)

    def noted_leave(run, stage, microbatch):
        sent[run, "F", stage + 1, microbatch] = time.perf_counter()
        leave(run, stage, microbatch)

    def slow_backward(run, action, gradients):
        kind, stage, microbatch = action
        if kind == "W":
            return backward(run, action, gradients)
        wait_for(run, "B", stage, microbatch)
        result = backward(run, action, gradients)
        sent[run, "B", stage - 1, microbatch] = time.perf_counter()
        return result

    slow = {"_enter": slow_enter, "_leave": noted_leave, "backward": slow_backward}
    with mock.patch.multiple(StepRun, **slow) if seconds else nullcontext():
        yield


def replicas(slow: float) -> Row:
    """Returns the account of the first of two replicas, of which the second is slower by `slow`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "account.json")
        command = ["--standalone", "--nproc-per-node", "2", "-m", "scripts.bench.account"]
        command = [sys.executable, "-m", "torch.distributed.run", *command, str(path), str(slow)]
        subprocess.run(command, check=True, capture_output=True)
        row: Row = json.loads(path.read_text())
        return row


def replica(path: str, slow: float) -> None:
    """Runs one of the replicas of `replicas`."""
    with World.from_env(1, "cpu") as world:
        each = _SAMPLE_S + (slow if world.data_parallel_rank else 0.0)
        row, _ = run((each,))
        if world.is_main:
            Path(path).write_text(json.dumps(row))


def medians(rows: Sequence[Row]) -> Row:
    """Returns the median of each part."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


CASES = {
    "a stage that takes twice as long": (
        "imbalance",
        lambda: run()[0],
        lambda: run((_SAMPLE_S, 2 * _SAMPLE_S))[0],
    ),
    f"{_LINK_S * 1e3:.0f} ms for each message": (
        "messages",
        lambda: run()[0],
        lambda: run(link=_LINK_S)[0],
    ),
    "a loader of 3 ms for each sample": (
        "data",
        lambda: run()[0],
        lambda: run(loading=3e-3)[0],
    ),
    "a replica that takes half as long again": (
        "stragglers",
        lambda: replicas(0.0),
        lambda: replicas(_SAMPLE_S / 2),
    ),
}


def main() -> None:
    """Prints both tables."""
    rows = []
    for name, (part, without, with_delay) in CASES.items():
        pairs = [(without(), with_delay()) for _ in range(_ROUNDS)]
        before, after = medians([p[0] for p in pairs]), medians([p[1] for p in pairs])
        longer = after["step"] - before["step"]
        computing = sum(after[n] - before[n] for n in ("forward", "backward"))
        of_part = after[part] - before[part]
        others = longer - of_part - computing
        rows.append(
            [name, part, *(f"{x:.1f}" for x in (before["step"], after["step"], longer)),
             f"{of_part:.1f}", f"{computing:.1f}", f"{others:.1f}"]
        )  # fmt: skip
    print_table(
        ["delay", "part", "step", "with it", "longer", "the part", "computing", "others"], rows
    )
    rows = []
    followed = {
        "two micro-batches": (lambda: run(chunks=2), lambda: run(chunks=4)),
        "slow data": (lambda: run(loading=3e-3), lambda: run(loading=3e-3, workers=2)),
        "a slow stage": (
            lambda: run(_UNEVEN),
            lambda: run(_UNEVEN, split="time"),
        ),
        "recomputation": (
            lambda: run(split="balanced", recompute="always"),
            lambda: run(split="balanced"),
        ),
    }
    for name, (before_it, after_it) in followed.items():
        both = [(before_it(), after_it()) for _ in range(_ROUNDS)]
        advice = both[-1][0][1]
        columns = zip(*both, strict=True)
        steps = [statistics.median(row["step"] for row, _ in column) for column in columns]
        rows.append([name, *(f"{step:.1f}" for step in steps), "; ".join(advice) or "none"])
    print_table(["run", "step", "after the advice", "the advice"], rows)
    print_footer(f"milliseconds, medians of {_ROUNDS}; layers and data that sleep")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        replica(sys.argv[1], float(sys.argv[2]))
    else:
        main()
