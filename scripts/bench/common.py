"""What the benchmarks share: interleaved timing, processes for peers that need some, tables."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from hybridtrain.launch import free_port

PEERS = ("torchgpipe", "lightning", "accelerate", "transformers")

# Runs once and returns what was measured, mostly seconds.
Job = Callable[[], float]

# Which of several figures is the best one: `min` or `max`.
Best = Callable[[Sequence[float]], float]


def mean_loss(output: Tensor, targets: object) -> Tensor:
    """Some loss, nearly free."""
    return output.mean()


def square_loss(output: Tensor, targets: object) -> Tensor:
    """Some loss; the mean over the samples."""
    return output.pow(2).mean()


def gpipe_library(
    net: nn.Sequential, balance: Sequence[int], chunks: int, checkpoint: str = "never"
) -> nn.Module:
    """Returns torchgpipe's model of `net`, with so many layers in each partition."""
    from torchgpipe import GPipe

    devices = ["cpu"] * len(balance)
    return GPipe(net, balance, devices=devices, chunks=chunks, checkpoint=checkpoint)


def optional(name: str) -> Any:
    """The module `name`, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def timed(run: Callable[[], object]) -> Job:
    """A job that gives the seconds of `run()`."""

    def job() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return job


def interleave(
    jobs: Mapping[str, Job | None], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Runs A B C C B A A B C ...: what disturbs the machine for a while disturbs all alike.

    No job always follows the same other one. A job that is None (a peer that is not installed)
    gives no results.
    """
    results: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(-warm_up, repeats):
        for name, job in list(jobs.items())[:: -1 if turn % 2 else 1]:
            if job is None:
                continue
            gc.collect()
            result = job()
            if turn >= 0:
                results[name].append(result)
    return results


def shown(values: Sequence[float], pattern: str = "{:.3f}", best: Best = max) -> str:
    """For a table: the median and, in brackets, the best; `not installed` of nothing."""
    if not values:
        return "not installed"
    return f"{pattern.format(statistics.median(values))} ({pattern.format(best(values))})"


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints Markdown; the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    cells.insert(1, [("-" * (w - 1) + ":") if i else "-" * w for i, w in enumerate(widths)])
    for row in cells:
        padded = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"| {' | '.join(padded)} |")
    print()


def print_footer(text: str) -> None:
    """Prints `text`, the command, the versions and the machine."""
    print(text, end="  \n")
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for name in PEERS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    spec = sys.modules["__main__"].__spec__
    here = f"-m {spec.name.removesuffix('.__main__')}" if spec else sys.argv[0]
    print(f"Command: `python {' '.join([here, *sys.argv[1:]])}`  ")
    print(f"Versions: {', '.join(versions)}  ")
    print(
        f"Machine: {_cpu()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; "
        f"load average at the end {load} (this run included); {time.strftime('%Y-%m-%d')}"
    )
    print()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return [*names, platform.processor() or "unknown CPU"][0]


# How long processes need to wake up and read a command.
_START_S = 0.01


class Processes:
    """Worker processes in one gloo group that build jobs once and run them when told.

    Between two runs they wait in a pipe and cost nothing, so that their jobs can be interleaved
    with those of this process.
    """

    def __init__(self, count: int) -> None:
        context = mp.get_context("spawn")
        port = free_port()
        self._pipes = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, count, port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def add(self, name: str, build: Callable[..., Callable[[], object] | None], *args: Any) -> None:
        """Every process calls `build(*args)`, a function of a module, and keeps the job it gives.

        None is the job of a process that has nothing to do.
        """
        self._tell(("add", name, build, args))
        self._answers()

    def run(self, name: str) -> list[Any]:
        """What the job returned in every process."""
        return [value for value, _, _ in self._run(name)]

    def seconds(self, name: str) -> float:
        """Runs the job once, begun by all at one time: from the first start to the last end."""
        spans = [(start, end) for _, start, end in self._run(name) if end]
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def close(self) -> None:
        """Ends the processes."""
        self._tell(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.terminate()

    def _run(self, name: str) -> list[tuple[Any, float, float]]:
        # First of all, since it takes longer in some processes than in others.
        self._tell(("collect garbage", name, None, None))
        self._answers()
        # All processes read one clock, so that they can begin at one time, after they woke up.
        self._tell(("run", name, time.perf_counter() + _START_S, None))
        return self._answers()

    def _tell(self, message: Any) -> None:
        for pipe in self._pipes:
            pipe.send(message)

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for pipe in self._pipes]
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors:
            raise RuntimeError(errors[0])
        return answers


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    pipe.send(None)
    jobs: dict[str, Callable[[], object] | None] = {}
    while (message := pipe.recv()) is not None:
        what, name, first, args = message
        try:
            if what == "add":
                jobs[name] = first(*args)
                pipe.send(None)
                continue
            if what == "collect garbage":
                gc.collect()
                pipe.send(None)
                continue
            job = jobs[name]
            if job is None:
                pipe.send((None, 0.0, 0.0))
                continue
            time.sleep(max(0.0, first - time.perf_counter()))
            start = time.perf_counter()
            value = job()
            pipe.send((value, start, time.perf_counter()))
        except Exception:
            pipe.send(f"process {rank} of {size}, job {name!r}:\n{traceback.format_exc()}")
    dist.destroy_process_group()
