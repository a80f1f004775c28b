"""Devices of unequal speed: the planned cut and shares, an even one, and the best of all cuts.

Three parts. In each, both run interleaved in the same processes:

pipelines   two `emulated_devices` with speeds 1:2 and memories 1:3. A layer sleeps for its time
            over the speed of its device. The best is the shortest simulated step of all cuts that
            fit into memory.
replicas    two processes with speeds 1:2, each a replica; samples by `replica_shares`.
throttled   two processes that compute, one of which has half a core, by a quota of its control
            group; `device_speeds=auto` measures that.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtrain.data import TrainLoader
from hybridtrain.model import HybridModel
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import LayerCost, Objective, cut_by_costs, every_cut, stage_costs
from hybridtrain.schedule import Durations, make_schedule, peak_in_flight
from hybridtrain.world import World
from scripts.bench import emulated_devices as emulation
from scripts.bench.common import (
    Processes,
    interleave,
    mean_loss,
    print_footer,
    print_table,
    square_loss,
    timed,
)

GIB = 2**30
SPEEDS = (1.0, 2.0)
MEMORY_GIB = (7.0, 21.0)
CHUNKS = 32

# Milliseconds of each layer's forward on the slow device, a backward takes twice as long; and its
# GiB of weights.
EQUAL = [(3.0, 1.0)] * 12
UNEVEN = [(ms, 1.0) for ms in (2, 4, 3, 2, 3, 4, 2, 2, 3, 4, 3, 4)]

LAYOUTS = {"1f1b": 1, "interleaved": 2, "zb-v": 2}

# The quota of the slow process: half a core, in periods that are short beside an action.
QUOTA_US, PERIOD_US = 1_000, 2_000
WIDTH, ROWS, LAYERS, MICROBATCHES = 512, 128, 12, 16


class Layer(nn.Module):
    """An emulated layer, on a device whose speed is set after the cut."""

    def __init__(self, forward_ms: float) -> None:
        super().__init__()
        self.emulated = emulation.Emulated(1.0)
        self.forward_ms = forward_ms

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        result: Tensor = self.emulated(x)
        return result

    def run_at(self, speed: float) -> None:
        """Sets the speed of its device."""
        self.emulated.share = self.forward_ms / 1e3 / emulation.forward_s() / speed


def pipeline_of(
    times: Sequence[tuple[float, float]],
    layout: str,
    counts: Sequence[int],
    engine: str,
    calibrated: emulation.Sleeps,
) -> Callable[[], object] | None:
    """This process's part of a step of a pipeline that is cut like this."""
    emulation.use(calibrated)
    world: World | None = World.from_env(2, devices="cpu") if engine == "local" else None
    if engine != "local":
        world = emulation.part_of_pipeline(2)
    assert world is not None
    net = nn.Sequential(*(Layer(forward_ms) for forward_ms, _ in times))
    for layer in net:
        layer.run_at(1.0)
    schedule = "1f1b" if layout == "interleaved" else layout
    model = HybridModel(
        net,
        world,
        chunks=CHUNKS,
        schedule=schedule,
        stages_per_device=LAYOUTS[layout],
        split=list(counts),
        self_check=False,
    )
    table = make_schedule(schedule, 2, CHUNKS, LAYOUTS[layout])
    first = 0
    for stage, count in enumerate(counts):
        for layer in net[first : first + count]:
            layer.run_at(SPEEDS[table.lane_of[stage]])
        first += count
    x = emulation.samples(CHUNKS)
    return lambda: model.train_step(x, None, mean_loss)


def pipelines(repeats: int) -> None:
    """Prints the table of pipelines over emulated devices."""
    emulation.calibrate()
    processes, rows = Processes(2), []
    cases = [
        *(("equal", EQUAL, layout, "local") for layout in LAYOUTS),
        ("uneven", UNEVEN, "1f1b", "local"),
        ("equal", EQUAL, "1f1b", "distributed"),
    ]
    for name, times, layout, engine in cases:
        per_device = LAYOUTS[layout]
        schedule = "1f1b" if layout == "interleaved" else layout
        table = make_schedule(schedule, 2, CHUNKS, per_device)
        in_flight = peak_in_flight(table)
        costs = [
            LayerCost(str(i), 1, ms, 2 * ms, int(gib * GIB)) for i, (ms, gib) in enumerate(times)
        ]
        unequal = Objective.of(
            PipelineOptions(
                split="time",
                schedule=schedule,
                stages_per_device=per_device,
                device_speeds=SPEEDS,
                memory_limit_gib=MEMORY_GIB,
            )
        )

        def step_ms(
            counts: Sequence[int],
            costs: Sequence[LayerCost] = costs,
            in_flight: Sequence[int] = in_flight,
            speeds: Sequence[float] = unequal.speeds,
            table: Any = table,
        ) -> float:
            stages = stage_costs(costs, counts, in_flight, speeds=speeds)
            times = [s.forward_ms for s in stages], [s.backward_ms for s in stages]
            return Durations.of(*times).length(table)

        planned = cut_by_costs(costs, in_flight, unequal)
        even = cut_by_costs(costs, in_flight, Objective())
        limits = unequal.stage_limits(len(in_flight))
        best = min(
            step_ms(cut)
            for cut in every_cut(len(costs), len(in_flight))
            if all(
                stage.memory_bytes <= limit
                for stage, limit in zip(stage_costs(costs, cut, in_flight), limits, strict=True)
            )
        )
        jobs: dict[str, Any] = {}
        for cut_name, counts in (("planned", planned), ("even", even)):
            arguments = times, layout, counts, engine, emulation.sleeps
            if engine == "local":
                run = pipeline_of(*arguments)
                assert run is not None
                jobs[cut_name] = timed(run)
            else:
                key = f"{name} {layout} {cut_name}"
                processes.add(key, pipeline_of, *arguments)
                jobs[cut_name] = lambda key=key: processes.seconds(key)
        seconds = interleave(jobs, repeats)
        ours, evens = (statistics.median(seconds[key]) * 1e3 for key in jobs)
        rows.append(
            [
                f"{name} layers, {layout}, {engine}",
                " ".join(map(str, planned)),
                " ".join(map(str, even)),
                f"{best:.0f}",
                f"{ours:.0f} ({ours / best:.3f})",
                f"{evens:.0f} ({step_ms(even) / best:.2f})",
                f"{evens / ours:.2f}",
            ]
        )
    processes.close()
    header = ["layers", "planned cut", "even cut", "best ms", "planned ms", "even ms", "even over"]
    print_table(header, rows)


def replica(shares: Sequence[float] | None, calibrated: emulation.Sleeps) -> Callable[[], object]:
    """This process's part of a step of two replicas with speeds 1:2."""
    emulation.use(calibrated)
    rank = dist.get_rank()
    world = World(
        rank=rank,
        size=2,
        replica_shares=None if shares is None else tuple(shares),
        _object_group=dist.new_group([0, 1]),
    )
    net = nn.Sequential(PerSample(SPEEDS[rank]))
    model = HybridModel(net, world, self_check=False)
    data = torch.utils.data.TensorDataset(torch.ones(96, emulation.WIDTH), torch.zeros(96))
    loader = TrainLoader(data, 96, world)
    batches = loader.stream()

    def step() -> None:
        batch = next(batches)
        weight = model.step_weights(
            [(batch.inputs, batch.targets)],
            square_loss,
            samples=[batch.samples],
            total=batch.total,
        )[0]
        model.train_step(batch.inputs, batch.targets, square_loss, weight=weight)

    return step


class PerSample(nn.Module):
    """An emulated layer that takes 2 + 2 ms for each sample on a device of speed 1.

    Its input needs no gradient, which is half of a backward.
    """

    def __init__(self, speed: float) -> None:
        super().__init__()
        self.emulated = emulation.Emulated(1.0)
        self.speed = speed

    def forward(self, x: Tensor) -> Tensor:
        """The same values, later."""
        self.emulated.share = len(x) * 0.4 / self.speed
        result: Tensor = self.emulated(x)
        return result


def replicas(repeats: int) -> None:
    """Prints the table of two replicas."""
    processes = Processes(2)
    for name, shares in (("shares 1:2", (1, 2)), ("equal", None)):
        processes.add(name, replica, shares, emulation.sleeps)
    jobs = {name: lambda name=name: processes.seconds(name) for name in ("shares 1:2", "equal")}
    seconds = interleave(jobs, repeats)
    processes.close()
    ours, evens = (statistics.median(seconds[key]) * 1e3 for key in jobs)
    best = 96 / sum(SPEEDS) * 4
    print_table(
        ["96 samples of 4 ms", "best ms", "shares 1:2", "equal shares", "equal over"],
        [
            [
                "two replicas, speeds 1:2",
                f"{best:.0f}",
                f"{ours:.0f} ({ours / best:.3f})",
                f"{evens:.0f} ({evens / best:.2f})",
                f"{evens / ours:.2f}",
            ]
        ],
    )


def throttle() -> None:
    """Puts rank 1 into a control group with half a core."""
    if dist.get_rank() == 1:
        root = Path("/sys/fs/cgroup")
        first_version = root / "cpu"
        parent = first_version if first_version.exists() else root
        group = parent / f"hybridtrain-bench-{os.getpid()}"
        group.mkdir()
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(os.getpid()))


def throttled_stage(speeds: Any) -> Callable[[], object] | None:
    """This process's part of a step of a pipeline that computes."""
    world = emulation.part_of_pipeline(2)
    assert world is not None
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model = HybridModel(net, world, chunks=MICROBATCHES, device_speeds=speeds, self_check=False)
    x = torch.ones(ROWS * MICROBATCHES, WIDTH)

    def step() -> str:
        model.train_step(x, None, square_loss)
        return f"{model.plan.counts} {[round(speed, 2) for speed in model.plan.speeds]}"

    return step


class Block(nn.Module):
    """A layer of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x` and what two products make of it."""
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def run_throttle() -> Callable[[], object]:
    """The job that throttles rank 1."""
    return throttle


def layer_ms() -> Callable[[], object]:
    """The job that times a layer's forward and backward in this process, over many of them."""

    def job() -> float:
        block, x = Block(), torch.ones(ROWS, WIDTH, requires_grad=True)
        times = 30

        def run() -> None:
            for _ in range(times):
                block(x).pow(2).mean().backward()

        run()
        return timed(run)() / times * 1e3

    return job


def throttled(repeats: int) -> None:
    """Prints the table of two computing processes, of which one is throttled."""
    processes = Processes(2)
    processes.add("throttle", run_throttle)
    try:
        processes.run("throttle")
    except RuntimeError as error:
        print(f"no quota can be set here: {str(error).strip().splitlines()[-1]}\n")
        processes.close()
        return
    for name, speeds in (("auto", "auto"), ("even", None)):
        processes.add(name, throttled_stage, speeds)
    processes.add("layer", layer_ms)
    shown = {name: processes.run(name)[0] for name in ("auto", "even")}
    layers: list[list[float]] = []
    jobs: dict[str, Any] = {
        name: lambda name=name: processes.seconds(name) for name in ("auto", "even")
    }
    jobs["layer"] = lambda: layers.append(processes.run("layer")) or 0.0
    seconds = interleave(jobs, repeats)
    slow = processes_group()
    processes.close()
    for group in slow:
        with suppress(OSError):
            group.rmdir()
    fast_ms, slow_ms = (statistics.median(each) for each in zip(*layers[1:], strict=True))
    table = make_schedule("1f1b", 2, MICROBATCHES)

    def step_ms(counts: Sequence[int]) -> float:
        times = [counts[0] * fast_ms, counts[1] * slow_ms]
        thirds = [t / 3 for t in times]
        return Durations.of(thirds, [2 * t for t in thirds]).length(table)

    best_cut = min(every_cut(LAYERS, 2), key=step_ms)
    ours, evens = (statistics.median(seconds[key]) * 1e3 for key in ("auto", "even"))
    print_table(
        ["layer ms, each process", "best cut, ms", "auto", "even", "even over"],
        [
            [
                f"{fast_ms:.2f} {slow_ms:.2f}",
                f"{best_cut} {step_ms(best_cut):.0f}",
                f"{shown['auto']} {ours:.0f} ({ours / step_ms(best_cut):.3f})",
                f"{shown['even']} {evens:.0f} ({evens / step_ms(best_cut):.2f})",
                f"{evens / ours:.2f}",
            ]
        ],
    )


def processes_group() -> list[Path]:
    """Returns the control groups that this benchmark has made."""
    return list(Path("/sys/fs/cgroup").glob("**/hybridtrain-bench-*"))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"pipelines": pipelines, "replicas": replicas, "throttled": throttled}
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    emulation.calibrate()
    for part in options.parts:
        parts[part](options.repeats)
    print_footer(
        f"Medians of {options.repeats}, planned and even interleaved; in brackets over the best. "
        "Best: the shortest simulated step of all cuts that fit, without the engine's time."
    )


if __name__ == "__main__":
    main()
