"""The cut of a chain that makes its most expensive part as cheap as possible.

The linear partition problem (Skiena, The Algorithm Design Manual, 8.5), solved exactly, and for
any cost of a part: it need not grow with the part, since one cut may be expensive to cross and the
next one cheap. Dynamic programming over the parts, O(parts * layers^2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

INFINITY = float("inf")

# Sums that differ by less than this factor tie: 0.1 + 0.2 is not quite 0.3.
ROUNDING = 1 + 1e-12


def best_cut(costs: Sequence[Tensor] | Sequence[Sequence[Sequence[float]]]) -> list[int] | None:
    """Returns how many consecutive layers each part gets; none is empty.

    The cost of the most expensive part is minimal. Among the cuts that reach this minimum, the
    one with the smallest sum of squared costs is taken, then the one with the most even counts,
    so that the other parts are even too. What differs by rounding alone (`ROUNDING`) ties.

    Args:
        costs: for each part a table of (layers + 1, layers + 1): `costs[part][start][end]` is its
            cost, 0 or more, if it holds the layers from `start` up to but without `end`;
            infinity where that is forbidden. Entries with `end <= start` are ignored.

    Returns:
        None if every cut has a forbidden part.
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

    # squares[end] and evenness[end] are the sums of squared costs and counts of the best way to
    # cut the first `end` layers into the parts so far; starts[part][end] is where its last begins
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


def range_sums(values: Sequence[float]) -> Tensor:
    """Returns a table with the sum of `values[start:end]` at `[start, end]`, float64."""
    totals = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    return totals - totals[:, None]
