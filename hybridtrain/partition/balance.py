"""Where to cut a chain of costs so that its most expensive part is as cheap as it can be.

The linear partition problem (Skiena, The Algorithm Design Manual, 8.5), solved exactly. Needs no
torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from hybridtrain.errors import SplitError


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """How many consecutive layers each of `parts` parts gets; none is empty.

    The cost of the most expensive part is minimal. Among the cuts that reach this minimum, the
    one with the smallest sum of squared costs is taken, then the one with the most even counts,
    so that the other parts are even too.

    >>> balance([1, 1, 1, 1, 1], 2), balance([9, 1, 1, 1], 2)
    ([3, 2], [1, 3])

    Raises:
        SplitError: there are fewer layers than parts, or a cost is negative.
    """
    n = len(costs)
    if parts < 1:
        raise SplitError(f"a model is cut into at least 1 part, not {parts}")
    if n < parts:
        raise SplitError(
            f"a model of {n} layer{'s' * (n != 1)} cannot be cut into {parts} stages: lower "
            f"pipeline.nb_part (or pipeline.stages_per_device) to {n} or less"
        )
    if any(cost < 0 for cost in costs):
        raise SplitError("a layer's cost cannot be negative")
    prefix = [0.0, *accumulate(map(float, costs))]
    limit = _smallest_maximum(prefix, parts)

    # best[i] is the best way to cut the first i layers into the parts so far: (sum of squared
    # costs, sum of squared counts); starts[part][i] is where its last part starts
    best: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * n
    starts: list[list[int]] = []
    for part in range(1, parts + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (n + 1)
        start_of = [0] * (n + 1)
        for end in range(part, n - (parts - part) + 1):
            for start in range(end - 1, part - 2, -1):
                cost = prefix[end] - prefix[start]
                if cost > limit:
                    break
                squares, counts = best[start]
                candidate = (squares + cost * cost, counts + (end - start) ** 2)
                if candidate < row[end]:
                    row[end], start_of[end] = candidate, start
        best = row
        starts.append(start_of)

    counts_of_parts: list[int] = []
    end = n
    for start_of in reversed(starts):
        counts_of_parts.append(end - start_of[end])
        end = start_of[end]
    return counts_of_parts[::-1]


def _smallest_maximum(prefix: Sequence[float], parts: int) -> float:
    """The cost of the most expensive part of the best cut.

    A row of dynamic programming for each part: `reach[i]` is the smallest possible maximum over
    the first i layers. The best start of the last part is where both sides meet, which moves
    right only, so that bisection finds it.
    """
    n = len(prefix) - 1
    reach = list(prefix)
    for part in range(2, parts + 1):
        row = [float("inf")] * (n + 1)
        for end in range(part, n + 1):
            # reach grows with the start, the last part's cost falls: look on both sides of the
            # crossing
            low = bisect_right(
                range(part - 1, end),
                0.0,
                key=lambda start, end=end: reach[start] - (prefix[end] - prefix[start]),  # type: ignore[misc]
            )
            for start in (part - 2 + low, part - 1 + low):
                if part - 1 <= start < end:
                    row[end] = min(row[end], max(reach[start], prefix[end] - prefix[start]))
        reach = row
    return reach[n]
