"""The search for the best cut, which expands modules that are too large for a good one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from hybridtrain.errors import SplitError
from hybridtrain.graph.chain import Chain
from hybridtrain.planning.cost_sources import Costs
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.objective import Objective, cut_by_costs, stage_tables
from hybridtrain.planning.split_spec import strip_call_index

# Layers this large, as a share of the mean stage, are expanded if that may even the stages out.
LARGE_LAYER = 0.1
# How often layers are expanded and the cut is looked for anew, at most.
MAX_EXPANSIONS = 5


class Decision(NamedTuple):
    """The modules that are expanded, what the layers cost, and how many each stage gets."""

    expand: Collection[str]
    costs: Sequence[LayerCost]
    counts: list[int]
    costs_from: str = "counted"


def find_best_cut(
    chain_of: Callable[[Collection[str]], Chain],
    costs_of: Callable[[Chain], Iterable[Costs]],
    in_flight: Sequence[int],
    goal: Objective,
    may_expand: Callable[[str], bool],
) -> Decision:
    """Finds the best cut.

    `chain_of` returns the chain in which the given modules are expanded, `costs_of` yields the
    costs of its layers, each time more exact. Other arguments are as for `cut_by_costs`.

    Raises:
        SplitError: there is no cut; says why.
    """
    expand: set[str] = set()
    best: Decision | None = None
    for expansions_left in reversed(range(1 + MAX_EXPANSIONS)):
        chain = chain_of(expand)
        more: set[str] = set()
        for found in costs_of(chain):
            counts: list[int] | None = None
            failure: SplitError | None = None
            try:
                counts = cut_by_costs(found.layers, in_flight, goal, chain.no_cut_before)
                best = Decision(sorted(expand), found.layers, counts)
            except SplitError as error:
                failure = error
            if expansions_left:
                large = _too_large(chain, found, in_flight, goal, counts)
                more = {path for path in large if may_expand(path)} - expand
            if more or failure:
                break  # better times would not change that
        if not more:
            break
        expand |= more
    if best is None:
        assert failure is not None
        raise SplitError(f"{failure}{_hints(chain)}") from failure
    return best


def _too_large(
    chain: Chain, found: Costs, in_flight: Sequence[int], goal: Objective, counts: list[int] | None
) -> set[str]:
    """Returns the layers whose size prevents a better cut than `counts`, or any cut."""
    tables = stage_tables(found.layers, in_flight, goal, chain.no_cut_before)
    sizes = tables[0].diagonal(1).tolist()
    mean = sum(sizes) / len(in_flight)
    if counts is not None:
        stages = zip(tables, pairwise(accumulate(counts, initial=0)), strict=True)
        largest = max(table[bounds].item() for table, bounds in stages)
        # a number of layers is even enough
        if goal.unit == "layers" or largest <= (1 + found.noise) * mean:
            return set()
    return {
        strip_call_index(layer.name)
        for layer, size in zip(chain.layers, sizes, strict=True)
        if size > LARGE_LAYER * mean
    }


def _hints(chain: Chain) -> str:
    """Returns why there are not more places to cut."""
    hints = ""
    if chain.no_cut_before:
        first = last = min(chain.no_cut_before)
        while last + 1 in chain.no_cut_before:
            last += 1
        hints = (
            f"; {chain.layers[first - 1].name!r} to {chain.layers[last].name!r} stay together, "
            f"since they use one module, or one changes in place what another one reads"
        )
    for name, why in list(chain.unexpanded.items())[-3:]:
        hints += f"; {name} could not be expanded: {why}"
    return hints
