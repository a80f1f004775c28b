"""How close a pipeline comes to its schedule's ideal time, on devices that sleep.

A stage takes 5 ms forward and 10 ms backward, so that any number of "devices" fits on any number
of cores, and whatever is lost is the engine's. It notes when it is called and sleeps until its time
has passed, so PyTorch's own work inside counts as part of it. Some of a backward lies outside, such
as entering autograd. It is measured on a stage that is called without any engine, and the sleeps
are shorter by it. The column `alone` shows how well that holds.

As in training, steps follow one another: several are measured in a row, after as many that are not
measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hybridtrain.model import HybridModel
from hybridtrain.schedule import Durations, make_schedule, registered, schedule_names, stages_at
from hybridtrain.world import World
from scripts.bench.common import (
    Job,
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

# PyTorch's schedules, by the names of the rows.
TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
OURS = schedule_names()
WIDTH = 4
STEPS = 3  # measured in a row
MESSAGES = 6  # in a row; the first is not counted


@dataclass
class Sleeps:
    """How long a stage sleeps.

    Attributes:
        factor: how many times 5 and 10 ms a stage takes.
        early: how much too late `time.sleep` wakes up, at best.
        forward: of a forward's 5 ms, the part outside of the noted time.
        backward: likewise.
    """

    early: float = 0.0
    factor: float = 1.0
    forward: float = 0.0
    backward: float = 0.0


sleeps = Sleeps()


def forward_s() -> float:
    """Returns the seconds of a whole device's forward."""
    return FORWARD * sleeps.factor


def backward_s() -> float:
    """Returns the seconds of a whole device's backward."""
    return BACKWARD * sleeps.factor


def calibrate() -> None:
    """Sets `sleeps`: how late the sleep itself is, then what a stage takes outside."""
    late = []
    for _ in range(100):
        start = time.perf_counter()
        time.sleep(FORWARD)
        late.append(time.perf_counter() - start - FORWARD)
    sleeps.early = sorted(late)[10]
    for _ in range(2):  # the second time corrects the first
        forward, backward = stage_alone(50)
        sleeps.forward += statistics.median(forward) - forward_s()
        sleeps.backward += statistics.median(backward) - backward_s()


def stage_alone(microbatches: int) -> tuple[list[float], list[float]]:
    """The seconds of each forward and backward of one stage, called without any engine."""
    stage, x, gradient = Emulated(1.0), samples(1), torch.ones(1, WIDTH)
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
    """Sleeps for `seconds`, see `pause_until`."""
    pause_until(time.perf_counter() + seconds)


def pause_until(end: float) -> None:
    """Sleeps until `end`: a little less by the clock, the rest in naps of some microseconds."""
    time.sleep(max(0.0, end - time.perf_counter() - sleeps.early))
    while time.perf_counter() < end:
        time.sleep(0)


class _Clock:
    """The time at which a part of a stage's backward begins.

    A whole backward runs the output, the weight and the input. In two parts it runs the output and
    the input, and the weight some time later.
    """

    def __init__(self) -> None:
        self._at: float | None = None

    def begin(self) -> None:
        """The output's part begins."""
        self._at = time.perf_counter()

    def pause(self, share: float, is_last: bool) -> None:
        """Pauses to the end of half a backward; `is_last` if nothing follows it directly."""
        is_alone = self._at is None  # the weight, in a backward in two parts
        begin = time.perf_counter() if self._at is None else self._at
        end = begin + (backward_s() * share - sleeps.backward) / 2
        pause_until(end)
        self._at = None if is_last or is_alone else end


class _Input(torch.autograd.Function):
    """Sleeps in the backward with respect to the input: half of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause(ctx.share, is_last=True)
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Sleeps in the backward with respect to the weight: the other half."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause(ctx.share, is_last=False)
        return torch.zeros(()), None, None


class _Output(torch.autograd.Function):
    """Notes that a backward begins."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.begin()
        return grads[0], None


class Emulated(nn.Module):
    """A stage that takes `share` of the time of a device and computes nothing."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.weight = nn.Parameter(torch.zeros(()))
        self._clock = _Clock()

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        end = time.perf_counter() + forward_s() * self.share - sleeps.forward
        part = _Input.apply(x, self.share, self._clock)
        part = part + _Weight.apply(self.weight, self.share, self._clock)
        result: Tensor = _Output.apply(part, self._clock)
        pause_until(end)
        return result


def samples(rows: int) -> Tensor:
    """Inputs, the same everywhere, whose gradient the first stage computes as the others do."""
    return torch.ones(rows, WIDTH, requires_grad=True)


def network(stages: int, per_device: int) -> nn.Sequential:
    """A chain of `stages` emulated stages."""
    return nn.Sequential(*[Emulated(1 / per_device) for _ in range(stages)])


def model_of(devices: int, chunks: int, schedule: str, per_device: int) -> HybridModel:
    """Returns this project's pipeline of emulated stages, a thread per device."""
    return HybridModel(
        network(devices * per_device, per_device),
        World.from_env(devices, devices="cpu"),
        chunks=chunks,
        schedule=schedule,
        stages_per_device=per_device,
    )


def in_a_row(step: Callable[[], object]) -> Callable[[], object]:
    """Returns a function that runs `step` several times."""

    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def hybrid(devices: int, chunks: int, schedule: str, per_device: int) -> Callable[[], object]:
    """Steps of this project's."""
    model = model_of(devices, chunks, schedule, per_device)
    x = samples(chunks)
    return in_a_row(lambda: model.train_step(x, None, mean_loss))


def peer(devices: int, chunks: int) -> Callable[[], object]:
    """Steps of torchgpipe's."""
    model = gpipe_library(network(devices, 1), [1] * devices, chunks)
    x = samples(chunks)
    return in_a_row(lambda: model(x).mean().backward())


def torch_pipelining(
    devices: int, chunks: int, schedule: str, per_device: int, calibrated: Sleeps
) -> Callable[[], object] | None:
    """This process's part of steps of torch.distributed.pipelining's."""
    global sleeps
    sleeps = calibrated
    rank = dist.get_rank()
    group = dist.new_group(list(range(devices)))
    if rank >= devices:
        return None
    total = devices * per_device
    kind = TORCH[schedule]
    own = stages_at(rank, devices, per_device, "v" if kind is ScheduleZBVZeroBubble else "loop")
    stages = [
        PipelineStage(Emulated(1 / per_device), index, total, torch.device("cpu"), group=group)
        for index in own
    ]
    one_stage = kind in (ScheduleGPipe, Schedule1F1B)
    pipeline = kind(stages[0] if one_stage else stages, chunks, loss_fn=mean_loss)
    x, y = samples(chunks), torch.zeros(chunks)

    def step() -> None:
        given = (x,) if rank == 0 else ()
        targets = {"target": y} if total - 1 in own else {}
        pipeline.step(*given, **targets, return_outputs=False)

    return in_a_row(step)


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
    """This process's part of steps of this project's engine=distributed."""
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
    x = samples(chunks)
    return in_a_row(lambda: model.train_step(x, None, mean_loss))


def messages(calibrated: Sleeps) -> Callable[[], object]:
    """Bare messages of gloo's between sleeping processes, the even to the odd ones."""
    global sleeps
    sleeps = calibrated
    rank, size = dist.get_rank(), dist.get_world_size()

    def run() -> list[float]:
        stamp = torch.zeros(WIDTH, dtype=torch.float64)
        times = []
        for _ in range(MESSAGES):
            if rank % 2 == 0 and rank + 1 < size:
                pause(FORWARD)
                stamp[0] = time.perf_counter()
                dist.send(stamp, rank + 1)
            elif rank % 2:
                dist.recv(stamp, rank - 1)
                times.append(time.perf_counter() - float(stamp[0]))
        return times[1:]

    return run


def message_s(processes: Processes) -> float:
    """Returns the median seconds of a message on its way."""
    runs = [times for _ in range(3) for times in processes.run("messages")]
    return statistics.median(itertools.chain(*runs))


def step_s(steps: Job) -> Job:
    """Returns a job that runs `steps` twice, and gives the seconds of a step the second time."""
    return lambda: (steps(), steps() / STEPS)[1]


def ideal_s(
    schedule: str, devices: int, chunks: int, per_device: int, message_s: float = 0.0
) -> float:
    """Returns the seconds of a step of `schedule`, if only the stages and messages take time."""
    stages = devices * per_device
    times = [forward_s() / per_device] * stages, [backward_s() / per_device] * stages
    table = make_schedule(schedule, devices, chunks, per_device)
    borders = [
        0.0 if table.lane_of[stage] == table.lane_of[stage + 1] else message_s
        for stage in range(stages - 1)
    ]
    return Durations.of(*times, transfer=borders).length(table)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--schedules", nargs="+", default=list(TORCH), choices=[*TORCH, *OURS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--factor", type=float, default=1.0, help="times 5 and 10 ms of a stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sleeps.factor = options.factor
    calibrate()
    processes = Processes(max(options.devices))
    processes.add("messages", messages, sleeps)
    rows = []
    message_times = []
    kinds = {"interleaved": 2, **{name: registered(name).stages_per_device or 1 for name in OURS}}
    for devices, chunks, schedule in itertools.product(
        options.devices, options.chunks, options.schedules
    ):
        per_device = kinds[schedule]
        name = f"{schedule}, P={devices}, m={chunks}"
        if schedule in TORCH:
            processes.add(name, torch_pipelining, devices, chunks, schedule, per_device, sleeps)
        own = "1f1b" if schedule == "interleaved" else schedule
        processes.add(f"ours, {name}", over_processes, devices, chunks, own, per_device, sleeps)
        has_peer = schedule == "gpipe" and optional("torchgpipe") is not None
        ours = hybrid(devices, chunks, own, per_device)
        jobs = {
            "alone": lambda chunks=chunks: sum(map(sum, stage_alone(chunks))),
            "hybridtrain": step_s(timed(ours)),
            "processes": step_s(partial(processes.seconds, f"ours, {name}")),
            "torch": step_s(partial(processes.seconds, name)) if schedule in TORCH else None,
            "torchgpipe": step_s(timed(peer(devices, chunks))) if has_peer else None,
        }
        times = interleave(jobs, options.repeats)
        message_times.append(message_s(processes))
        ideal = ideal_s(own, devices, chunks, per_device)
        with_messages = ideal_s(own, devices, chunks, per_device, message_times[-1])
        busy = chunks * (forward_s() + backward_s())
        alone = times.pop("alone")
        efficiency = {key: shown([ideal / t for t in values]) for key, values in times.items()}
        idle = {key: f"{1 - busy / statistics.median(t):.1%}" for key, t in times.items() if t}
        rows.append(
            [
                name,
                f"{1 - busy / ideal:.1%}",
                f"{idle['hybridtrain']} / {idle['processes']} / {idle.get('torch', 'none')}",
                f"{ideal * 1e3:.1f}",
                efficiency["hybridtrain"],
                efficiency["processes"],
                shown([with_messages / t for t in times["processes"]]),
                efficiency["torch"] if schedule in TORCH else "has none",
                efficiency["torchgpipe"] if schedule == "gpipe" else "has none",
                shown([busy / t for t in alone]),
            ]
        )
        print(".", end="", file=sys.stderr, flush=True)
    processes.close()
    print(file=sys.stderr)
    header = ["schedule", "idle", "measured idle", "ideal ms", "hybridtrain", "engine=distributed"]
    header.append("with messages")
    print_table([*header, "torch.distributed.pipelining", "torchgpipe", "alone"], rows)
    print_footer(
        f"Efficiency: ideal time over the time taken; median of {options.repeats}, in brackets the "
        f"best. Ideal: the schedule simulated for {forward_s() * 1e3:g} + {backward_s() * 1e3:g} "
        "ms. With messages: engine=distributed over the schedule simulated with a bare message of "
        f"gloo's, {min(message_times) * 1e3:.2f} to {max(message_times) * 1e3:.2f} ms here "
        "(medians, one for each row). Measured idle: here with threads, with "
        "processes, PyTorch. Two stages per device for interleaved and in a V. PyTorch's "
        "beside zb-h1 is ScheduleInterleavedZeroBubble. `alone`: "
        "the same for m micro-batches of one stage without any engine, m (5 + 10 ms) over it. "
        f"Calibration: {sleeps.forward * 1e6:.0f} us of a forward and {sleeps.backward * 1e6:.0f} "
        "us of a backward are spent outside of the noted time; `time.sleep` wakes up "
        f"{sleeps.early * 1e6:.0f} us late."
    )


if __name__ == "__main__":
    main()
