"""Checks on a machine with GPUs: speed, host cost, what only a GPU has, memory, and exactness.

Run it by `scripts/gpu_check.sh`. The stages share the one GPU where there is only one; else those
of the exactness check are dealt out over all. It ends with one table, and a file for programs. The
exit status is 1 if a result of a split model is not the unsplit one's, or a check failed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hybridtrain
from hybridtrain._base.precision import AUTOCAST
from hybridtrain.loss import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models.gpt import gpt
from hybridtrain.options import PipelineOptions
from hybridtrain.world import World
from scripts.bench import host_cost as tiny
from scripts.bench.common import interleave, mean_loss, print_table, timed
from scripts.gpu_parts import run_parts
from tests.support.matrix import TOLERANCE, Cell, compared, difference, random_cells

# Dense bf16 peak in FLOP/s, as the vendor states it; fp16 where a GPU has no bf16.
PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}


COLUMNS = ["check", "setting", "result", "beside", "verdict"]


def not_shown(gpus: int) -> list[str]:
    """Returns what a machine with so many GPUs cannot show here."""
    what = ["NCCL between two processes (see --processes)", "CPU time of the stages' threads"]
    if gpus < 2:
        what += ["copies between two GPUs", "the speed of a pipeline: its stages share a GPU"]
    return what


def facts_of(device: str) -> dict[str, Any]:
    """Returns what a table says about where it was made."""
    gpus = "no GPU"
    if device == "cuda":
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return {
        **{"date": f"{date.today()}", "version": hybridtrain.__version__, "gpus": gpus},
        **{"torch": torch.__version__, "cuda": torch.version.cuda},
    }


@dataclass
class Check:
    """What all parts share.

    Attributes:
        device: `cuda` or `cpu`.
        small: sizes for a try without a GPU.
        deadline: when the whole must be done, by `time.monotonic`.
        seconds_in_all: the time for all of it.
        rows: the table so far.
        failed: whether a split model differed, or a check raised.
        cut_off: the checks that were not run, or not to their end.
        file: where the table is, from the first row on.
        facts: what else is in it.
    """

    device: str
    small: bool
    deadline: float
    seconds_in_all: float = 450.0
    rows: list[list[str]] = field(default_factory=list)
    failed: bool = False
    cut_off: list[str] = field(default_factory=list)
    file: Path = Path("gpu_check.json")
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def devices(self, stages: int, gpus: int = 1) -> list[str]:
        """Returns the device of each stage, on so many GPUs."""
        return [f"cuda:{i % gpus}" if self.device == "cuda" else "cpu" for i in range(stages)]

    def wait(self) -> None:
        """Waits until all devices have done what they were told."""
        if self.device == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)

    def seconds(self, step: Callable[[], object], times: int, repeats: int) -> float:
        """Returns the seconds of a step: the median of `repeats`, each of so many in a row."""

        def run() -> None:
            for _ in range(times):
                step()
            self.wait()

        return statistics.median(interleave({"": timed(run)}, repeats)[""]) / times

    def add(self, *cells: str) -> None:
        """Adds a row to the table: check, setting, result, beside, verdict, and says it."""
        self.rows.append([*cells, *[""] * (5 - len(cells))])
        print("   ".join(cells), file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Writes the table so far for programs."""
        found = {
            **self.facts,
            "failed": self.failed,
            "cut_off": self.cut_off,
            "rows": [dict(zip(COLUMNS, row, strict=True)) for row in self.rows],
        }
        self.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def exactness(check: Check, cells: Sequence[Cell], until: float) -> None:
    """Compares cells of the exactness matrix, on the device, with the unsplit model.

    The kinds, a model and a precision, take turns, so that each of them has run where the time ends
    before the cells do.

    Args:
        check: the table.
        cells: what to train.
        until: the seconds that are left for the other checks; no cell begins with fewer.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    gpus = torch.cuda.device_count()
    by_kind: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.case, cell.precision)):
        by_kind.setdefault((cell.case, cell.precision), []).append(cell)
    differences = {kind: [(0.0, "")] for kind in by_kind}
    errors: dict[tuple[str, str], list[str]] = {kind: [] for kind in by_kind}
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_kind.values()))
    try:
        for cell in filter(None, turns):
            if check.left < until:
                break
            kind = cell.case, cell.precision
            try:
                trained = compared(cell, devices=check.devices(cell.nb_part, gpus))
                worst = max((difference(*two), f"{cell}, {at}") for at, *two, _ in trained)
                differences[kind].append(worst)
            except Exception as error:  # one broken cell is a line, not the end
                errors[kind].append(f"{cell}: {type(error).__name__}: {error}")
    finally:  # also where the time of `gpu_check.sh` is over
        for kind, chosen in by_kind.items():
            _add_exactness(check, kind, len(chosen), differences[kind], errors[kind])


def _add_exactness(
    check: Check,
    kind: tuple[str, str],
    chosen: int,
    differences: Sequence[tuple[float, str]],
    errors: Sequence[str],
) -> None:
    """Adds the row of a model and a precision."""
    case, precision = kind
    worst, where = max(differences)
    good = worst <= TOLERANCE[precision] and not errors
    check.failed |= not good
    done, equal = len(differences) - 1, [value for value, _ in differences[1:]].count(0.0)
    verdict = "ok" if good else f"FAILED {where} {errors[:2]}"
    if not done and not errors:
        check.cut_off.append(f"exact: {case}, {precision}")
        verdict = "cut off: no time"
    check.add(
        f"exact: {case}",
        f"{precision}, {done} of {chosen} cells",
        f"differs by {worst:.1e}, {equal} bitwise equal",
        f"at most {TOLERANCE[precision]:.0e}",
        verdict,
    )


def host_cost(check: Check) -> None:
    """Measures stages that do next to nothing, on one device."""
    chunks, repeats = (4, 1) if check.small else (32, 7)
    for stages in (1, 2) if check.small else (1, 2, 4, 8):
        devices = check.devices(stages)
        x = torch.randn(chunks, 4, device=devices[0])

        def cost(step: Callable[[], object], stages: int = stages) -> str:
            return f"{check.seconds(step, 3, repeats) / (stages * chunks) * 1e6:.0f} us"

        beside = f"plain loop {cost(tiny.plain(stages, x, chunks))}"
        for schedule in ("gpipe", "1f1b"):
            found = cost(tiny.hybrid(stages, x, chunks, schedule, devices))
            setting = f"{schedule}, P={stages}, m={chunks}"
            check.add("host cost", setting, f"{found} per stage and micro-batch", beside)


def memory(check: Check) -> None:
    """Measures what the allocator of the device had given out at the peak of a step."""
    if check.device != "cuda":
        check.add("memory", "", "no counter on a CPU")
        return
    width, samples, stages = 1024, 512, 4
    for recompute, (schedule, per_device) in (
        *itertools.product(["never"], [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)]),
        *itertools.product(["always"], [("gpipe", 1), ("1f1b", 1)]),
    ):
        peaks = []
        for chunks in (4, 8, 16, 32):
            layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(16)]
            model = HybridModel(
                nn.Sequential(*layers),
                World.from_env(stages, check.devices(stages)),
                chunks=chunks,
                schedule=schedule,
                stages_per_device=per_device,
                recompute=recompute,
            )
            x = torch.randn(chunks * samples, width, device="cuda")
            model.train_step(x, None, mean_loss)  # gradients are there from now on
            check.wait()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.train_step(x, None, mean_loss)
            check.wait()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
            del layers, model, x
        check.add(
            "memory, 4 stages on one GPU",
            f"{schedule}, {per_device} a device, recompute {recompute}",
            " / ".join(f"{peak:.0f}" for peak in peaks) + " MiB",
            "m = 4 / 8 / 16 / 32",
        )


@dataclass(frozen=True)
class Size:
    """A GPT and its batch, in micro-batches of `samples`."""

    layers: int = 24
    width: int = 1024
    heads: int = 16
    length: int = 1024
    vocabulary: int = 50304
    samples: int = 4
    chunks: int = 8
    steps: int = 10

    def flops(self, net: nn.Sequential) -> int:
        """Returns the operations of a step.

        6 a parameter that multiplies (the tied one does, as the output layer; the positions do
        not), and attention: Chowdhery et al., arXiv:2204.02311, appendix B.
        """
        multiply = sum(p.numel() for p in net.parameters()) - net.embed.position.weight.numel()
        attention = 12 * self.layers * self.width * self.length
        return self.samples * self.chunks * self.length * (6 * multiply + attention)


@dataclass(frozen=True)
class Way:
    """A way to train the GPT.

    Attributes:
        stages: the number of stages; 0: a plain loop.
        compiled: compile each layer.
        recompute: recompute all layers.
    """

    stages: int
    compiled: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        text = f"{self.stages} stages on one device" if self.stages else "plain loop"
        return text + ", compiled" * self.compiled + ", recompute=always" * self.recompute


WAYS = (Way(0), Way(1), Way(2), Way(4))
# The share of the time that the speed may take.
SPEED_SHARE = 0.5

# by value, because the time may end; only on a GPU, because a CPU compiles for minutes
MORE_WAYS = (
    Way(0, compiled=True),
    Way(1, compiled=True),
    Way(2, compiled=True),
    Way(2, False, True),
)


def gpt_step(
    check: Check, net: nn.Sequential, way: Way, size: Size, precision: str, ids: Tensor
) -> Callable[[], None]:
    """Returns a step of `net` on one device."""
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if way.stages:
        world = World.from_env(way.stages, check.devices(way.stages))
        options = PipelineOptions(
            chunks=size.chunks,
            split="size",
            precision=precision,
            compile=way.compiled,
            recompute="always" if way.recompute else "never",
        )
        model = HybridModel(net, world, options)
    else:
        net.to(ids.device)
        if way.compiled:
            for layer in net:
                layer.compile()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=ids.is_cuda)

    def step() -> None:
        if way.stages:
            model.train_step(x, y, cross_entropy)
        else:
            for part in zip(x.split(size.samples), y.split(size.samples), strict=True):
                with torch.autocast(check.device, AUTOCAST[precision]):
                    loss = cross_entropy(net(part[0]), part[1])
                (loss / size.chunks).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def speed(check: Check) -> None:
    """Trains a GPT in bf16: in a plain loop and in stages on the one device, also compiled."""
    size, precision, peak, device = Size(), "bf16", None, check.devices(1)[0]
    if check.small:
        size = Size(2, 64, 4, 64, 512, 1, 4, 2)
    if check.device == "cuda":
        name = torch.cuda.get_device_name(0)
        peak = next((flops for key, flops in PEAK.items() if key in name), None)
        if torch.cuda.get_device_capability(0) < (8, 0):
            precision = "fp16"
        if torch.cuda.get_device_properties(0).total_memory < 40e9 and not check.small:
            size = Size(samples=1, chunks=8)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = False
    shape = size.samples * size.chunks, size.length + 1
    ids = torch.randint(size.vocabulary, shape, device=device)
    base: dict[bool, float] = {}  # the plain loop's tokens per second, compiled or not
    for way in WAYS + MORE_WAYS * (check.device == "cuda"):
        if check.left < check.seconds_in_all * (1 - SPEED_SHARE) and not check.small:
            check.add("GPT", f"{way}", "", "", "cut off: no time")
            check.cut_off.append(f"GPT, {way}")
            continue
        torch.manual_seed(0)
        net = gpt(size.vocabulary, size.length, size.layers, size.heads, size.width)
        net.head.linear.weight = net.embed.token.weight
        step = gpt_step(check, net, way, size, precision, ids)
        step()
        if check.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = check.seconds(step, max(1, size.steps // 5), 5)
        rate = size.samples * size.chunks * size.length / seconds
        plain = base.setdefault(way.compiled, rate)
        used = "" if peak is None else f", MFU {size.flops(net) / seconds / peak:.1%}"
        if check.device == "cuda":
            used += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        check.add(
            f"GPT {sum(p.numel() for p in net.parameters()) / 1e6:.0f}M, {precision}",
            f"{way}",
            f"{rate:,.0f} tokens/s{used}",
            f"{rate / plain:.3f} of the plain loop" if way.stages else "",
        )
        del step, net
        gc.collect()
        torch.cuda.empty_cache()


# Seconds that a cell may still take when the time is nearly over.
CELL_S = 10.0


def exactness_in_time(check: Check) -> None:
    """Compares cells at random until the time is over."""
    exactness(check, random_cells(60 if check.small else 600), CELL_S)


def parts(check: Check) -> None:
    """Checks what only a GPU has, part by part."""
    failed, left_out = run_parts(check.devices(1)[0], lambda: check.left, check.add)
    check.failed |= bool(failed)
    check.cut_off += left_out


# By value, so that a short run has the main figures.
CHECKS: tuple[Callable[[Check], None], ...] = (speed, host_cost, parts, memory, exactness_in_time)


def run_checks(check: Check, checks: Sequence[Callable[[Check], None]] = CHECKS) -> None:
    """Runs checks in order, as far as there is time; one that raises is a row."""
    for part in checks:
        name = part.__name__.removesuffix("_in_time").replace("_", " ")
        # these have rows of their own for what they leave out
        if check.left <= 0 and part not in (exactness_in_time, parts):
            check.cut_off.append(name)
            continue
        try:
            part(check)
        except Exception as error:  # one that fails is a line, not the end
            check.failed = True
            check.add(name, "", "", "", f"FAILED {type(error).__name__}: {str(error)[:300]}")


def main() -> int:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny GPT, to try the script")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="the table")
    parser.add_argument("--seconds", type=float, default=450.0, help="for all of it")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --small tries the script without")
    start = time.monotonic()
    count = torch.cuda.device_count() if options.device == "cuda" else 0
    if not count:
        torch.set_num_threads(1)
    facts = facts_of(options.device)
    gpus = facts["gpus"]
    facts |= {"not_shown": not_shown(count)}
    check = Check(options.device, options.small, start + options.seconds, options.seconds)
    check.file, check.facts = options.json, facts
    try:
        run_checks(check)
    except KeyboardInterrupt:  # the time of `gpu_check.sh` is over
        check.failed = True
        check.cut_off.append("all after the last row, where it was ended")
    print(
        f"\nGPU check: {gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {time.monotonic() - start:.0f} s\n"
    )
    print_table(COLUMNS, check.rows)
    print(f"not shown: {'; '.join(not_shown(count))}")
    verdict = "FAILED" if check.failed else "ok"
    if check.cut_off:
        verdict += f"; not run to the end: {', '.join(check.cut_off)}"
    print(verdict)
    check.write()
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
