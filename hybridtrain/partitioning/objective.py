"""The partitioning objective: the size of a stage; the best cut minimizes the largest size."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from hybridtrain.errors import SplitError, closest, setting
from hybridtrain.options import PipelineOptions, is_per_device
from hybridtrain.partitioning.costs import LayerCost
from hybridtrain.partitioning.recompute import recomputes_stages
from hybridtrain.schedule import place_of

GIB = 2**30
INFINITY = float("inf")

MEASURED_SPLITS = ("time", "memory", "balanced")
SPLITS = ("uniform", "size", *MEASURED_SPLITS, "manual")


def balances(options: PipelineOptions) -> bool:
    """Returns whether `split` names an objective, so that the partitioner cuts."""
    return options.split in ("uniform", "size", *MEASURED_SPLITS)


def needs_costs(options: PipelineOptions) -> bool:
    """Returns whether the plan depends on the costs of layers."""
    return options.split in MEASURED_SPLITS


@dataclass(frozen=True)
class Objective:
    """The quantity that the partitioner balances across stages.

    Attributes:
        unit: the unit of size: number of `layers`, bytes of `weights` with their gradients and
            optimizer state, or `costs` (times and bytes).
        memory_weight: for `costs`, the weight of memory against time: 0 balances only time, 1 only
            memory.
        memory_limit: for `costs`, the most bytes per device; a tuple: of each stage's device. With
            unequal limits, a stage's memory counts relative to its limit.
        recomputes: whether stages store only the inputs of their layers for each micro-batch, and
            the activations of one layer for one micro-batch.
        stages_per_device: the number of stages per device, which share its limit equally, even if
            a small stage would leave space for a large one.
        speeds: the relative speed of each stage's device; empty: all are equal. Layers,
            weights and times count less on a faster device.
    """

    unit: Literal["layers", "weights", "costs"] = "costs"
    memory_weight: float = 0.0
    memory_limit: float | tuple[float, ...] = INFINITY
    recomputes: bool = False
    stages_per_device: int = 1
    speeds: tuple[float, ...] = ()

    @classmethod
    def of(cls, options: PipelineOptions) -> Objective:
        """Returns the objective of `options.split`.

        Raises:
            SplitError: `split` is not the name of an objective.
        """
        split = str(options.split)
        speeds = by_stage(options, options.device_speeds)
        if split in ("uniform", "size"):
            return cls("layers" if split == "uniform" else "weights", speeds=speeds)
        if split not in MEASURED_SPLITS:
            close = closest(split, SPLITS)
            hint = f"did you mean {close!r}? There are" if close else "use"
            raise SplitError(
                f"{setting('split', split, repr)} is unknown: {hint} {', '.join(SPLITS)}, the "
                "path of a plan (.yaml), or a list of layer counts, cut points, layer names or "
                "name patterns"
            )
        limit = options.memory_limit_gib
        of_all = limit if isinstance(limit, int | float) else INFINITY
        limits = tuple(gib * GIB for gib in by_stage(options, limit))
        return cls(
            memory_weight={"time": 0.0, "memory": 1.0}.get(split, options.memory_weight),
            memory_limit=limits or of_all * GIB,
            recomputes=recomputes_stages(options.recompute),
            stages_per_device=options.stages_per_device,
            speeds=speeds,
        )

    @property
    def is_limited(self) -> bool:
        """True if memory is limited."""
        return self.memory_limit != INFINITY

    def stage_limits(self, stages: int) -> list[float]:
        """Returns the most bytes of each stage."""
        limit = self.memory_limit
        limits = list(limit) if isinstance(limit, tuple) else [limit] * stages
        return [limit / self.stages_per_device for limit in limits]

    def relative_limits(self, stages: int) -> list[float]:
        """Returns the limit of each stage divided by the mean; 1 for each if all are equal."""
        limits = self.stage_limits(stages)
        return [1.0] * stages if len(set(limits)) == 1 else _over_mean(limits)

    def relative_speeds(self, stages: int) -> list[float]:
        """Returns the speed of each stage's device divided by the mean over stages."""
        return _over_mean(self.speeds) if self.speeds else [1.0] * stages


def by_stage(options: PipelineOptions, values: Any) -> tuple[float, ...]:
    """Returns the value of each stage's device; empty if `values` is not a list per device."""
    if not is_per_device(values):
        return ()
    devices = len(values)
    stages = range(devices * options.stages_per_device)
    return tuple(values[place_of(stage, devices, options.placement)] for stage in stages)


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean for value in values]


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage: milliseconds for one micro-batch, memory for all in flight.

    Attributes:
        time_ms: the sum of the following three times.
        forward_ms: the forward of its layers.
        backward_ms: the backward of its layers.
        crossing_ms: the transfer of values and gradients over the cuts at both ends; a cut counts
            for both stages that it separates.
        memory_bytes: its weights, and the activations and inputs of the peak number of
            micro-batches in flight.
        parameters: the number of elements of its parameters.
    """

    time_ms: float
    forward_ms: float
    backward_ms: float
    crossing_ms: float
    memory_bytes: int
    parameters: int


def stage_tables(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    goal: Objective,
    no_cut_before: Collection[int] = (),
) -> list[Tensor]:
    """Returns the tables of stage sizes for `best_cut`; infinity where a stage is not allowed.

    A stage's time and memory are shares of the uncut model's, the latter with the stages' average
    number of micro-batches in flight, so that both shares add up to about 1 over the stages. Time
    is divided by the speed of the stage's device, memory by its limit, both over their mean.

    Args:
        costs: the costs of all layers.
        in_flight: for each stage, the peak number of micro-batches in flight.
        goal: the size of a stage, and the memory limit.
        no_cut_before: the indices of layers that cannot begin a stage.
    """
    stages = len(in_flight)
    speeds = goal.relative_speeds(stages)
    if goal.unit == "costs":
        whole_ms = sum(cost.forward_ms + cost.backward_ms for cost in costs) or 1.0
        by_speed = {speed: _time_ms(costs, speed) / whole_ms for speed in set(speeds)}
        times = [by_speed[speed] for speed in speeds]
        memories = [_memory_bytes(costs, alive, goal.recomputes) for alive in in_flight]
        whole = sum(memory[0, -1].item() for memory in memories) / stages or 1.0
        weight = goal.memory_weight
        tables = [
            (1 - weight) * time + weight * (memory / (whole * limit))
            for time, memory, limit in zip(
                times, memories, goal.relative_limits(stages), strict=True
            )
        ]
        for table, memory, limit in zip(tables, memories, goal.stage_limits(stages), strict=True):
            table[memory > limit] = INFINITY
    else:
        sizes = [1 if goal.unit == "layers" else cost.weight_bytes for cost in costs]
        tables = [range_sums(sizes) / speed for speed in speeds]
    for table in tables:
        table[list(no_cut_before)] = INFINITY  # no stage begins here, so none ends here
    return tables


def stage_costs(
    costs: Sequence[LayerCost],
    counts: Sequence[int],
    in_flight: Sequence[int],
    recomputes: bool = False,
    speeds: Sequence[float] = (),
) -> list[StageCost]:
    """Returns the costs of stages with `counts` layers and `in_flight` micro-batches each.

    Args:
        costs: the costs of all layers.
        counts: the number of layers of each stage.
        in_flight: for each stage, the peak number of micro-batches in flight.
        recomputes: see `Objective`.
        speeds: the speed of each stage's device, relative to the device of `costs`; empty:
            all are equal.
    """
    bounds = pairwise(accumulate(counts, initial=0))
    speeds = speeds or [1.0] * len(counts)
    cut = _at_cuts([cost.crossing_ms for cost in costs]).tolist()
    return [
        StageCost(
            time_ms=_time_ms(costs, speed)[start, end].item(),
            forward_ms=sum(cost.forward_ms for cost in costs[start:end]) / speed,
            backward_ms=sum(cost.backward_ms for cost in costs[start:end]) / speed,
            crossing_ms=2 * (cut[start] + cut[end]),
            memory_bytes=int(_memory_bytes(costs, alive, recomputes)[start, end]),
            parameters=sum(cost.parameters for cost in costs[start:end]),
        )
        for (start, end), alive, speed in zip(bounds, in_flight, speeds, strict=True)
    ]


def _time_ms(costs: Sequence[LayerCost], speed: float = 1.0) -> Tensor:
    """Returns a table of a stage's milliseconds at [start, end]: layers, and transfers at cuts."""
    cut = _at_cuts([cost.crossing_ms for cost in costs])
    layers = range_sums([cost.forward_ms + cost.backward_ms for cost in costs])
    return layers / speed + 2 * (cut[:, None] + cut)


def _memory_bytes(costs: Sequence[LayerCost], microbatches: int, recomputes: bool) -> Tensor:
    """Returns a table of a stage's bytes at [start, end]: weights, stored inputs, activations."""
    weights = range_sums([cost.weight_bytes for cost in costs])
    held = [cost.recomputed() for cost in costs] if recomputes else costs
    activations = range_sums([cost.activation_bytes for cost in held])
    activations -= _at_cuts([cost.later_bytes for cost in held])  # of the next stage
    received = _at_cuts([cost.crossing_bytes for cost in costs])
    memory = weights + microbatches * (received[:, None] + activations)
    if recomputes:
        memory += range_maxima(
            [
                max(0, all_of_it.activation_bytes - kept.activation_bytes)
                for all_of_it, kept in zip(costs, held, strict=True)
            ]
        )
    return memory


def _at_cuts(crossing: Sequence[float]) -> Tensor:
    """Returns the cost of each cut; it is 0 at the model's two ends."""
    return torch.tensor([0.0, *crossing[:-1], 0.0], dtype=torch.float64)


def range_maxima(values: Sequence[float]) -> Tensor:
    """Returns a float64 table with the maximum of `values[start:end]` at `[start, end]`, from 0."""
    size = len(values) + 1
    table = torch.zeros(size, size, dtype=torch.float64)
    for start in range(size - 1):
        following = torch.tensor(values[start:], dtype=torch.float64)
        table[start, start + 1 :] = following.cummax(0).values
    return table


def range_sums(values: Sequence[float]) -> Tensor:
    """Returns a float64 table with the sum of `values[start:end]` at `[start, end]`."""
    totals = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    return totals - totals[:, None]
