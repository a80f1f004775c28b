"""The search for the layouts with the lowest price that fit.

It is best-first: simulating thousands of layouts would take too long. A priority queue orders
layouts by a lower bound of their step time (`price.bounds`, in closed form). The search takes the
first layout from the queue, computes a tighter bound and puts it back:

    without a cut   all devices are equally busy       cheap, from sums
    cut             the bound of the schedule          closed form; it fits into memory
    priced          the simulated time                 the next result

So no unsimulated layout is faster than a result. If a model has few possible cuts, all of them
enter the queue; otherwise the most even cut does, before and after local improvement. With
`recompute="layers"` the cut determines which layers are recomputed: as few as memory allows. A
layout whose activations wait in the host's memory enters the queue where memory limits the layout
without, which is never slower.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from itertools import count as counter
from math import comb
from typing import Any, NamedTuple

from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import SplitError, argument, setting
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    CostTable,
    LayerCost,
    Objective,
    every_cut,
    find_cut,
    improved_cut,
)
from hybridtrain.price.bounds import AllLayers, least_step_ms, least_step_ms_of_any_cut
from hybridtrain.price.layout import Choices, ParallelLayout, StepWork, layouts, moving_more
from hybridtrain.price.price import Price, optimizer_ms, price
from hybridtrain.price.stage_needs import (
    device_memory,
    has_table,
    most_in_flight,
    stage_times,
    with_weight_bytes,
)

# A model with at most this many cuts is tried with all of them.
_FEW_CUTS = 50

# The accuracy of predictions: of plans within this factor, the simplest is proposed.
ALIKE = 1.02
# The search stops after this many times `best` layouts, if they are equally fast.
_MOST_ALIKE = 10

# If no layout fits: the number of layouts whose minimum memory is always computed, and the number
# of cuts after which the computation stops.
_CLOSE = 20
_MOST_EVALUATED = 5_000


class DoesNotFit(SplitError):
    """No layout fits into the memory of the devices.

    Attributes:
        layout: the layout that needs the least memory.
        device: its most loaded device.
        nbytes: the peak memory of that device.
        memory_gib: the smallest memory of a device with which that layout fits, in GiB.
    """

    def __init__(self, layout: ParallelLayout, device: int, nbytes: int, hardware: Hardware):
        is_equal = not layout.arrangement.device_memory_gib
        usable = round(layout.usable_bytes(hardware)[device])
        missing = with_unit(nbytes - usable)
        recompute = {"layers": "of single layers"}.get(layout.recompute, layout.recompute)
        self.layout, self.device, self.nbytes = layout, device, nbytes
        self.memory_gib = _rounded_up(nbytes / GIB / (1 - hardware.margin) + hardware.reserved_gib)
        self.in_words = (
            f"{setting('nb_part', layout.nb_part)}, {setting('chunks', layout.chunks)}, "
            f"{setting('schedule', layout.schedule)}, recompute {recompute}, "
            + f"{setting('offload', layout.offload)}, " * (layout.offload != "none")
            + setting("shard", layout.shard)
        )
        super().__init__(
            f"no plan fits: the plan with the least memory needs {with_unit(nbytes)} on device "
            f"{device}, {missing} more than the {with_unit(usable)} that may be used "
            f"({self.in_words}). Use more devices (hardware.nodes=), devices with more memory"
            + f" (hardware.memory_gib={self.memory_gib:g})" * is_equal
            + " or a smaller model"
        )


def _rounded_up(number: float) -> float:
    """Rounds a number up to four significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 3)
    return float(f"{math.ceil(number / unit - 1e-9) * unit:.4g}")


class _Entry(NamedTuple):
    """A layout in the queue; `number` breaks ties, so that layouts are never compared."""

    bound_ms: float
    number: int
    layout: ParallelLayout
    counts: list[int] | None = None
    priced: Price | None = None


def find_layouts(
    table: CostTable,
    hardware: Hardware,
    work: StepWork,
    choices: Choices | None = None,
    *,
    best: int = 10,
) -> list[Price]:
    """Returns the prices of `best` layouts that fit into memory: the proposed, then the fastest.

    Args:
        table: the costs of the model's layers.
        hardware: the devices and links; every layout uses all devices.
        work: the work of a step.
        choices: the values that the search may choose from; None: all.
        best: the number of prices to return.

    Raises:
        ConfigError: no layout uses all devices and divides all batches evenly.
        DoesNotFit: no layout fits into memory; the message says how much is missing.
        SplitError: the model cannot be cut into as many stages.
    """
    choices = choices or Choices()
    search = _Search(table, hardware, work, choices)
    candidates = layouts(hardware, work, len(table.sizes), choices)
    prices = search.fastest(candidates, best)
    if not prices:
        raise search.why_nothing_fits(candidates)
    proposal = proposed(prices)
    return [proposal, *(price for price in prices if price is not proposal)][:best]


def proposed(prices: Sequence[Price]) -> Price:
    """Returns the simplest of the layouts that are about as fast as the fastest.

    The simplest has the fewest stages, then the simplest engine and schedule, then no
    recomputation, no offloading and no sharding if possible, and then the least memory.
    """
    limit = ALIKE * min(price.step_ms for price in prices)

    def effort(price: Price) -> tuple[float, ...]:
        layout = price.layout
        return (
            layout.stages,
            layout.engine == "distributed",
            layout.splits_backwards,
            layout.recompute != "never",
            layout.offload != "none",
            layout.shard != "none",
            price.peak_bytes,
            price.step_ms,
        )

    return min((price for price in prices if price.step_ms <= limit), key=effort)


class _Search:
    """The search: cuts, bounds and prices, cached where layouts share them."""

    def __init__(
        self,
        table: CostTable,
        hardware: Hardware,
        work: StepWork,
        choices: Choices | None = None,
    ) -> None:
        self._table = table
        self._hardware = hardware
        self._work = work
        self._choices = choices or Choices()
        self._options = self._choices.options
        self._even_cut = cache(self._most_even_cut)
        self._all_layers = cache(partial(AllLayers.of, table))
        self._weighed_at = cache(self._weighed_of)
        self._recomputed = cache(self._fewest_recomputed)
        # all but the last layer, whose cost includes the loss
        self._most_recomputed = table.recomputing(frozenset(range(len(table.sizes) - 1)))

    def fastest(self, candidates: Sequence[ParallelLayout], best: int) -> list[Price]:
        """Returns the prices of the `best` fastest layouts that fit into memory, by time.

        More layouts are included if they are about as fast as the fastest.
        """
        numbers = counter()
        queue = [_Entry(self.bound(layout), next(numbers), layout) for layout in candidates]
        heapq.heapify(queue)
        prices: dict[ParallelLayout, Price] = {}
        fastest = math.inf
        while queue and len(prices) < _MOST_ALIKE * best:
            entry = heapq.heappop(queue)
            if len(prices) >= best and entry.bound_ms > ALIKE * fastest:
                break
            layout, counts = entry.layout, entry.counts
            if layout in prices:  # with a better cut
                continue
            if entry.priced is not None:
                prices[layout] = entry.priced
                fastest = min(fastest, entry.priced.step_ms)
            elif counts is not None:
                table = self._table_of(layout, counts)
                priced = price(table, self._hardware, self._work, layout, counts)
                bound = max(entry.bound_ms, priced.step_ms)
                heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts, priced))
            elif has_table(layout):
                for counts in self.cuts(layout):
                    bound = max(entry.bound_ms, self.bound_of_cut(layout, counts))
                    heapq.heappush(queue, _Entry(bound, next(numbers), layout, counts))
                wider = moving_more(layout, self._choices, self._hardware)
                if wider is not None and self._is_limited(layout):
                    heapq.heappush(queue, _Entry(entry.bound_ms, next(numbers), wider))
        # bounds differ from prices by rounding
        return sorted(prices.values(), key=lambda price: price.step_ms)

    def bound(self, layout: ParallelLayout) -> float:
        """Returns a lower bound of the step's milliseconds, for any cut of the model."""
        layers = self._all_layers(layout.samples(self._work), layout.recomputed)
        return least_step_ms_of_any_cut(layers, self._hardware, self._work, layout)

    def bound_of_cut(self, layout: ParallelLayout, counts: Sequence[int]) -> float:
        """Returns a lower bound of the step's milliseconds for this cut, for any schedule."""
        table = self._table_of(layout, counts)
        times = stage_times(table, self._hardware, self._work, layout, counts)
        stages = table.stages_at(layout.samples(self._work), counts)
        update = optimizer_ms(stages, self._hardware, self._work, layout)
        return least_step_ms(self._work, layout, times, update)

    def cuts(self, layout: ParallelLayout) -> list[list[int]]:
        """Returns cuts that fit into memory, as layers per stage: all, or the best of many.

        The best are the most even cut and the one with the smallest bound. Either may be faster
        when it is simulated.
        """
        if not self._weights_fit(layout):
            return []
        no_cut_before = self._table.no_cut_before
        fits = partial(self._fits, layout)
        if (few := self._few_cuts(layout)) is not None:
            return list(filter(fits, few))
        samples = layout.samples(self._work)
        counts = self._even_cut(samples, layout.recompute, layout.stage_speeds)
        if counts is None:  # too few places to cut
            return []
        if layout.recompute == "layers" and self._recomputed(layout, tuple(counts)) == frozenset():
            return []  # the same as "never"
        if not fits(counts):
            limit = self._stage_devices_limits(layout)
            by_memory = (
                self._cut_by_memory(layout, memory_weight=0.0, memory_limit=limit),
                self._cut_by_memory(layout, memory_weight=1.0),  # the last resort
            )
            counts = next((cut for cut in by_memory if cut is not None and fits(cut)), None)
            if counts is None:
                return []
        improved = improved_cut(counts, partial(self.bound_of_cut, layout), fits, no_cut_before)
        return [improved] if improved == counts else [improved, counts]

    def _is_limited(self, layout: ParallelLayout) -> bool:
        """Returns whether memory leaves out a cut of a layout, or asks for recomputed layers."""
        if not self._weights_fit(layout):
            return False  # with less activations, too
        cuts = self._few_cuts(layout)
        if cuts is None:
            even = self._even_cut(layout.samples(self._work), layout.recompute, layout.stage_speeds)
            cuts = [] if even is None else [even]
        if layout.recompute == "layers":
            return any(self._recomputed(layout, tuple(cut)) != frozenset() for cut in cuts)
        return not all(self._fits(layout, cut) for cut in cuts)

    def _few_cuts(self, layout: ParallelLayout) -> list[list[int]] | None:
        """Returns all cuts that the stages may have; None: there are many."""
        if self._options is not None:
            counts = self._cut_of_run(self._options, layout)
            return [] if counts is None else [counts]
        layers = len(self._table.sizes)
        if comb(layers - 1, layout.stages - 1) > _FEW_CUTS:
            return None
        return list(every_cut(layers, layout.stages, self._table.no_cut_before))

    def _cut_of_run(self, options: PipelineOptions, layout: ParallelLayout) -> list[int] | None:
        """Returns the cut that `options` determine for this layout, without a search."""
        recompute = "never" if layout.recompute == "layers" else layout.recompute
        of_run = replace(
            options,
            schedule=layout.schedule,
            stages_per_device=layout.stages_per_device,
            recompute=recompute,
        )
        costs = self._weighed_at(layout.samples(self._work), layout.replicas, layout.shard, False)
        goal = replace(Objective.of(of_run), speeds=layout.stage_speeds)
        return find_cut(costs, most_in_flight(layout), goal, self._table.no_cut_before)

    def _fits(self, layout: ParallelLayout, counts: Sequence[int]) -> bool:
        if layout.recompute == "layers":  # without recomputed layers, the cut of "never"
            return bool(self._recomputed(layout, tuple(counts)))
        return not any(self._over(layout, self._table, counts))

    def _table_of(self, layout: ParallelLayout, counts: Sequence[int]) -> CostTable:
        if layout.recompute != "layers":
            return self._table
        return self._table.recomputing(self._recomputed(layout, tuple(counts)) or frozenset())

    def _fewest_recomputed(
        self, layout: ParallelLayout, counts: tuple[int, ...]
    ) -> frozenset[int] | None:
        """Returns the layers to recompute so that these stages fit; None if they cannot fit.

        On each device, layers are taken in the order of bytes freed per time of their forward,
        until the rest fits.
        """
        order = self._by_gain(layout, counts)

        def chosen(numbers: Sequence[int]) -> frozenset[int]:
            return frozenset(
                i for indexes, n in zip(order, numbers, strict=True) for i in indexes[:n]
            )

        def over(numbers: Sequence[int]) -> list[bool]:
            table = self._table.recomputing(chosen(numbers))
            return self._over(layout, table, counts)

        # bisection, on all devices at once
        fewest = [0] * layout.nb_part
        most = [
            len(indexes) * is_over for indexes, is_over in zip(order, over(fewest), strict=True)
        ]
        if any(over(most)):
            return None
        while fewest != most:
            middle = [(low + high) // 2 for low, high in zip(fewest, most, strict=True)]
            for device, is_over in enumerate(over(middle)):
                if is_over:
                    fewest[device] = middle[device] + 1
                else:
                    most[device] = middle[device]
        return chosen(most)

    def _by_gain(self, layout: ParallelLayout, counts: Sequence[int]) -> list[list[int]]:
        """Returns the layers of each device that free memory, the most per time first."""
        stored, recomputed = (
            table.costs_at(layout.samples(self._work))
            for table in (self._table, self._most_recomputed)
        )
        in_flight = most_in_flight(layout)
        gains: list[list[tuple[float, int]]] = [[] for _ in range(layout.nb_part)]
        for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
            for index in range(start, end):
                freed = stored[index].activation_bytes - recomputed[index].activation_bytes
                if freed:
                    rate = freed * in_flight[stage] / (stored[index].forward_ms or math.ulp(0.0))
                    gains[layout.devices[stage]].append((-rate, index))
        return [[index for _, index in sorted(pairs)] for pairs in gains]

    def _over(self, layout: ParallelLayout, table: CostTable, counts: Sequence[int]) -> list[bool]:
        """Returns whether each device needs more memory than it has."""
        memory = device_memory(table, self._hardware, self._work, layout, counts)
        limits = layout.usable_bytes(self._hardware)
        return [m.total > limit for m, limit in zip(memory, limits, strict=True)]

    def _stage_devices_limits(self, layout: ParallelLayout) -> tuple[float, ...]:
        """Returns the usable bytes of each stage's device."""
        limits = layout.usable_bytes(self._hardware)
        libraries = self._hardware.library_bytes
        return tuple(limits[device] - libraries for device in layout.devices)

    def _weights_fit(self, layout: ParallelLayout) -> bool:
        weights = sum(cost.weight_bytes for cost in self._weighed(layout))
        return weights <= sum(layout.usable_bytes(self._hardware))

    def why_nothing_fits(self, candidates: Sequence[ParallelLayout]) -> SplitError:
        """Returns the error of a search without a result, about the layout with the least memory.

        Examines all cuts of all layouts or, if there are too many, the cuts that may need the least
        memory.
        """
        least: tuple[int, int, ParallelLayout] | None = None
        evaluated = 0
        every = list(filter(has_table, candidates))
        for layout in every:  # grows
            if (wider := moving_more(layout, self._choices, self._hardware)) is not None:
                every.append(wider)
        closest = sorted(every, key=self._least_bytes)
        for number, layout in enumerate(closest):
            if number >= _CLOSE and evaluated > _MOST_EVALUATED:
                break
            cuts = self._few_cuts(layout)
            evaluated += _FEW_CUTS if cuts is None else len(cuts)
            if cuts is None:
                counts = self._cut_by_memory(layout, memory_weight=1.0)
                cuts = [] if counts is None else [counts]
            for counts in cuts:
                nbytes, device = self._least_peak(layout, counts)
                if least is None or nbytes < least[0]:
                    least = nbytes, device, layout
        if least is None:
            return SplitError(
                f"no plan fits: the model's {len(self._table.sizes)} layers cannot be cut into as "
                f"many stages as requested: lower {argument('nb_part')} or "
                f"{argument('stages_per_device')}"
            )
        nbytes, device, layout = least
        return DoesNotFit(layout, device, nbytes, self._hardware)

    def _least_peak(self, layout: ParallelLayout, counts: Sequence[int]) -> tuple[int, int]:
        """Returns the peak bytes and index of the most loaded device, with maximal recomputation.

        Devices on which recomputation frees no memory do not recompute.
        """
        tables = [self._table]
        if layout.recompute == "layers":
            orders = self._by_gain(layout, counts)
            tables.append(self._table.recomputing(frozenset(chain.from_iterable(orders))))
        by_table = [
            device_memory(table, self._hardware, self._work, layout, counts) for table in tables
        ]
        peaks = [min(m.total for m in memory) for memory in zip(*by_table, strict=True)]
        limits = layout.usable_bytes(self._hardware)
        device = max(range(len(peaks)), key=lambda device: (peaks[device] / limits[device], device))
        return peaks[device], device

    def _least_bytes(self, layout: ParallelLayout) -> float:
        """Returns an estimate of the bytes per device: an even share of weights and activations."""
        costs = self._weighed(layout)
        alive = sum(most_in_flight(layout)) / layout.stages
        if layout.offload == "all":
            alive = min(alive, 3)  # one is used, one comes back and one leaves
        whole = sum(cost.weight_bytes + alive * cost.activation_bytes for cost in costs)
        return whole / layout.nb_part

    def _weighed(self, layout: ParallelLayout) -> list[LayerCost]:
        """Returns the costs with weight bytes, and with the least activation bytes possible."""
        single = layout.recompute in ("layers", "always", "except_last")
        return self._weighed_at(layout.samples(self._work), layout.replicas, layout.shard, single)

    def _weighed_of(self, samples: int, replicas: int, shard: str, single: bool) -> list[LayerCost]:
        layout = ParallelLayout(replicas=replicas, shard=shard)
        table = self._most_recomputed if single else self._table
        return with_weight_bytes(table.costs_at(samples), table.sizes, self._work, layout)

    def _cut_by_memory(self, layout: ParallelLayout, **goal: Any) -> list[int] | None:
        objective = Objective(
            recomputes=bool(layout.recomputed),
            stages_per_device=layout.stages_per_device,
            speeds=layout.stage_speeds,
            **goal,
        )
        in_flight = most_in_flight(layout)
        return find_cut(self._weighed(layout), in_flight, objective, self._table.no_cut_before)

    def _most_even_cut(
        self, samples: int, recompute: str, speeds: tuple[float, ...]
    ) -> list[int] | None:
        forwards = 1 if recompute in ("never", "layers") else 2
        costs = [
            replace(cost, forward_ms=forwards * cost.forward_ms, crossing_ms=0.0)
            for cost in self._table.costs_at(samples)
        ]
        goal = Objective(speeds=speeds)
        return find_cut(costs, [1] * len(speeds), goal, self._table.no_cut_before)
