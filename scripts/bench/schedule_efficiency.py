"""How close a pipeline comes to its schedule's ideal time, on devices that sleep.

Whatever is lost is the engine's, because stages of `emulated_devices` take the time that they
should. The column `alone` shows how well that holds: it is measured between the runs, and the ideal
times follow it, because the speed of a shared machine changes. The column `bare loop` shows what
the same actions and messages take without a library.

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
from scripts.bench import emulated_devices as emulated
from scripts.bench.bare_loop import BareLoop
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
from scripts.bench.emulated_devices import (
    FORWARD,
    WIDTH,
    Emulated,
    Sleeps,
    backward_s,
    calibrate,
    device_alone_s,
    forward_s,
    network,
    part_of_pipeline,
    pause,
    samples,
)

# PyTorch's schedules, by the names of the rows.
TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
OURS = schedule_names()
STEPS = 3  # measured in a row
MESSAGES = 6  # in a row; the first is not counted


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
    emulated.use(calibrated)
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


def over_processes(
    devices: int, chunks: int, schedule: str, per_device: int, calibrated: Sleeps
) -> Callable[[], object] | None:
    """This process's part of steps of this project's engine=distributed."""
    emulated.use(calibrated)
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


def bare_steps(
    devices: int, chunks: int, schedule: str, per_device: int, calibrated: Sleeps
) -> Callable[[], object] | None:
    """This process's part of steps of a bare loop."""
    emulated.use(calibrated)
    world = part_of_pipeline(devices)
    if world is None:
        return None
    assert world.pipeline_group is not None
    table = make_schedule(schedule, devices, chunks, per_device)
    own = [stage for stage, device in table.lane_of.items() if device == world.rank]
    stages = {stage: Emulated(1 / per_device) for stage in own}
    return in_a_row(BareLoop(table, stages, samples(chunks), world.pipeline_group).step)


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
    emulated.use(calibrated)
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
    emulated.sleeps.factor = options.factor
    processes = Processes(max(options.devices))
    calibrate()
    processes.add("messages", messages, emulated.sleeps)
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
            processes.add(
                name, torch_pipelining, devices, chunks, schedule, per_device, emulated.sleeps
            )
        own = "1f1b" if schedule == "interleaved" else schedule
        for job, build in {"ours": over_processes, "bare": bare_steps}.items():
            shape = devices, chunks, own, per_device
            processes.add(f"{job}, {name}", build, *shape, emulated.sleeps)
        has_peer = schedule == "gpipe" and optional("torchgpipe") is not None
        ours = hybrid(devices, chunks, own, per_device)
        in_parts = registered(own).splits_backward
        jobs = {
            "alone": partial(device_alone_s, chunks, in_parts, per_device),
            "hybridtrain": step_s(timed(ours)),
            "processes": step_s(partial(processes.seconds, f"ours, {name}")),
            "bare": step_s(partial(processes.seconds, f"bare, {name}")),
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
                efficiency["bare"],
                efficiency["torch"] if schedule in TORCH else "has none",
                efficiency["torchgpipe"] if schedule == "gpipe" else "has none",
                shown([chunks * (forward_s() + backward_s()) / t for t in alone]),
            ]
        )
        print(".", end="", file=sys.stderr, flush=True)
    processes.close()
    last = emulated.sleeps
    print(file=sys.stderr)
    header = ["schedule", "idle", "measured idle", "ideal ms", "hybridtrain", "engine=distributed"]
    header += ["with messages", "bare loop", "torch.distributed.pipelining"]
    print_table([*header, "torchgpipe", "alone"], rows)
    print_footer(
        f"Efficiency: ideal time over the time taken; median of {options.repeats}, in brackets the "
        f"best. A stage takes {forward_s() * 1e3:g} + {backward_s() * 1e3:g} ms. `alone`: this, "
        "for m micro-batches, over the time that they take on one device without any engine. "
        "Ideal: the schedule simulated for that time. With messages: engine=distributed over the "
        "schedule simulated with bare messages of gloo's too (medians of the rows: "
        f"{shown_message(costs)}). Measured idle: here with threads, with processes, PyTorch. Two "
        "stages per device for interleaved and in a V. PyTorch's beside zb-h1 is "
        "ScheduleInterleavedZeroBubble. "
        "Bare loop: the same actions and their messages without an engine. "
        f"Calibration, of the last row: {last.forward * 1e6:.0f} us of a forward, "
        f"{last.backward * 1e6:.0f} us of a whole backward, and {last.to_input * 1e6:.0f} and "
        f"{last.to_weight * 1e6:.0f} us of its parts are outside of the noted time; "
        f"`time.sleep` wakes up {last.early * 1e6:.0f} us late."
    )


if __name__ == "__main__":
    main()
