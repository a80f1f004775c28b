"""What a cut should be good at, and the cut that is best at it: time, memory, or both."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hybridtrain.errors import SplitError
from hybridtrain.planning.balance import INFINITY, best_cut, range_sums, too_few_layers
from hybridtrain.planning.costs import LayerCost

GIB = 2**30


@dataclass(frozen=True)
class Objective:
    """What the largest stage is measured by.

    TraceGuards:
        memory_weight: 0 balances time alone, 1 memory alone. In between it weighs a stage's share
            of the model's memory against its share of the model's time.
        memory_limit: bytes that a device may hold; None for no limit.
        recomputes: stages keep what they were given for each micro-batch, and the rest of one only.
        stages_per_device: each of a device's stages may take this fraction of its limit. This is
            stricter than the device itself, where a small stage makes room for a large one.
    """

    memory_weight: float = 0.0
    memory_limit: float | None = None
    recomputes: bool = False
    stages_per_device: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.memory_weight <= 1:
            raise SplitError(
                f"the weight of memory lies between 0 (time alone) and 1 (memory alone), not at "
                f"{self.memory_weight}"
            )

    @property
    def stage_limit(self) -> float:
        """Bytes that a stage may take."""
        return INFINITY if self.memory_limit is None else self.memory_limit / self.stages_per_device


@dataclass(frozen=True)
class StageCost:
    """What a stage costs: in time for one micro-batch, in memory for all that it keeps alive.

    TraceGuards:
        time_ms: milliseconds of one micro-batch, forward, backward and crossing.
        forward_ms: milliseconds of its layers' forward.
        backward_ms: milliseconds of their backward.
        crossing_ms: milliseconds to bring values and their gradients over the cuts at its two
            ends; a cut counts for both stages that it parts.
        memory_bytes: its weights, and what it keeps of the micro-batches that it holds at most.
        parameters: elements of its parameters.
        share: its part of the time of all stages, 0 to 1.
    """

    time_ms: float
    forward_ms: float
    backward_ms: float
    crossing_ms: float
    memory_bytes: int
    parameters: int
    share: float


def cut_by_costs(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    goal: Objective,
    no_cut_before: Collection[int] = (),
) -> list[int]:
    """How many layers each stage gets so that the largest is as small as it can be.

    Args:
        costs: of each layer.
        in_flight: for each stage, how many micro-batches it keeps alive at most.
        goal: what makes a stage large.
        no_cut_before: the layers, by index, before which there may be no cut.

    Raises:
        SplitError: there are too few layers or places to cut, or no cut fits into memory.
    """
    glued = len(set(no_cut_before))
    if len(costs) - glued < len(in_flight):
        raise SplitError(too_few_layers(len(costs), len(in_flight), glued))
    counts = best_cut(stage_tables(costs, in_flight, goal, no_cut_before))
    if counts is None:
        raise SplitError(_why_nothing_fits(costs, in_flight, goal, no_cut_before))
    return counts


def stage_tables(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    goal: Objective,
    no_cut_before: Collection[int] = (),
) -> list[Tensor]:
    """What each stage would cost if it in_flight the layers from `start` up to but without `end`.

    Arguments as for `cut_by_costs`. A stage's time and memory are shares of the uncut model's; the
    latter with as many micro-batches alive as the stages hold on average, so that the stages'
    shares add up to about 1 in both.

    Returns:
        for each stage a table of (layers + 1, layers + 1) as `best_cut` takes it, infinity where
        `goal` or `no_cut_before` forbid the stage.
    """
    time = _time_ms(costs)
    memories = [_memory_bytes(costs, microbatches, goal.recomputes) for microbatches in in_flight]
    whole_time = time[0, -1].item() or 1.0
    whole_memory = sum(memory[0, -1].item() for memory in memories) / len(in_flight) or 1.0
    tables = []
    for memory in memories:
        table = (1 - goal.memory_weight) * (time / whole_time)
        table += goal.memory_weight * (memory / whole_memory)
        table[memory > goal.stage_limit] = INFINITY
        table[list(no_cut_before)] = INFINITY  # no stage begins here, and so none ends here
        tables.append(table)
    return tables


def stage_costs(
    costs: Sequence[LayerCost],
    counts: Sequence[int],
    in_flight: Sequence[int],
    recomputes: bool = False,
) -> list[StageCost]:
    """What the stages of a cut cost that have `counts` layers and hold `in_flight` micro-batches."""
    bounds = list(pairwise(accumulate(counts, initial=0)))
    time = _time_ms(costs)
    cut = _at_cuts([cost.crossing_ms for cost in costs]).tolist()
    step = sum(time[bound].item() for bound in bounds)
    stages = []
    for (start, end), microbatches in zip(bounds, in_flight, strict=True):
        layers = costs[start:end]
        time_ms = time[start, end].item()
        stages.append(
            StageCost(
                time_ms=time_ms,
                forward_ms=sum(layer.forward_ms for layer in layers),
                backward_ms=sum(layer.backward_ms for layer in layers),
                crossing_ms=2 * (cut[start] + cut[end]),
                memory_bytes=int(_memory_bytes(costs, microbatches, recomputes)[start, end]),
                parameters=sum(layer.parameters for layer in layers),
                share=time_ms / (step or 1.0),
            )
        )
    return stages


def _time_ms(costs: Sequence[LayerCost]) -> Tensor:
    """Milliseconds of a stage at [start, end]: its layers, and both its cuts there and back."""
    cut = _at_cuts([cost.crossing_ms for cost in costs])
    layers = range_sums([cost.forward_ms + cost.backward_ms for cost in costs])
    return layers + 2 * (cut[:, None] + cut)


def _memory_bytes(costs: Sequence[LayerCost], microbatches: int, recomputes: bool) -> Tensor:
    """Bytes of a stage at [start, end].

    Its weights and, for each micro-batch, what its layers keep and what it was sent. If it
    recomputes, its layers keep something of one micro-batch only.
    """
    weights = range_sums([cost.weight_bytes for cost in costs])
    kept = range_sums([cost.activation_bytes for cost in costs])
    sent = _at_cuts([cost.crossing_bytes for cost in costs])
    return weights + microbatches * sent[:, None] + (1 if recomputes else microbatches) * kept


def _at_cuts(crossing: Sequence[float]) -> Tensor:
    """What crosses each cut; the model's own two ends are none."""
    return torch.tensor([0.0, *crossing[:-1], 0.0], dtype=torch.float64)


def _why_nothing_fits(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    goal: Objective,
    no_cut_before: Collection[int],
) -> str:
    n, stages, per_device = len(costs), len(in_flight), goal.stages_per_device
    limit = f"pipeline.memory_limit_gib={goal.stage_limit * per_device / GIB:g}"
    if per_device > 1:
        limit += f", {goal.stage_limit / GIB:g} GiB for each of a device's {per_device} stages"

    # each stage before and after needs a layer too
    fewest = [min(in_flight[max(0, stages - n + i) : i + 1]) for i in range(n)]
    alone = [
        cost.weight_bytes + (1 if goal.recomputes else microbatches) * cost.activation_bytes
        for cost, microbatches in zip(costs, fewest, strict=True)
    ]
    largest = max(range(n), key=alone.__getitem__)
    if alone[largest] > goal.stage_limit:
        alive = fewest[largest]
        return (
            f"layer {costs[largest].name!r} alone needs {_gib(alone[largest])} with "
            f"{alive} micro-batch{'es' * (alive != 1)} alive, more than {limit}: raise the limit, "
            f"make micro-batches smaller (pipeline.chunks), recompute "
            f"(pipeline.checkpoint=always), or divide it"
        )
    by_memory = Objective(memory_weight=1.0, recomputes=goal.recomputes)
    counts = best_cut(stage_tables(costs, in_flight, by_memory, no_cut_before))
    assert counts is not None
    needed = max(
        stage.memory_bytes for stage in stage_costs(costs, counts, in_flight, goal.recomputes)
    )
    return (
        f"no cut into {stages} stages fits under {limit}: each has a stage of {_gib(needed)} or "
        f"more. Set pipeline.memory_limit_gib to {_gib(needed * per_device)} or more, or lower "
        f"what a stage holds: more stages (pipeline.nb_part), smaller micro-batches "
        f"(pipeline.chunks), recomputation (pipeline.checkpoint=always)"
    )


def _gib(size: float) -> str:
    """Rounded up, so that a limit set to it is enough."""
    return f"{math.ceil(size / GIB * 1000) / 1000:g} GiB"
