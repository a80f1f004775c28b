"""Predicted against measured: the time of a step, and the memory of each stage.

    emulated   stages that sleep, so that any number of devices fits on any number of cores
    real       a GPT on CPU stages, whose layers are measured first
    memory     the storages that a step of a GPT keeps, against the predicted ones
    allocator  the peak of PyTorch's allocator in a step with a loss, against the predicted one
    layers     the layers of a GPT: estimated against measured

Prints a line for each configuration, and the median error of each part. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchvision.models import resnet18

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.precision import autocast
from hybridtrain.cli.commands.measure_machine import measured as measured_rates
from hybridtrain.loss import cross_entropy
from hybridtrain.model import HybridModel
from hybridtrain.models import gpt
from hybridtrain.partitioning import LayerCost, most_temporary, observed_chain
from hybridtrain.partitioning.cost_table import (
    LossOfStep,
    count_layers,
    counted_costs,
    given_costs,
    measured_costs,
)
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.price.price import price
from hybridtrain.price.stage_needs import device_memory
from hybridtrain.world import World
from scripts.bench import emulated_devices
from scripts.bench.common import Processes, mean_loss, print_footer, print_table, timed

# Shares of a device's 5 and 10 ms; repeated for as many stages as there are.
SHARES = {"even": (1.0,), "uneven": (1.0, 0.6, 1.4, 0.8)}
Row = tuple[str, float, float]


def emulated_layouts(
    devices: Sequence[int], chunks: Sequence[int]
) -> Iterator[tuple[ParallelLayout, str]]:
    """Yields 40 configurations by default: 2 engines x 2 x 2 x 2 or 3 schedules x 2 shares."""
    kinds = (("1f1b", 1), ("gpipe", 1), ("1f1b", 2))
    for engine, nb_part, m in itertools.product(("local", "distributed"), devices, chunks):
        for (schedule, v), shares in itertools.product(kinds, SHARES):
            if v == 1 or (m % nb_part == 0 and m == max(chunks)):
                yield ParallelLayout(nb_part, 1, engine, m, schedule, v), shares


def share_of(shares: str, stage: int, layout: ParallelLayout) -> float:
    """Returns the part of a device's time that `stage` takes."""
    given = SHARES[shares]
    return given[stage % len(given)] / layout.stages_per_device


def emulated(options: argparse.Namespace) -> list[Row]:
    """Returns predicted and measured milliseconds of steps on devices that sleep."""
    emulated_devices.calibrate()
    processes = Processes(max(options.devices))
    rows = []
    # the emulated times are calibrated to have PyTorch's own; a message has no bytes to speak of
    for layout, shares in emulated_layouts(options.devices, options.chunks):
        local = layout.engine == "local"
        hardware = Hardware(
            device="cpu",
            devices_per_node=layout.nb_part,
            node_latency_s=0.0 if local else options.message_s,
        )
        factors = [share_of(shares, stage, layout) for stage in range(layout.stages)]
        costs = [
            LayerCost(
                f"{i}", 1, emulated_devices.FORWARD * 1e3 * f, emulated_devices.BACKWARD * 1e3 * f
            )
            for i, f in enumerate(factors)
        ]
        table = given_costs(lambda samples, costs=costs: costs)
        predicted = price(table, hardware, StepWork(layout.chunks), layout, [1] * layout.stages)
        name = f"{layout.engine} {layout.schedule} P={layout.nb_part} m={layout.chunks} "
        name += f"v={layout.stages_per_device} {shares}"
        if local:
            run = timed(emulated_step(layout, factors))
        else:
            processes.add(name, distributed_step, layout, factors, emulated_devices.sleeps)
            run = partial(processes.seconds, name)
        rows.append((name, predicted.step_ms, median_ms(run, options.repeats)))
    processes.close()
    return rows


def emulated_step(
    layout: ParallelLayout, factors: Sequence[float], world: World | None = None
) -> Callable[[], object]:
    """Returns a step over stages that sleep."""
    model = HybridModel(
        nn.Sequential(*map(emulated_devices.Emulated, factors)),
        world or World.from_env(layout.nb_part, devices="cpu"),
        chunks=layout.chunks,
        schedule=layout.schedule,
        stages_per_device=layout.stages_per_device,
    )
    x = emulated_devices.samples(layout.chunks)
    return lambda: model.train_step(x, None, mean_loss)


def distributed_step(
    layout: ParallelLayout, factors: Sequence[float], calibrated: emulated_devices.Sleeps
) -> Callable[[], object] | None:
    """Returns this process's part of a step with `engine=distributed`."""
    emulated_devices.use(calibrated)
    world = emulated_devices.part_of_pipeline(layout.nb_part)
    return None if world is None else emulated_step(layout, factors, world)


def real_layouts() -> Iterator[ParallelLayout]:
    """Yields 12 configurations of two CPU stages."""
    for schedule, chunks, recompute in itertools.product(
        ("1f1b", "gpipe"), (2, 4, 8), ("never", "always")
    ):
        yield ParallelLayout(2, 1, "local", chunks, schedule, 1, recompute)


def real(options: argparse.Namespace) -> list[Row]:
    """Returns predicted and measured milliseconds of steps of a GPT on CPU stages."""
    net, tokens = small_gpt()
    chain, device = observed_chain(net, tokens), torch.device("cpu")
    hardware = Hardware(device="cpu", devices_per_node=2)
    rows = []
    for layout in real_layouts():
        # right before its steps, so that a busy machine is as busy for both
        table = measured_costs(chain, tokens, device, "fp32", seconds=0.5, sharing=2)
        # one at a time: the threads of many models share memory pools, those of a run do not
        model, counts = model_of(layout)
        predicted = price(table, hardware, StepWork(len(tokens)), layout, counts)
        run = timed(lambda model=model: model.train_step(tokens, None, mean_loss))
        rows.append((named(layout), predicted.pipeline_ms, median_ms(run, options.repeats)))
    return rows


def named(layout: ParallelLayout) -> str:
    """Returns what differs among the configurations."""
    return f"{layout.schedule} m={layout.chunks} recompute={layout.recompute}"


def memory() -> list[Row]:
    """Returns predicted and counted MiB of each stage, in a step with AdamW."""
    net, tokens = small_gpt()
    hardware = Hardware(device="cpu", flops_per_s={"fp32": 1e11})
    loss = LossOfStep(cross_entropy, tokens)
    table = counted_costs(observed_chain(net, tokens), tokens, hardware, "fp32", loss=loss)
    rows = []
    for layout in real_layouts():
        # the count on a CPU leaves out what a backward recomputes
        if layout.recompute != "never":
            continue
        model, counts = model_of(layout)
        optimizer = torch.optim.AdamW(model.parameters())
        model.train_step(tokens, tokens, cross_entropy)
        optimizer.step()
        counted = [stage["peak_memory_bytes"] for stage in model.stage_summaries(optimizer)]
        predicted = device_memory(table, hardware, StepWork(len(tokens)), layout, counts)
        for stage, (one, other) in enumerate(zip(predicted, counted, strict=True)):
            rows.append((f"{named(layout)} stage {stage}", one.kept / 2**20, other / 2**20))
    return rows


def allocator() -> list[Row]:
    """Returns predicted and allocated MiB of a forward, loss and backward on one device."""
    rows = []
    for size, precision in itertools.product(ALLOCATED, ("fp32", "bf16")):
        net, inputs, targets = ALLOCATED[size]()
        layers = observed_chain(net, inputs).layers
        loss = LossOfStep(cross_entropy, targets)
        costs = [each.cost for each in count_layers(layers, inputs, precision, loss)]
        predicted = sum(cost.activation_bytes for cost in costs) + most_temporary(costs)
        rows.append(
            (
                f"{size}, {precision}",
                predicted / 2**20,
                allocated_peak(net, inputs, targets, precision) / 2**20,
            )
        )
    return rows


def allocated_peak(net: nn.Module, inputs: Any, targets: Any, precision: str) -> int:
    """Returns the most bytes that PyTorch's CPU allocator has given to a step, and the inputs'."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as a run has them, from the first step on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with autocast(precision, "cpu"):
            loss = cross_entropy(net(inputs), targets)
        loss.backward()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    alive = itertools.accumulate(event.nbytes() for event in changes)
    return int(max(alive, default=0) + inputs.nbytes)


def _gpt(vocab_size: int, **sizes: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (16, 64))
    return gpt(vocab_size, 64, **sizes), tokens, tokens


def _resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return resnet18(num_classes=10), torch.randn(8, 3, 64, 64), torch.randint(10, (8,))


ALLOCATED: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]] = {
    "GPT, vocabulary of 5,000": lambda: _gpt(5000, n_layer=3, d_model=128, n_head=4),
    "GPT, vocabulary of 50": lambda: _gpt(50, n_layer=3, d_model=128, n_head=4),
    "ResNet-18": _resnet,
}
"""What a model, its inputs and its targets are made by."""


def layers(seconds: float) -> list[Row]:
    """Returns the milliseconds of all layers of a GPT, by FLOPs and bytes and as measured."""
    net, tokens = small_gpt()
    chain, device = observed_chain(net, tokens), torch.device("cpu")
    rates = {name: value for name, value in measured_rates(seconds).items() if name != "costs"}
    hardware = Hardware(**rates)
    estimated = counted_costs(chain, tokens, hardware, "fp32")
    measured = measured_costs(chain, tokens, device, "fp32", sharing=2)
    rows: list[Row] = []
    for samples, kind in itertools.product((2, 4, 8, 16), ("forward_ms", "backward_ms")):
        one, other = (
            sum(getattr(cost, kind) for cost in table.costs_at(samples))
            for table in (estimated, measured)
        )
        rows.append((f"{kind.partition('_')[0]} of {samples} samples", one, other))
    return rows


def small_gpt() -> tuple[nn.Module, torch.Tensor]:
    """Returns a GPT of some milliseconds a layer, and tokens for it."""
    torch.manual_seed(0)
    return gpt(512, 128, n_layer=6, n_head=4, d_model=192), torch.randint(512, (16, 128))


def model_of(layout: ParallelLayout) -> tuple[HybridModel, list[int]]:
    """Returns the GPT in two stages, and the number of layers of each."""
    model = HybridModel(
        small_gpt()[0],
        World.from_env(layout.nb_part, devices="cpu"),
        chunks=layout.chunks,
        schedule=layout.schedule,
        recompute=layout.recompute,
    )
    return model, model.plan.counts


def median_ms(run: Callable[[], float], repeats: int) -> float:
    """Returns the median of `repeats` runs in milliseconds, after one that warms up."""
    run()
    return statistics.median(run() for _ in range(repeats)) * 1e3


def report(part: str, unit: str, rows: Sequence[Row]) -> None:
    """Prints a table with the error of each prediction, and their median."""
    errors = [abs(predicted / measured - 1) for _, predicted, measured in rows]
    lines = [
        (name, f"{predicted:.2f}", f"{measured:.2f}", f"{predicted / measured - 1:+.1%}")
        for name, predicted, measured in rows
    ]
    print_table([part, f"predicted {unit}", f"measured {unit}", "error"], lines)
    print(
        f"{part}: {len(rows)} configurations, median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}\n"
    )


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", default=["emulated", "real", "memory", "allocator", "layers"]
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--message-s", type=float, default=4e-4, help="of a message over gloo")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each rate of the machine")
    options = parser.parse_args()
    torch.set_num_threads(2)
    if "emulated" in options.parts:
        report("emulated", "ms", emulated(options))
    if "real" in options.parts:
        report("real", "ms", real(options))
    if "memory" in options.parts:
        report("memory", "MiB", memory())
    if "allocator" in options.parts:
        report("allocator", "MiB", allocator())
    if "layers" in options.parts:
        report("layers", "ms", layers(options.seconds))
    print_footer("Predicted against measured; median of the repeats after one warm-up.")


if __name__ == "__main__":
    main()
