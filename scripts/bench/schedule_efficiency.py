"""How close a pipeline comes to its schedule's ideal time, on devices that sleep.

A stage takes 5 ms forward and 10 ms backward, so that any number of "devices" fits on any number
of cores, and whatever is lost is the engine's. It notes when it is called and sleeps until its time
has passed, so PyTorch's own work inside counts as part of it. Some of a backward lies outside, such
as entering autograd, which a backward in two parts does twice. It is measured on a stage that is
called without any engine, and the sleeps are shorter by it. The column `alone` shows how well that
holds: it is measured between the runs, and the ideal times follow it, because the speed of a shared
machine changes.

As in training, steps follow one another: several are measured in a row, after as many that are not
measured.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
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
        backward: of a whole backward's 10 ms, the part outside of the noted time.
        to_input: of the 5 ms of a backward's first part, the part outside of the noted time.
        to_weight: of the 5 ms of its second part, the part outside of the noted time.
    """

    early: float = 0.0
    factor: float = 1.0
    forward: float = 0.0
    backward: float = 0.0
    to_input: float = 0.0
    to_weight: float = 0.0


sleeps = Sleeps()


def forward_s() -> float:
    """Returns the seconds of a whole device's forward."""
    return FORWARD * sleeps.factor


def backward_s() -> float:
    """Returns the seconds of a whole device's backward."""
    return BACKWARD * sleeps.factor


def calibrate(share: float = 1.0) -> None:
    """Sets `sleeps`: how late the sleep itself is, then what a stage takes outside.

    After a longer sleep PyTorch's code takes longer too, so it depends on the stage's share of a
    device's time.
    """
    late = []
    for _ in range(100):
        start = time.perf_counter()
        time.sleep(FORWARD)
        late.append(time.perf_counter() - start - FORWARD)
    sleeps.early = sorted(late)[10]
    for _ in range(2):  # the second time corrects the first
        forward, backward = zip(*stage_alone(25, share=share), strict=True)
        sleeps.forward += statistics.median(forward) - forward_s() * share
        sleeps.backward += statistics.median(backward) - backward_s() * share
        _, to_input, to_weight = zip(*stage_alone(25, in_parts=True, share=share), strict=True)
        sleeps.to_input += statistics.median(to_input) - backward_s() * share / 2
        sleeps.to_weight += statistics.median(to_weight) - backward_s() * share / 2


def stage_alone(
    microbatches: int, in_parts: bool = False, share: float = 1.0
) -> list[tuple[float, ...]]:
    """The seconds of each action of one stage, called without any engine.

    Args:
        microbatches: how often it is called.
        in_parts: run each backward in two parts.
        share: the stage's share of the time of a device.

    Returns:
        for each micro-batch its forward and its backward, or the two parts of its backward.
    """
    stage, x, gradient = Emulated(share), samples(1), torch.ones(1, WIDTH)
    times = []
    for _ in range(microbatches):
        stamps = [time.perf_counter()]
        y = stage(x)
        stamps.append(time.perf_counter())
        if in_parts:
            weight = _edge_to_weight(y)
            inner = torch.autograd.grad(y, (x, weight), gradient, retain_graph=True)[1]
            stamps.append(time.perf_counter())
            torch.autograd.backward(weight, inner)
        else:
            torch.autograd.backward(y, gradient)
        stamps.append(time.perf_counter())
        times.append(tuple(end - start for start, end in itertools.pairwise(stamps)))
    return times


def device_alone_s(chunks: int, in_parts: bool, per_device: int) -> float:
    """The seconds of a device's stages for `chunks` micro-batches, without any engine."""
    return sum(map(sum, stage_alone(chunks * per_device, in_parts, 1 / per_device)))


def _edge_to_weight(y: Tensor) -> GradientEdge:
    """Returns where the weight's part of the backward of an emulated stage begins."""
    assert y.grad_fn is not None
    add = y.grad_fn.next_functions[0][0]
    assert add is not None
    node, index = add.next_functions[1]
    assert node is not None
    return GradientEdge(node, index)


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
        self._is_whole = False

    def begin(self) -> None:
        """The output's part begins."""
        self._at, self._is_whole = time.perf_counter(), False

    def pause_weight(self, share: float) -> None:
        """Pauses for half a backward; the input follows directly if the backward is whole."""
        half = backward_s() * share / 2
        if self._at is None:
            pause(half - sleeps.to_weight)
            return
        self._at, self._is_whole = self._at + half - sleeps.backward / 2, True
        pause_until(self._at)

    def pause_input(self, share: float) -> None:
        """Pauses for half a backward, the end of a whole one or all of a first part."""
        assert self._at is not None
        outside = sleeps.backward / 2 if self._is_whole else sleeps.to_input
        end, self._at = self._at + backward_s() * share / 2 - outside, None
        pause_until(end)


class _Input(torch.autograd.Function):
    """Sleeps in the backward with respect to the input: half of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause_input(ctx.share)
        return grads[0], None, None


class _Weight(torch.autograd.Function):
    """Sleeps in the backward with respect to the weight: the other half."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, share: float, clock: _Clock) -> Tensor:
        ctx.share, ctx.clock = share, clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.pause_weight(ctx.share)
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


@dataclass(frozen=True)
class Message:
    """The cost of one gloo message, in seconds.

    Attributes:
        sending: how long the call that sends it takes in the sender's thread.
        receiving: how long the call that starts its receive takes in the receiver's thread.
        latency: from the end of the sender's call to the end of the receiver's wait.
    """

    sending: float = 0.0
    receiving: float = 0.0
    latency: float = 0.0


def messages(calibrated: Sleeps) -> Callable[[], object]:
    """Bare messages between sleeping processes, the even to the odd ones.

    As in a pipeline, each receive is started before the message is sent, and both calls follow a
    sleep. A run of an even process gives the seconds of its sends and their ends; of an odd one the
    seconds of starting receives and the ends of their waits.
    """
    global sleeps
    sleeps = calibrated
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.GroupMember.WORLD
    assert group is not None

    def run() -> list[tuple[float, float]]:
        tensor, times = torch.zeros(WIDTH), []
        for _ in range(MESSAGES if rank % 2 or rank + 1 < size else 0):
            pause(FORWARD / 2 if rank % 2 else FORWARD)
            start = time.perf_counter()
            work = (
                group.recv([tensor], rank - 1, 0) if rank % 2 else group.send([tensor], rank + 1, 0)
            )
            end = time.perf_counter()
            work.wait()
            times.append((end - start, time.perf_counter() if rank % 2 else end))
        return times[1:]

    return run


def message_of(processes: Processes) -> Message:
    """Returns the median costs of a message."""
    sending, receiving, latencies = [], [], []
    for _ in range(3):
        ranks = processes.run("messages")
        for sends, receives in zip(ranks[::2], ranks[1::2], strict=False):
            for (sent, begin), (received, end) in zip(sends, receives, strict=True):
                sending.append(sent)
                receiving.append(received)
                latencies.append(end - begin)
    return Message(*map(statistics.median, (sending, receiving, latencies)))


def shown_message(costs: Sequence[Message]) -> str:
    """Returns the median costs of messages, for readers."""
    sending, receiving, latency = (
        statistics.median(getattr(cost, field.name) for cost in costs) * 1e3
        for field in fields(Message)
    )
    return (
        f"{sending:.2f} ms in the sender's thread, {receiving:.2f} ms in the receiver's, and "
        f"{latency:.2f} ms on its way"
    )


def step_s(steps: Job) -> Job:
    """Returns a job that runs `steps` twice, and gives the seconds of a step the second time."""
    return lambda: (steps(), steps() / STEPS)[1]


def ideal_s(
    schedule: str,
    devices: int,
    chunks: int,
    per_device: int,
    message: Message | None = None,
    pace: float = 1.0,
) -> float:
    """Returns the seconds of a step of `schedule`, if only the stages and messages take time.

    A stage takes `pace` times as long as intended.
    """
    message = message or Message()
    stages = devices * per_device
    table = make_schedule(schedule, devices, chunks, per_device)
    forward = [pace * forward_s() / per_device] * stages
    backward = [pace * backward_s() / per_device] * stages
    weight = Durations.of(forward, backward).weight
    transfer = [0.0] * (stages - 1)
    for stage in range(stages - 1):
        if table.lane_of[stage] != table.lane_of[stage + 1]:
            transfer[stage] = message.latency
            forward[stage] += message.sending
            forward[stage + 1] += message.receiving
            backward[stage + 1] += message.sending
            backward[stage] += message.receiving
    times = map(tuple, (forward, backward, weight, transfer))
    return Durations(*times).length(table)


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
    processes = Processes(max(options.devices))
    calibrate()
    processes.add("messages", messages, sleeps)
    rows = []
    costs = []
    kinds = {"interleaved": 2, **{name: registered(name).stages_per_device or 1 for name in OURS}}
    for devices, chunks, schedule in itertools.product(
        options.devices, options.chunks, options.schedules
    ):
        per_device = kinds[schedule]
        name = f"{schedule}, P={devices}, m={chunks}"
        calibrate(1 / per_device)  # for each row: the speed of a shared machine changes
        if schedule in TORCH:
            processes.add(name, torch_pipelining, devices, chunks, schedule, per_device, sleeps)
        own = "1f1b" if schedule == "interleaved" else schedule
        processes.add(f"ours, {name}", over_processes, devices, chunks, own, per_device, sleeps)
        has_peer = schedule == "gpipe" and optional("torchgpipe") is not None
        ours = hybrid(devices, chunks, own, per_device)
        in_parts = registered(own).splits_backward
        jobs = {
            "alone": partial(device_alone_s, chunks, in_parts, per_device),
            "hybridtrain": step_s(timed(ours)),
            "processes": step_s(partial(processes.seconds, f"ours, {name}")),
            "torch": step_s(partial(processes.seconds, name)) if schedule in TORCH else None,
            "torchgpipe": step_s(timed(peer(devices, chunks))) if has_peer else None,
        }
        times = interleave(jobs, options.repeats)
        costs.append(message_of(processes))
        alone = times.pop("alone")
        pace = statistics.median(alone) / (chunks * (forward_s() + backward_s()))
        ideal = ideal_s(own, devices, chunks, per_device, pace=pace)
        with_messages = ideal_s(own, devices, chunks, per_device, costs[-1], pace)
        busy = statistics.median(alone)
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
                shown([chunks * (forward_s() + backward_s()) / t for t in alone]),
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
        f"best. A stage takes {forward_s() * 1e3:g} + {backward_s() * 1e3:g} ms. `alone`: this, "
        "for m micro-batches, over the time that they take on one device without any engine. "
        "Ideal: the schedule simulated for that time. With messages: engine=distributed over the "
        "schedule simulated with bare messages of gloo's too (medians of the rows: "
        f"{shown_message(costs)}). Measured idle: here with threads, with processes, PyTorch. Two "
        "stages per device for interleaved and in a V. PyTorch's beside zb-h1 is "
        "ScheduleInterleavedZeroBubble. "
        f"Calibration, of the last row: {sleeps.forward * 1e6:.0f} us of a forward, "
        f"{sleeps.backward * 1e6:.0f} us of a whole backward, and {sleeps.to_input * 1e6:.0f} and "
        f"{sleeps.to_weight * 1e6:.0f} us of its parts are outside of the noted time; "
        "`time.sleep` wakes up "
        f"{sleeps.early * 1e6:.0f} us late."
    )


if __name__ == "__main__":
    main()
