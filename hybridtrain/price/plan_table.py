"""Priced plans: the fastest layouts of a model on given hardware, as a table and as a `Plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain._base.text_table import counted, text_table, with_unit
from hybridtrain.errors import ConfigError, SplitError, argument, check_choice, setting
from hybridtrain.options import OptimizerState
from hybridtrain.partitioning import (
    COST_SOURCES,
    CostTable,
    LossOfStep,
    Plan,
    StageOwners,
    StagePlan,
    counted_costs,
    layer_sizes,
    measured_costs,
    observed_chain,
    state_of,
)
from hybridtrain.price.fully_sharded import FullySharded, fully_sharded
from hybridtrain.price.layout import Choices, ParallelLayout, StepWork
from hybridtrain.price.price import Price
from hybridtrain.price.search import ALIKE, find_layouts
from hybridtrain.price.stage_needs import offloaded_bytes, planned_costs, stage_times
from hybridtrain.schedule import (
    Schedule,
    Span,
    Spans,
    SpansWithCopies,
    actions_as_text,
    copies_of,
    make_schedule,
    registered,
)

# Models with more parameters are usually trained with tensor parallelism.
_LARGE = 10e9
_VERY_LARGE = 30e9

# On more devices, published steps with ZeRO-3 took 2 to 4 times as long as predicted
# (docs/planning-details.md).
_MOST_SHARDED = 512

HOW_TO_MEASURE_COPIES = (
    "To measure the copies run `hybridtrain measure-machine` on this machine, or set "
    "hardware.to_host_bytes_per_s="
)
"""What to do if the rates of copies between devices and their host are unknown."""

# The number of rejected layouts to show with their times.
_NEXT = 2


@dataclass(frozen=True)
class PricedPlans:
    """The best layouts of a model: first the proposed one (`proposed`), then the fastest.

    Attributes:
        table: the costs of the model's layers.
        hardware: the devices and links.
        work: the work of a step.
        prices: one price per layout.
        rate: the key of `Hardware.flops_per_s` for matrix products, such as `bf16`.
    """

    table: CostTable
    hardware: Hardware
    work: StepWork
    prices: Sequence[Price]
    rate: str = "fp32"

    def __str__(self) -> str:
        offloads = any(price.layout.offload != "none" for price in self.prices)
        lines: list[tuple[str, ...]] = [
            (
                *("step ms", "samples/s", "idle", "memory", "nb_part", "replicas", "chunks"),
                *("stages/device", "schedule", "engine", "recompute", *["offload"] * offloads),
                *("shard", "binds"),
            )
        ]
        for price in self.prices:
            layout = price.layout
            lines.append(
                (
                    f"{price.step_ms:.1f}",
                    f"{self.work.samples * self.work.accumulate / price.step_ms * 1e3:.1f}",
                    f"{price.bubble:.0%}",
                    with_unit(price.peak_bytes),
                    *map(str, (layout.nb_part, layout.replicas, layout.chunks)),
                    str(layout.stages_per_device),
                    *(layout.schedule, layout.engine, _recomputed_in_words(price)),
                    *([layout.offload] * offloads),
                    *(layout.shard, price.binds),
                )
            )
        return "\n".join(text_table(lines, right_aligned=8))

    def copies_in_words(self) -> str:
        """Returns what the first plan's offloading copies, and whether the prices know it."""
        best = self.prices[0]
        moved = offloaded_bytes(self.table, self.hardware, self.work, best.layout, best.counts)
        text = (
            f"{setting('offload', best.layout.offload)}: a device moves {with_unit(max(moved))} "
            "per batch to the host and back"
        )
        if self.hardware.host_copies is not None:
            return f"{text}; the step waits {best.copies_ms:.1f} ms for these copies"
        rate = max(moved) * self.work.accumulate / (best.pipeline_ms / 1e3)
        return (
            f"{text}; the predicted times leave out these copies, which are hidden if the link "
            f"sustains {rate / 1e9:.1f} GB/s in each direction. {HOW_TO_MEASURE_COPIES}"
        )

    @property
    def fully_sharded(self) -> FullySharded | None:
        """The price with FSDP2; None if it does not fit or the devices do not divide the batch."""
        hardware = self.hardware.weakest  # each device has the same share of the work
        return fully_sharded(self.table, hardware, self.work, 4 if "32" in self.rate else 2)

    @property
    def advises_fsdp2(self) -> bool:
        """True if FSDP2 is faster than the first plan by more than the error of a prediction.

        False for more devices than the price of FSDP2 is valid for.
        """
        sharded = self.fully_sharded
        return (
            sharded is not None
            and 1 < self.hardware.devices <= _MOST_SHARDED
            and self.prices[0].step_ms > ALIKE * sharded.step_ms
        )

    def _fsdp2_in_words(self) -> str:
        sharded = self.fully_sharded
        if sharded is None:
            return "does not fit, or the devices do not divide the batch"
        if self.hardware.devices > _MOST_SHARDED:
            slower = "published steps with ZeRO-3 took 2 to 4 times as long as predicted"
            return f"{sharded}; above {_MOST_SHARDED} GPUs, {slower}"
        if self.advises_fsdp2:
            saving = 1 - sharded.step_ms / self.prices[0].step_ms
            return f"{sharded}; {saving:.0%} less than this plan, so take it"
        return str(sharded)

    def answer(self, steps: int | None = None) -> str:
        """Returns a summary of the first plan: speed, memory, duration and cost of a run.

        Args:
            steps: optimizer steps of the run; None: unknown.
        """
        work, hardware, price = self.work, self.hardware, self.prices[0]
        layout, per_second = price.layout, 1e3 / price.step_ms
        samples = work.samples * work.accumulate * per_second
        speed = [f"{samples:,.0f} samples/s"]
        if work.tokens_per_sample:
            speed.append(f"{samples * work.tokens_per_sample:,.0f} tokens/s")
        if self.table.flops_per_sample is not None:
            reached = self.table.flops_per_sample * samples / hardware.devices
            reached /= hardware.mean_speed
            share = reached / hardware.flops_per_s[self.rate]
            speed.append(f"{reached / 1e12:,.1f} TFLOP/s per device, {share:.0%} of its peak (MFU)")
        limits = layout.usable_bytes(hardware)
        number = max(range(layout.nb_part), key=lambda i: price.memory[i].total / limits[i])
        fullest = price.memory[number]
        unit, size = ("GiB", GIB) if fullest.total >= GIB / 10 else ("MiB", 2**20)
        total, usable = f"{fullest.total / size:.2f}", f"{limits[number] / GIB:.3g} GiB"
        kinds = {name: f"{nbytes / size:.2f}" for name, nbytes in vars(fullest).items()}
        memory = [f"{total}{'' if unit == 'GiB' else ' MiB'} of {usable} that may be used"]
        memory.append(", ".join(f"{k} {text}" for k, text in kinds.items() if text != "0.00"))
        if number := layout.communicators:
            reserved = f"{hardware.reserved_gib:g} GiB more for {counted(number, 'communicator')}"
            memory[-1] += f"; {reserved} and the CUDA context" * bool(hardware.reserved_gib)
        pipelines = f"{counted(layout.replicas, 'replica')} of {counted(layout.nb_part, 'device')}"
        if layout.owned_replicas > 1:
            pipelines += f", each with {layout.owned_replicas} logical replicas"
        batches = counted(layout.chunks, "micro-batch", "es")
        lines = [
            ("spread", f"{pipelines}, {batches} of {counted(layout.samples(work), 'sample')}"),
            *_unequal_in_words(layout),
            ("time", in_words(price)),
            *_host_in_words(price),
            ("speed", ", ".join(speed)),
            ("memory", ": ".join(part for part in memory if part)),
        ]
        if steps is not None:
            hours = steps * price.step_ms / 3.6e6
            text = f"{counted(steps, 'step')} in {_duration(hours)}, "
            text += f"{hours * hardware.devices:,.2f} device-hours"
            if hardware.price_per_gpu_hour:
                cost = hours * hardware.devices * hardware.price_per_gpu_hour
                text += f", {cost:,.2f} at {hardware.price_per_gpu_hour:g} an hour"
            lines.append(("run", text))
        if layout.replicas * layout.nb_part > 1:
            lines.append(("FSDP2", f"{self._fsdp2_in_words()}; not run by this project"))
        parameters = sum(size.parameters for size in self.table.sizes)
        if parameters > _LARGE:
            without = "tensor parallelism, which this project does not have"
            if parameters > _VERY_LARGE:
                without += "; at this size expect half of Megatron-LM's throughput"
            lines.append(("left out", without))
        return "\n".join(f"  {name:<9} {text}" for name, text in lines)

    def plan(self, number: int = 0) -> Plan:
        """Returns the plan of the layout with this index, which a run takes as its `split`."""
        price = self.prices[number]
        layout, table = price.layout, self.table
        costs = planned_costs(table, self.hardware, self.work, layout, price.counts)
        processes = layout.nb_part if layout.engine == "distributed" else 1
        owners = StageOwners(("cpu",) * layout.nb_part, processes, layout.replicas).placed(
            registered(layout.schedule).placement
        )
        bounds = pairwise(accumulate(price.counts, initial=0))
        return Plan(
            model=table.model,
            split="time",
            schedule=layout.schedule,
            chunks=layout.chunks,
            nb_part=layout.nb_part,
            stages_per_device=layout.stages_per_device,
            recompute=self.recompute(number),
            expand=[],
            costs_from=table.costs_from,
            stages=[
                StagePlan(
                    device=f"device {layout.devices[stage]}",
                    process=owners.process_of(stage),
                    in_flight=alive,
                    layers=costs[start:end],
                    speed=layout.stage_speeds[stage] / layout.stage_speeds[0],
                )
                for stage, (alive, (start, end)) in enumerate(
                    zip(price.in_flight, bounds, strict=True)
                )
            ],
            actions=actions_as_text(self._order(layout, layout.microbatches)),
        )

    def _order(self, layout: ParallelLayout, chunks: int) -> Schedule:
        shape = layout.nb_part, chunks, layout.stages_per_device
        return make_schedule(layout.schedule, *shape)

    def recompute(self, number: int = 0) -> str | list[str]:
        """Returns the option `recompute` of the layout with this index: a mode or layer names."""
        return recompute_option(self.prices[number], self.table)

    def timeline(self, chunks: int) -> Spans:
        """Returns the predicted timeline of `chunks` micro-batches in the first layout, in s."""
        price = self.prices[0]
        layout = price.layout
        schedule = self._order(layout, chunks)
        table = self.table.recomputing(frozenset(price.recomputed))
        times = stage_times(table, self.hardware, self.work, layout, price.counts)
        spans = times.spans(schedule)
        seconds = [
            [Span(action, start / 1e3, end / 1e3) for action, start, end in lane] for lane in spans
        ]
        copies = [
            [copy._replace(start=copy.start / 1e3, end=copy.end / 1e3) for copy in lane]
            for lane in copies_of(spans)
        ]
        return SpansWithCopies.of(seconds, copies)


def find_plans(
    net: nn.Module,
    example_inputs: Any,
    hardware: Hardware,
    work: StepWork,
    *,
    choices: Choices | None = None,
    costs: str = "estimated",
    precision: str = "fp32",
    tf32: bool = False,
    best: int = 10,
    loss: LossOfStep | None = None,
) -> PricedPlans:
    """Returns the layouts that train `net` fastest on `hardware`, by predicted step time.

        hardware = Hardware(nodes=4, devices_per_node=8, ...)
        plans = find_plans(net, tokens, hardware, StepWork(samples=512))
        print(plans)
        plans.plan().write("plan.yaml")

    Args:
        net: any module, also on the meta device; with `costs="measured"` layers get random values.
        example_inputs: the inputs of a batch of at least 2 samples. With `costs="measured"`, a
            micro-batch of the usual size.
        hardware: the devices and links.
        work: the work of a step.
        choices: the values that the search may choose from; None: all.
        costs: `estimated` counts FLOPs and bytes without running a kernel; `measured` times each
            layer on this machine's first device.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: whether fp32 matrix products run in TF32.
        best: the number of layouts to return.
        loss: the loss that ends the last stage; None: leave out its time and memory.

    Raises:
        ConfigError: an argument is wrong, no layout uses all devices, or `costs="measured"` needs a
            GPU and this machine has none.
        SplitError: the model cannot be cut, or no layout fits into memory.
    """
    table = model_costs(
        net,
        example_inputs,
        hardware,
        costs=costs,
        precision=precision,
        tf32=tf32,
        # a CPU device is a core
        sharing=hardware.devices_per_node if hardware.device == "cpu" else 1,
        loss=loss,
        optimizer_tensors_per_param=work.optimizer_tensors_per_param,
    )
    prices = find_layouts(table, hardware, work, choices, best=best)
    rate = "tf32" if tf32 and precision == "fp32" else precision
    return PricedPlans(table, hardware, work, prices, rate)


def model_costs(
    net: nn.Module,
    example_inputs: Any,
    hardware: Hardware,
    *,
    costs: str = "estimated",
    precision: str = "fp32",
    tf32: bool = False,
    sharing: int = 1,
    loss: LossOfStep | None = None,
    optimizer_tensors_per_param: OptimizerState = 2,
) -> CostTable:
    """Returns the costs of the layers of `net`, as `find_plans` uses them.

    Args:
        net: any module, also on the meta device; with `costs="measured"` layers get random values.
        example_inputs: the inputs of a batch of at least 2 samples.
        hardware: the devices and links.
        costs: `estimated` or `measured`.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: whether fp32 matrix products run in TF32.
        sharing: the number of devices that share this process's intra-op threads in measurements.
        loss: the loss that ends the last stage; None: leave out its time and memory.
        optimizer_tensors_per_param: see `PipelineOptions`.

    Raises:
        ConfigError: an argument is wrong, or `costs="measured"` needs a GPU and this machine has
            none.
    """
    check_choice("hardware.costs", costs, COST_SOURCES)
    chain = observed_chain(net, example_inputs)
    device = torch.device("cuda:0" if hardware.device == "cuda" else "cpu")
    if costs == "measured" and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"hardware.costs={costs} needs a GPU of the cluster on this machine, which has none: "
            "set hardware.costs=estimated"
        )
    if costs == "measured":
        table = measured_costs(chain, example_inputs, device, precision, sharing=sharing, loss=loss)
    else:
        table = counted_costs(chain, example_inputs, hardware, precision, tf32, loss)
    sizes = layer_sizes(chain.layers, state_of(optimizer_tensors_per_param, net))
    return replace(table, sizes=sizes, model=type(net).__name__)


def _unequal_in_words(layout: ParallelLayout) -> list[tuple[str, str]]:
    """Returns a line about the places of unequal devices and the shares of the replicas."""
    placed, parts = layout.arrangement, []
    if len(set(placed.device_speeds)) > 1:
        parts.append(f"speeds {' '.join(f'{s:g}' for s in placed.device_speeds)} in a pipeline")
    if placed.replica_shares:
        parts.append(f"shares {' '.join(f'{s:g}' for s in placed.replica_shares)} of a batch")
    return [("unequal", ", ".join(parts))] if parts else []


def _host_in_words(price: Price) -> list[tuple[str, str]]:
    """Returns a line if the host is the limit: how much time it costs, and what to try."""
    if not price.binds.startswith("host"):
        return []
    ways = [f"fewer micro-batches ({argument('chunks')}) or larger batches"]
    if price.layout.engine != "distributed" and price.layout.nb_part > 1:
        ways.append(f"a process per device ({setting('engine', 'distributed')})")
    text = (
        f"the host is the limit: the devices wait {price.host_ms:.1f} of {price.step_ms:.1f} ms "
        f"until it has called their operators; try {', or '.join(ways)}"
    )
    return [("host", text)]


def recompute_option(price: Price, table: CostTable) -> str | list[str]:
    """Returns the option `recompute` of a priced layout: a mode or layer names."""
    costs = table.costs_at(1)
    return [costs[index].name for index in price.recomputed] or price.layout.recompute


def offload_in_words(
    prices: Sequence[Price],
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    choices: Choices,
) -> str | None:
    """Returns one line about why activations wait in the host's memory, or why that was not tried.

    Args:
        prices: first the chosen layout.
        table: the costs of the model's layers.
        hardware: the devices.
        work: the work of a step.
        choices: what was searched.

    Returns:
        None: there is nothing to say.
    """
    best = prices[0]
    if len(choices.offload) == 1:
        return None
    if hardware.host_copies is None:
        if best.layout.recompute == "never" and not best.binds.endswith("memory"):
            return None  # memory has not limited the choice
        return (
            f"{argument('offload')} was not considered, because the rates of copies between "
            f"devices and their host are unknown. {HOW_TO_MEASURE_COPIES}"
        )
    if best.layout.offload == "none":
        return None
    chosen = f"{setting('offload', best.layout.offload)} was chosen: without it"
    try:
        without = replace(choices, offload=["none"], nb_part=[best.layout.nb_part])
        other = find_layouts(table, hardware, work, without, best=1)[0]
    except SplitError:
        return f"{chosen} nothing fits"
    names = ("chunks", "schedule", "stages_per_device")
    settings = ", ".join(setting(name, getattr(other.layout, name)) for name in names)
    return (
        f"{chosen} the fastest plan that fits takes {other.step_ms:.1f} instead of "
        f"{best.step_ms:.1f} ms per step ({settings}, recompute {_recomputed_in_words(other)})"
    )


def choice_in_words(prices: Sequence[Price], names: Sequence[str], costs_from: str) -> str:
    """Returns one line: the first layout's settings, time and memory, and the next two times.

    Args:
        prices: first the chosen layout.
        names: the settings that were chosen, fields of `ParallelLayout`.
        costs_from: the source of the layers' costs.
    """

    def values(price: Price, form: Callable[[str, object], str]) -> str:
        texts = {"recompute": _recomputed_in_words(price)}
        return ", ".join(form(n, texts.get(n) or getattr(price.layout, n)) for n in names)

    best = prices[0]
    line = (
        f"{values(best, setting)}: {best.step_ms:.1f} ms per step, predicted from {costs_from} "
        f"costs; idle {best.bubble:.0%}, {with_unit(best.peak_bytes)} per device"
    )
    if best.step_ms > min(price.step_ms for price in prices):
        line += "; the simplest of about equal ones"
    by_values: dict[str, float] = {}
    for price in sorted(prices, key=lambda price: price.step_ms):
        by_values.setdefault(values(price, lambda name, value: f"{name}={value}"), price.step_ms)
    del by_values[values(best, lambda name, value: f"{name}={value}")]
    following = [f"{ms:.1f} ms ({text})" for text, ms in list(by_values.items())[:_NEXT]]
    return line + ("; the next two: " + " and ".join(following) if following else "")


def in_words(price: Price) -> str:
    """Returns a one-line breakdown of a step's predicted time."""
    parts = {
        "compute": price.compute_ms,
        "of which recomputed": price.recompute_ms,
        "waiting for the host": round(price.host_ms, 1),  # often 0 but for rounding
        "exposed transfers": price.transfer_ms,
        "exposed copies to the host and back": round(price.copies_ms, 1),
        "exposed all-reduce": price.reduce_ms,
        "optimizer": price.optimizer_ms,
        "data, in the background": price.data_ms,
    }
    parts_text = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms > 0)
    return f"{price.step_ms:.1f} ms per step: {parts_text}; idle {price.bubble:.0%}"


def _recomputed_in_words(price: Price) -> str:
    return counted(len(price.recomputed), "layer") if price.recomputed else price.layout.recompute


def _duration(hours: float) -> str:
    """Returns a duration as text, in days, hours, minutes or seconds."""
    for unit, size in (("days", 48.0), ("hours", 1.0), ("minutes", 1 / 60)):
        if hours >= 2 * size or (unit == "days" and hours >= size):
            return f"{hours / (24 if unit == 'days' else size):.1f} {unit}"
    return f"{hours * 3600:.0f} seconds"
