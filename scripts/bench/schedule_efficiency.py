"""How close a pipeline comes to its schedule's ideal time, on devices that sleep.

A stage takes 5 ms forward and 10 ms backward, so that any number of "devices" fits on any number
of cores, and whatever is lost is the engine's. It sleeps for most of it; PyTorch itself, woken up
with cold caches, needs some 100 us for the rest. So the sleeps are calibrated: a stage on its own,
called without any engine, takes 5 and 10 ms. The column `alone` shows how well that holds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from hybridtrain.model import HybridModel
from hybridtrain.world import World
from scripts.bench.common import (
    Processes,
    gpipe_library,
    interleave,
    mean_loss,
    optional,
    print_footer,
    print_table,
    shown,
    timed,
)

FORWARD, BACKWARD = 0.005, 0.010
WIDTH = 4


@dataclass
class Sleeps:
    """How long a stage sleeps.

    Attributes:
        early: how much too late `time.sleep` wakes up, at best.
        forward: of a forward's 5 ms, the part that PyTorch takes.
        backward: likewise.
    """

    early: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


sleeps = Sleeps()


def calibrate() -> None:
    """Sets `sleeps`: first what the sleep itself is late by, then what PyTorch takes."""
    late = []
    for _ in range(100):
        start = time.perf_counter()
        time.sleep(FORWARD)
        late.append(time.perf_counter() - start - FORWARD)
    sleeps.early = sorted(late)[10]
    for _ in range(2):  # the second time corrects the first
        forward, backward = stage_alone(50)
        sleeps.forward += statistics.median(forward) - FORWARD
        sleeps.backward += statistics.median(backward) - BACKWARD


def stage_alone(microbatches: int) -> tuple[list[float], list[float]]:
    """The seconds of each forward and backward of one stage, called without any engine."""
    stage, x, gradient = Emulated(1.0), torch.randn(1, WIDTH), torch.ones(1, WIDTH)
    forward, backward = [], []
    for _ in range(microbatches):
        start = time.perf_counter()
        y = stage(x)
        middle = time.perf_counter()
        torch.autograd.backward(y, gradient)
        end = time.perf_counter()
        forward.append(middle - start)
        backward.append(end - middle)
    return forward, backward


def pause(seconds: float) -> None:
    """Sleeps to a deadline: a little less by the clock, the rest in naps of some microseconds."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - sleeps.early))
    while time.perf_counter() < end:
        time.sleep(0)


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, share: float) -> Tensor:
        ctx.share = share
        pause(FORWARD * share - sleeps.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pause(BACKWARD * ctx.share - sleeps.backward)
        return grads[0], torch.zeros(()), None


class Emulated(nn.Module):
    """A stage that takes `share` of the time of a device and computes nothing."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        result: Tensor = _Pause.apply(x, self.weight, self.share)
        return result


def network(stages: int, per_device: int) -> nn.Sequential:
    """A chain of `stages` emulated stages."""
    return nn.Sequential(*[Emulated(1 / per_device) for _ in range(stages)])


def hybrid(devices: int, chunks: int, schedule: str, per_device: int) -> Callable[[], object]:
    """A step of this project's."""
    model = HybridModel(
        network(devices * per_device, per_device),
        World.from_env(devices, devices="cpu"),
        chunks=chunks,
        schedule=schedule,
        stages_per_device=per_device,
    )
    x = torch.randn(chunks, WIDTH)
    return lambda: model.train_step(x, None, mean_loss)


def peer(devices: int, chunks: int) -> Callable[[], object]:
    """A step of torchgpipe's."""
    model = gpipe_library(network(devices, 1), [1] * devices, chunks)
    x = torch.randn(chunks, WIDTH)
    return lambda: model(x).mean().backward()


def torch_pipelining(
    devices: int, chunks: int, schedule: str, per_device: int, calibrated: Sleeps
) -> Callable[[], object] | None:
    """This process's part of a step of torch.distributed.pipelining's."""
    global sleeps
    sleeps = calibrated
    rank = dist.get_rank()
    group = dist.new_group(list(range(devices)))
    if rank >= devices:
        return None
    total = devices * per_device
    stages = [
        PipelineStage(Emulated(1 / per_device), index, total, torch.device("cpu"), group=group)
        for index in range(rank, total, devices)
    ]
    if schedule == "interleaved":
        pipeline = ScheduleInterleaved1F1B(stages, chunks, loss_fn=mean_loss)
    else:
        kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        pipeline = kind(stages[0], chunks, loss_fn=mean_loss)
    x, y = torch.randn(chunks, WIDTH), torch.zeros(chunks)

    def step() -> None:
        given = (x,) if rank == 0 else ()
        targets = {"target": y} if rank == devices - 1 else {}
        pipeline.step(*given, **targets, return_outputs=False)

    return step


def part_of_pipeline(devices: int) -> World | None:
    """This process's world in a pipeline over the first `devices` processes; None if it is none."""
    group = dist.new_group(list(range(devices)))
    if dist.get_rank() >= devices:
        return None
    return World(
        rank=dist.get_rank(),
        size=devices,
        engine="distributed",
        processes_per_replica=devices,
        pipeline_group=group,
        _object_group=group,
    )


def over_processes(
    devices: int, chunks: int, schedule: str, per_device: int, calibrated: Sleeps
) -> Callable[[], object] | None:
    """This process's part of a step of this project's engine=distributed."""
    global sleeps
    sleeps = calibrated
    world = part_of_pipeline(devices)
    if world is None:
        return None
    model = HybridModel(
        network(devices * per_device, per_device),
        world,
        chunks=chunks,
        schedule=schedule,
        stages_per_device=per_device,
    )
    x = torch.ones(chunks, WIDTH)  # the same in all processes
    return lambda: model.train_step(x, None, mean_loss)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calibrate()
    processes = Processes(max(options.devices))
    rows = []
    kinds = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
    for devices, chunks, kind in itertools.product(options.devices, options.chunks, kinds):
        schedule, per_device = kind
        name = f"{schedule}, P={devices}, m={chunks}"
        processes.add(name, torch_pipelining, devices, chunks, schedule, per_device, sleeps)
        own = "1f1b" if per_device > 1 else schedule
        processes.add(f"ours, {name}", over_processes, devices, chunks, own, per_device, sleeps)
        has_peer = schedule == "gpipe" and optional("torchgpipe") is not None
        ours = hybrid(devices, chunks, own, per_device)
        jobs = {
            "alone": lambda chunks=chunks: sum(map(sum, stage_alone(chunks))),
            "hybridtrain": timed(ours),
            "processes": lambda name=name: processes.seconds(f"ours, {name}"),
            "torch": lambda name=name: processes.seconds(name),
            "torchgpipe": timed(peer(devices, chunks)) if has_peer else None,
        }
        times = interleave(jobs, options.repeats)
        # (P - 1) of the v m + P - 1 slots, of a vth of the time each, are bubble
        ideal = (chunks + (devices - 1) / per_device) * (FORWARD + BACKWARD)
        alone = times.pop("alone")
        efficiency = {key: shown([ideal / t for t in values]) for key, values in times.items()}
        rows.append(
            [
                name,
                f"{(devices - 1) / (per_device * chunks + devices - 1):.3f}",
                f"{ideal * 1e3:.1f}",
                efficiency["hybridtrain"],
                efficiency["processes"],
                efficiency["torch"],
                efficiency["torchgpipe"] if schedule == "gpipe" else "has none",
                shown([chunks * (FORWARD + BACKWARD) / t for t in alone]),
            ]
        )
        print(".", end="", file=sys.stderr, flush=True)
    processes.close()
    print(file=sys.stderr)
    header = ["schedule", "bubble by formula", "ideal ms", "hybridtrain", "engine=distributed"]
    print_table([*header, "torch.distributed.pipelining", "torchgpipe", "alone"], rows)
    print_footer(
        f"Efficiency: ideal time over the time taken; median of {options.repeats}, in brackets the "
        "best. Ideal: (m + (P-1)/v) (5 + 10 ms), v = 2 when interleaved, else 1. `alone`: the "
        "same for m micro-batches of one stage without any engine, m (5 + 10 ms) over the time. "
        f"Calibration: of a forward, PyTorch itself takes {sleeps.forward * 1e6:.0f} us, of a "
        f"backward {sleeps.backward * 1e6:.0f}; `time.sleep` wakes up {sleeps.early * 1e6:.0f} us "
        "late."
    )


if __name__ == "__main__":
    main()
