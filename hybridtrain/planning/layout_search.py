"""The search for the fastest layouts that fit.

Thousands of layouts are looked at, of which few are worth a simulation. A queue has them by a bound
that none can be faster than. The first of the queue is looked at more closely, which makes its
bound larger, and goes back into the queue:

    without a cut   all devices are equally busy       cheap, from sums
    cut             the bound of the schedule          closed form; it fits into memory
    priced          the simulated time                 the next result

So a result is never slower than a layout that was not simulated. Where a model can be cut in few
ways all of them go into the queue; else the most even one does, improved step by step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from itertools import count as counter
from math import comb
from typing import NamedTuple

from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.machine import GIB, Machine
from hybridtrain.planning.cost_table import CostTable
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.device_memory import device_memory, most_in_flight, with_weight_bytes
from hybridtrain.planning.layout import Choices, Job, Layout, layouts
from hybridtrain.planning.objective import Objective, cut_by_costs
from hybridtrain.planning.price import (
    Price,
    least_step_ms,
    optimizer_ms,
    price,
)
from hybridtrain.planning.stage_times import stage_times

# A model that can be cut in no more ways is tried in all of them.
_FEW_CUTS = 50

# How many cuts are looked at to improve one.
_MOST_MOVES = 100

# Layouts of which the least memory is looked for if none fits.
_CLOSE = 20


class _Entry(NamedTuple):
    """A layout in the queue; `number` breaks ties, so that nothing else is compared."""

    bound_ms: float
    number: int
    layout: Layout
    counts: list[int] | None = None
    priced: Price | None = None


def find_layouts(
    table: CostTable,
    machine: Machine,
    job: Job,
    choices: Choices | None = None,
    *,
    best: int = 10,
) -> list[Price]:
    """Returns the prices of the `best` fastest layouts that fit into memory, the fastest first.

    Args:
        table: the costs of the model's layers.
        machine: the hardware, all of which is used.
        job: the work of a step.
        choices: what may be chosen from.
        best: how many.

    Raises:
        ConfigError: no layout uses all devices and cuts all batches evenly.
        SplitError: no layout fits into memory; says how much is missing.
    """
    search = _Search(table, machine, job)
    choices = choices or Choices()
    every = list(layouts(machine, job, len(table.sizes), choices))
    found = search.fastest(every, best)
    if not found:
        raise SplitError(search.why_nothing_fits(every))
    return found


def fastest_layout(
    table: CostTable, machine: Machine, job: Job, choices: Choices | None = None
) -> Price | None:
    """Returns the price of the fastest layout; None if none fits.

    Args:
        table: as of `find_layouts`, and so are the others.
        machine: see there.
        job: see there.
        choices: see there.
    """
    search = _Search(table, machine, job)
    try:
        every = list(layouts(machine, job, len(table.sizes), choices or Choices()))
    except ConfigError:  # none uses all devices
        return None
    return next(iter(search.fastest(every, 1)), None)


class _Search:
    """Cuts and bounds, of which many layouts share some."""

    def __init__(self, table: CostTable, machine: Machine, job: Job) -> None:
        self._table = table
        self._machine = machine
        self._job = job
        self._cut = cache(self._cut_by_time)
        self._times = cache(self._whole_times)
        self._weighed_at = cache(self._weighed_of)

    def fastest(self, every: Sequence[Layout], best: int) -> list[Price]:
        """Returns the prices of the `best` fastest layouts that fit into memory, by time."""
        numbers = counter()
        queue = [_Entry(self.bound(layout), next(numbers), layout) for layout in every]
        heapq.heapify(queue)
        found: dict[Layout, Price] = {}
        while queue and len(found) < best:
            entry = heapq.heappop(queue)
            layout, counts = entry.layout, entry.counts
            if layout in found:  # with a better cut
                continue
            if entry.priced is not None:
                found[layout] = entry.priced
            elif counts is not None:
                priced = price(self._table, self._machine, self._job, layout, counts)
                bound = max(entry.bound_ms, priced.step_ms)
                heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts, priced))
            else:
                for counts in self.cuts(layout):
                    bound = max(entry.bound_ms, self.bound_of_cut(layout, counts))
                    heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts))
        # bounds differ from prices by rounding
        return sorted(found.values(), key=lambda one: one.step_ms)

    def bound(self, layout: Layout) -> float:
        """Returns what no cut of the model is faster than, in milliseconds."""
        whole, largest = self._times(layout.samples(self._job), layout.checkpoint)
        busy = max(whole / layout.nb_part, largest) * layout.chunks
        if layout.stages_per_device == 1 and not layout.splits_backwards:
            busy = max(busy, _least_with_idle_time(whole, layout.nb_part, layout.chunks))
        load = self._job.data_ms_per_sample * self._job.samples / layout.replicas
        return max(busy, load) * self._job.accumulate

    def bound_of_cut(self, layout: Layout, counts: Sequence[int]) -> float:
        """Returns what no schedule of these stages is faster than, in milliseconds."""
        times = stage_times(self._table, self._machine, self._job, layout, counts)
        step = optimizer_ms(self._table.sizes, self._machine, self._job, layout, counts)
        return least_step_ms(self._job, layout, times, step)

    def cuts(self, layout: Layout) -> list[list[int]]:
        """Returns cuts that fit into memory, as the layers of each stage: all if there are few."""
        if not self._weights_fit(layout):
            return []
        layers = len(self._table.sizes)
        if comb(layers - 1, layout.stages - 1) > _FEW_CUTS:
            even = self.fitting_cut(layout)
            return [] if even is None else [self._improved(layout, even)]
        places = [at for at in range(1, layers) if at not in self._table.no_cut_before]
        every = combinations(places, layout.stages - 1)
        counts = [[b - a for a, b in pairwise((0, *bounds, layers))] for bounds in every]
        return [one for one in counts if self._fits(layout, one)]

    def _fits(self, layout: Layout, counts: Sequence[int]) -> bool:
        memory = device_memory(self._table, self._job, layout, counts)
        return max(each.total for each in memory) <= self._machine.usable_bytes

    def _weights_fit(self, layout: Layout) -> bool:
        weights = sum(cost.weight_bytes for cost in self._weighed(layout))
        return weights / layout.nb_part <= self._machine.usable_bytes

    def _improved(self, layout: Layout, counts: list[int]) -> list[int]:
        """Returns a cut with a smaller bound, found by moving layers to the next stage and back.

        The most even stages may send large messages, and may add up to uneven devices.
        """
        best = self.bound_of_cut(layout, counts)
        moves = iter(range(_MOST_MOVES))
        border = 0
        unmoved = 0
        while unmoved < layout.stages - 1 and next(moves, None) is not None:
            unmoved += 1
            for step in (-1, 1):
                moved = list(counts)
                moved[border] += step
                moved[border + 1] -= step
                if min(moved) < 1 or sum(moved[: border + 1]) in self._table.no_cut_before:
                    continue
                bound = self.bound_of_cut(layout, moved)
                if bound < best and self._fits(layout, moved):
                    counts, best, unmoved = moved, bound, 0
            border = (border + 1) % (layout.stages - 1)
        return counts

    def fitting_cut(self, layout: Layout) -> list[int] | None:
        """Returns the layers of each stage, as even as memory allows; None if nothing fits."""
        if not self._weights_fit(layout):
            return None
        limit = self._machine.usable_bytes
        try:
            counts = self._cut(layout.samples(self._job), layout.checkpoint, layout.stages)
            if self._fits(layout, counts):
                return counts
            if not self._may_fit(layout, limit / layout.stages_per_device):
                return None
            counts = self._cut_for_memory(layout, memory_weight=0.0, memory_limit=limit)
        except SplitError:  # too few layers or places to cut, or too much memory
            return None
        return counts if self._fits(layout, counts) else None

    def _may_fit(self, layout: Layout, limit: float) -> bool:
        """Returns whether stages that are filled up to `limit` have room for all layers.

        What comes from other stages is left out, so that a smaller stage never needs more. Far
        quicker than to look for a cut.
        """
        stage, used = 0, 0.0
        in_flight = most_in_flight(layout)
        for cost in self._weighed(layout):
            while True:
                alive = 1 if layout.checkpoint != "never" else in_flight[stage]
                nbytes = cost.weight_bytes + alive * cost.activation_bytes
                if used + nbytes <= limit:
                    used += nbytes
                    break
                stage, used = stage + 1, 0.0
                if stage == layout.stages:
                    return False
        return True

    def why_nothing_fits(self, every: Sequence[Layout]) -> str:
        """Returns what is missing where the least is."""
        found: list[tuple[int, int, Layout]] = []
        for layout in sorted(every, key=self._least_bytes)[:_CLOSE]:
            try:
                counts = self._cut_for_memory(layout, memory_weight=1.0)
            except SplitError:
                continue
            memory = price(self._table, self._machine, self._job, layout, counts).memory
            device, nbytes = max(enumerate(m.total for m in memory), key=lambda pair: pair[1])
            found.append((nbytes, device, layout))
        if not found:
            return (
                f"no plan fits: the model's {len(self._table.sizes)} layers cannot be cut into as "
                f"many stages as asked for: lower nb_part= or stages_per_device="
            )
        nbytes, device, layout = min(found, key=lambda entry: entry[0])
        usable = self._machine.usable_bytes
        return (
            f"no plan fits: {(nbytes - usable) / GIB:.1f} GiB are missing on device {device}; the "
            f"least memory is {nbytes / GIB:.1f} GiB of {usable / GIB:.1f} GiB that may be used "
            f"(nb_part={layout.nb_part}, chunks={layout.chunks}, checkpoint={layout.checkpoint}, "
            f"shard={layout.shard}): more devices (cluster.nodes=), larger ones "
            f"(cluster.memory_gib=) or a smaller model would do"
        )

    def _least_bytes(self, layout: Layout) -> float:
        """Returns about how much a device needs: an even share, and the inputs of its stage."""
        costs = self._weighed(layout)
        alive = 1 if layout.checkpoint == "always" else sum(most_in_flight(layout)) / layout.stages
        whole = sum(cost.weight_bytes + alive * cost.activation_bytes for cost in costs)
        return whole / layout.nb_part

    def _weighed(self, layout: Layout) -> list[LayerCost]:
        return self._weighed_at(layout.samples(self._job), layout.replicas, layout.shard)

    def _weighed_of(self, samples: int, replicas: int, shard: str) -> list[LayerCost]:
        layout = Layout(replicas=replicas, shard=shard)
        return with_weight_bytes(
            self._table.costs_at(samples), self._table.sizes, self._job, layout
        )

    def _cut_for_memory(self, layout: Layout, **goal: float) -> list[int]:
        objective = Objective(
            recomputes=layout.checkpoint != "never",
            stages_per_device=layout.stages_per_device,
            **goal,  # type: ignore[arg-type]
        )
        in_flight = most_in_flight(layout)
        return cut_by_costs(self._weighed(layout), in_flight, objective, self._table.no_cut_before)

    def _cut_by_time(self, samples: int, checkpoint: str, stages: int) -> list[int]:
        again = 2 if checkpoint != "never" else 1
        costs = [
            replace(cost, forward_ms=again * cost.forward_ms, crossing_ms=0.0)
            for cost in self._table.costs_at(samples)
        ]
        return cut_by_costs(costs, [1] * stages, Objective(), self._table.no_cut_before)

    def _whole_times(self, samples: int, checkpoint: str) -> tuple[float, float]:
        """Returns the milliseconds of all layers for a micro-batch, and of the largest one."""
        again = checkpoint == "always"
        times = [
            cost.forward_ms * (1 + again) + cost.backward_ms
            for cost in self._table.costs_at(samples)
        ]
        return sum(times), max(times)


def _least_with_idle_time(whole: float, stages: int, chunks: int) -> float:
    """Returns the least time of a batch, with one stage per device and whole backwards.

    Stage `s` takes `t[s]` for a micro-batch. It begins when the first one has passed the stages
    before it, and after its last backward come theirs. So the batch, of `m` micro-batches, takes at
    least `t[0] + ... + t[s-1] + m t[s]`. The largest of these is the smallest, M, if all are equal:
    `t[s] = M / m * (1 - 1 / m) ** s`, whose sum is `whole`.
    """
    return whole / (1 - (1 - 1 / chunks) ** stages)
