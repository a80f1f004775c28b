"""The search for where to cut a model, for every objective.

    find_cut       the exact best cut for an objective that is the size of the largest stage
    cut_by_costs   the same, or an error that says why there is no cut
    every_cut      all cuts of a small model
    improved_cut   a cut with a lower score, such as the time of a step, which concerns all stages

A cut is the number of layers of each stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import torch
from torch import Tensor

from hybridtrain.errors import SplitError, argument, setting
from hybridtrain.partitioning.costs import LayerCost
from hybridtrain.partitioning.objective import (
    GIB,
    INFINITY,
    Objective,
    stage_costs,
    stage_tables,
)

# The most moves of a layer that are tried to improve a cut.
_MOST_MOVES = 100

# A limit that every cut meets, so that only the ratios of unequal limits determine the cut.
_AMPLE = 2.0**100

# Sums that differ by less than this factor tie: 0.1 + 0.2 is not quite 0.3.
ROUNDING = 1 + 1e-12


def find_cut(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    objective: Objective,
    no_cut_before: Collection[int] = (),
) -> list[int] | None:
    """Returns the number of layers of each stage that minimizes the size of the largest stage.

    Args:
        costs: the costs of all layers.
        in_flight: for each stage, the peak number of micro-batches in flight.
        objective: the size of a stage, and the memory limit.
        no_cut_before: the indices of layers that cannot begin a stage.

    Returns:
        the counts; None if there are too few layers or places to cut, or no cut fits into memory.
    """
    if len(costs) - len(set(no_cut_before)) < len(in_flight):
        return None
    if not _may_fit(costs, in_flight, objective):
        return None
    return best_cut(stage_tables(costs, in_flight, objective, no_cut_before))


def cut_by_costs(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    objective: Objective,
    no_cut_before: Collection[int] = (),
) -> list[int]:
    """Returns the cut of `find_cut`.

    Raises:
        SplitError: there are too few layers or places to cut, or no cut fits into memory.
    """
    counts = find_cut(costs, in_flight, objective, no_cut_before)
    if counts is not None:
        return counts
    n, stages, tied = len(costs), len(in_flight), len(set(no_cut_before))
    if n - tied >= stages and objective.is_limited:
        raise SplitError(_why_nothing_fits(costs, in_flight, objective, no_cut_before))
    of_which = f", of which {tied} cannot begin a stage (a module is used before and after),"
    raise SplitError(
        f"a model of {n} layer{'s' * (n != 1)}{of_which if tied else ''} cannot be cut into "
        f"{stages} stages: lower {argument('nb_part')} (or {argument('stages_per_device')}) to "
        f"{n - tied} or less, or call more submodules. A model is cut where it calls submodules, "
        "not where its own forward uses parameters"
    )


def every_cut(layers: int, stages: int, no_cut_before: Collection[int] = ()) -> Iterator[list[int]]:
    """Yields all cuts of a chain of `layers` into `stages`.

    Args:
        layers: the number of layers.
        stages: the number of stages.
        no_cut_before: the indices of layers that cannot begin a stage.
    """
    places = [place for place in range(1, layers) if place not in no_cut_before]
    for cut in combinations(places, stages - 1):
        yield [end - start for start, end in pairwise((0, *cut, layers))]


def improved_cut(
    counts: Sequence[int],
    score: Callable[[Sequence[int]], float],
    fits: Callable[[Sequence[int]], bool],
    no_cut_before: Collection[int] = (),
) -> list[int]:
    """Returns a cut with a lower score, found by moving layers to the next stage and back.

    No single move of a layer lowers the score of the result, unless the search stops early.

    Args:
        counts: the cut to begin with.
        score: returns the score of a cut. It need not be a maximum over stages: for example, a step
            may take longer with larger messages, and a device has the sum of its stages.
        fits: whether a cut is allowed.
        no_cut_before: the indices of layers that cannot begin a stage.
    """
    best, lowest = list(counts), score(counts)
    borders = len(best) - 1
    border = unmoved = moves = 0
    while unmoved < borders and moves < _MOST_MOVES:
        moves += 1
        unmoved += 1
        for step in (-1, 1):
            moved = list(best)
            moved[border] += step
            moved[border + 1] -= step
            if min(moved) < 1 or sum(moved[: border + 1]) in no_cut_before:
                continue
            moved_score = score(moved)
            if moved_score < lowest and fits(moved):
                best, lowest, unmoved = moved, moved_score, 0
        border = (border + 1) % borders
    return best


def _may_fit(costs: Sequence[LayerCost], in_flight: Sequence[int], objective: Objective) -> bool:
    """Returns whether stages that are filled up to the limit have room for all layers.

    Values between layers are left out, so that a smaller stage never needs more. This test is much
    faster than the search for a cut.
    """
    stage, used = 0, 0.0
    limits = objective.stage_limits(len(in_flight))
    for cost in costs if objective.is_limited else ():
        while True:
            held = cost.recomputed() if objective.recomputes else cost
            alone = held.activation_bytes - held.later_bytes
            nbytes = cost.weight_bytes + in_flight[stage] * alone
            if used + nbytes <= limits[stage]:
                used += nbytes
                break
            stage, used = stage + 1, 0.0
            if stage == len(in_flight):
                return False
    return True


def best_cut(costs: Sequence[Tensor] | Sequence[Sequence[Sequence[float]]]) -> list[int] | None:
    """Returns the number of consecutive layers of each part; every part has at least one.

    It minimizes the cost of the most expensive part. Ties are broken by the smallest sum of squared
    costs, then by the most even counts; costs that differ only by rounding (`ROUNDING`) tie. This
    is the linear partition problem (Skiena, The Algorithm Design Manual, 8.5), solved exactly by
    dynamic programming in O(parts * layers^2). Costs need not grow with the part, since a cut may
    be expensive to cross.

    Args:
        costs: for each part, a table of shape (layers + 1, layers + 1): `costs[part][start][end]`
            is its cost, at least 0, for the layers `start` to `end - 1`; infinity where that is
            not allowed. Entries with `end <= start` are ignored.

    Returns:
        the counts; None if every cut has a part that is not allowed.
    """
    tables = [torch.as_tensor(table, dtype=torch.float64) for table in costs]
    ends = torch.arange(len(tables[0]))
    tables = [torch.where(ends[:, None] < ends, table, INFINITY) for table in tables]
    start_only = torch.full(ends.shape, INFINITY, dtype=torch.float64)
    start_only[0] = 0

    # limit[end] is the smallest possible maximum over the first `end` layers
    limit = start_only
    for table in tables:
        limit = torch.maximum(limit[:, None], table).amin(0)
    if limit[-1] == INFINITY:
        return None

    # squares[end] and evenness[end] are the sums of squared costs and counts of the best cut of
    # the first `end` layers into the parts so far; starts[part][end] is the start of its last part
    squares = start_only
    evenness = torch.zeros_like(ends)
    starts: list[Tensor] = []
    for table in tables:
        cost = torch.where(table <= limit[-1] * ROUNDING, table, INFINITY)
        by_start = squares[:, None] + cost.square()
        squares = by_start.amin(0)
        counts = evenness[:, None] + (ends - ends[:, None]).square()
        counts[by_start > squares * ROUNDING] = torch.iinfo(counts.dtype).max
        evenness = counts.amin(0)
        starts.append(torch.where(counts == evenness, ends[:, None], -1).amax(0))

    bounds = [len(ends) - 1]
    for start_of in reversed(starts):
        bounds.append(int(start_of[bounds[-1]]))
    return [end - start for end, start in pairwise(bounds)][::-1]


def _why_nothing_fits(
    costs: Sequence[LayerCost],
    in_flight: Sequence[int],
    objective: Objective,
    no_cut_before: Collection[int],
) -> str:
    n, stages, per_device = len(costs), len(in_flight), objective.stages_per_device
    limits = objective.stage_limits(stages)
    mean = sum(limits) / stages
    is_equal = len(set(limits)) == 1
    devices = max(1, stages // per_device)  # stage i < devices is the first stage of device i
    shown = [f"{limit * per_device / GIB:g}" for limit in limits[:devices]]
    share_text = f", {mean / GIB:g} GiB for each of a device's {per_device} stages"
    limit = setting("memory_limit_gib", shown[0] if is_equal else f"[{', '.join(shown)}]")
    limit += share_text * (per_device > 1 and is_equal)
    # each stage before and after needs at least one layer
    placed = [range(max(0, stages - n + i), min(i + 1, stages)) for i in range(n)]
    alone, alive, name = max(
        (_bytes_alone(cost, held, objective.recomputes), held, cost.name)
        for cost, possible in zip(costs, placed, strict=True)
        for held in [min(in_flight[stage] for stage in possible)]
    )
    batches = f"{alive} micro-batch{'es' * (alive != 1)}"
    culprit = f" (layer {name!r} alone needs {_gib(alone)} with {batches} in flight: split it)"
    culprit *= alone > max(limits)
    ample = tuple(limit / min(limits) * _AMPLE for limit in limits)
    by_memory = replace(objective, memory_weight=1.0, memory_limit=ample)
    counts = cut_by_costs(costs, in_flight, by_memory, no_cut_before)
    cut = stage_costs(costs, counts, in_flight, objective.recomputes)
    if is_equal:
        needed_bytes = max(stage.memory_bytes for stage in cut)
        problem = f"every cut has a stage of {_gib(needed_bytes)} or more{culprit}"
        enough = f"{_gib(needed_bytes * per_device)} or more"
    else:
        ratios = [stage.memory_bytes / limit for stage, limit in zip(cut, limits, strict=True)]
        scaled = [_gib(max(ratios) * limit * per_device) for limit in limits]
        problem = f"every cut has a stage that is too large for its device{culprit}"
        enough = f"[{', '.join(scaled[:devices])}] or more"
    return (
        f"no cut into {stages} stages fits under {limit}: {problem}. Set "
        f"{argument('memory_limit_gib')} to {enough}, or reduce the memory of a stage: more stages "
        f"({argument('nb_part')}), smaller micro-batches ({argument('chunks')}), or recomputation "
        f"({setting('recompute', 'always', repr)})"
    )


def _bytes_alone(cost: LayerCost, alive: int, recomputes: bool) -> int:
    """Returns the least bytes of a stage with this layer alone, without its input."""
    held = cost.recomputed() if recomputes else cost
    recomputed = max(0, cost.activation_bytes - held.activation_bytes)
    return cost.weight_bytes + alive * (held.activation_bytes - held.later_bytes) + recomputed


def _gib(size: float) -> str:
    """Returns `size` in GiB, rounded up, so that a limit set to it is enough."""
    return f"{math.ceil(size / GIB * 1000) / 1000:g} GiB"
