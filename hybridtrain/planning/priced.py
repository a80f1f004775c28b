"""Priced plans: the fastest layouts of a model on a machine, as a table and as a `Plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from hybridtrain.errors import ConfigError, check_choice
from hybridtrain.graph import ChainBuilder
from hybridtrain.machine import Cluster, Machine
from hybridtrain.planning.cost_table import CostTable, counted_costs, measured_costs
from hybridtrain.planning.layout import Choices, Job
from hybridtrain.planning.plan import Plan, StagePlan
from hybridtrain.planning.planner import COST_SOURCES
from hybridtrain.planning.price import Price, find_layouts
from hybridtrain.planning.stage_needs import planned_costs, stage_times
from hybridtrain.schedule import Span, Spans, make_schedule, placement_of
from hybridtrain.text_table import text_table


@dataclass(frozen=True)
class PricedPlans:
    """The fastest layouts of a model, the fastest first.

    Attributes:
        table: the costs of the model's layers.
        machine: the hardware.
        job: the work of a step.
        prices: one for each layout.
    """

    table: CostTable
    machine: Machine
    job: Job
    prices: Sequence[Price]

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [
            (
                *("step ms", "samples/s", "idle", "memory GiB", "nb_part", "replicas", "chunks"),
                *("stages/device", "schedule", "engine", "checkpoint", "shard", "binds"),
            )
        ]
        for price in self.prices:
            layout = price.layout
            lines.append(
                (
                    f"{price.step_ms:.1f}",
                    f"{self.job.samples * self.job.accumulate / price.step_ms * 1e3:.1f}",
                    f"{price.bubble:.0%}",
                    f"{price.peak_bytes / 2**30:.2f}",
                    *map(str, (layout.nb_part, layout.replicas, layout.chunks)),
                    str(layout.stages_per_device),
                    *(layout.schedule, layout.engine, layout.checkpoint, layout.shard, price.binds),
                )
            )
        return "\n".join(text_table(lines, right_aligned=8))

    def plan(self, number: int = 0) -> Plan:
        """Returns the plan of the layout `number`, which a run takes as its `split`.

        0 is the fastest.
        """
        price = self.prices[number]
        layout, table = price.layout, self.table
        costs = planned_costs(table, self.machine, self.job, layout, price.counts)
        processes = layout.nb_part if layout.engine == "distributed" else 1
        cluster = Cluster(("cpu",) * layout.nb_part, processes, layout.replicas).placed(
            placement_of(layout.schedule)
        )
        bounds = pairwise(accumulate(price.counts, initial=0))
        return Plan(
            model=table.model,
            split="time",
            schedule=layout.schedule,
            chunks=layout.chunks,
            nb_part=layout.nb_part,
            stages_per_device=layout.stages_per_device,
            checkpoint=layout.checkpoint,
            expand=[],
            costs_from=table.costs_from,
            stages=[
                StagePlan(
                    device=f"device {layout.devices[stage]}",
                    process=cluster.process_of(stage),
                    in_flight=alive,
                    layers=costs[start:end],
                )
                for stage, (alive, (start, end)) in enumerate(
                    zip(price.in_flight, bounds, strict=True)
                )
            ],
        )

    def timeline(self, chunks: int) -> Spans:
        """Returns when the actions of `chunks` micro-batches run in the fastest layout, in s."""
        found = self.prices[0]
        layout = found.layout
        schedule = make_schedule(layout.schedule, layout.nb_part, chunks, layout.stages_per_device)
        times = stage_times(self.table, self.machine, self.job, layout, found.counts)
        spans = times.durations.spans(schedule)
        return [
            [Span(action, start / 1e3, end / 1e3) for action, start, end in lane] for lane in spans
        ]


def find_plans(
    net: nn.Module,
    example_inputs: Any,
    machine: Machine,
    job: Job,
    *,
    choices: Choices | None = None,
    costs: str = "estimated",
    precision: str = "fp32",
    tf32: bool = False,
    best: int = 10,
) -> PricedPlans:
    """Returns the fastest ways to train `net` on `machine`, by their predicted times.

        plans = find_plans(net, tokens, Machine(nodes=4, devices_per_node=8, ...), Job(samples=512))
        print(plans)
        plans.plan().write("plan.yaml")

    Args:
        net: any module, also on the meta device; with `costs="measured"` layers get random values.
        example_inputs: the inputs of a batch of at least 2 samples. Where layers are measured, a
            micro-batch as large as they usually are.
        machine: the hardware.
        job: the work of a step.
        choices: what may be chosen from.
        costs: `estimated` counts FLOPs and bytes without running a kernel; `measured` times each
            layer on this machine's first device.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.
        best: how many layouts.

    Raises:
        ConfigError: an argument is wrong, no layout uses all devices, or a layer is to be timed
            on a GPU that is not here.
        SplitError: the model cannot be cut, or nothing fits into memory.
    """
    table = model_costs(
        net,
        example_inputs,
        machine,
        costs=costs,
        precision=precision,
        tf32=tf32,
        # a CPU device is a core
        sharing=machine.devices_per_node if machine.device == "cpu" else 1,
    )
    return PricedPlans(table, machine, job, find_layouts(table, machine, job, choices, best=best))


def model_costs(
    net: nn.Module,
    example_inputs: Any,
    machine: Machine,
    *,
    costs: str = "estimated",
    precision: str = "fp32",
    tf32: bool = False,
    sharing: int = 1,
) -> CostTable:
    """Returns the costs of the layers of `net`; arguments and errors as of `find_plans`.

    Where they are measured, `sharing` devices share this process's intra-op threads.
    """
    check_choice("cluster.costs", costs, COST_SOURCES)
    chain = ChainBuilder(net, example_inputs).chain()
    device = torch.device("cuda:0" if machine.device == "cuda" else "cpu")
    if costs == "measured" and device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"cluster.costs={costs} needs one of the cluster's GPUs here, and there is none: set "
            f"cluster.costs=estimated"
        )
    if costs == "measured":
        table = measured_costs(chain, example_inputs, device, precision, sharing=sharing)
    else:
        table = counted_costs(chain, example_inputs, machine, precision, tf32)
    return replace(table, model=type(net).__name__)


def in_words(price: Price) -> str:
    """Returns the parts of a step in one line."""
    parts = {
        "compute": price.compute_ms,
        "of which recomputed": price.recompute_ms,
        "exposed transfers": price.transfer_ms,
        "exposed all-reduce": price.reduce_ms,
        "optimizer": price.optimizer_ms,
        "data, in the background": price.data_ms,
    }
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms > 0)
    return f"{price.step_ms:.1f} ms per step: {told}; idle {price.bubble:.0%}"
