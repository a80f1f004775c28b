"""The simulated times of a layout's schedule, which may have a name or be searched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from hybridtrain.planning.layout import Layout
from hybridtrain.schedule import Durations, Schedule, divided_backwards, make_schedule, search

# A schedule with more actions is simulated for fewer micro-batches: in its middle each takes as
# long as the one before.
MOST_ACTIONS = 8_000
_MOST_GROUPS = 50
# With more devices the micro-batches after which all of them repeat themselves are too many.
_FEW_DEVICES = 6


@dataclass(frozen=True)
class Spread:
    """The simulated times of one batch, in milliseconds.

    Attributes:
        length: when its last action ends.
        last_backward: when the last backward of each stage begins and ends.
        divided: how many backwards of each stage are in two parts.
    """

    length: float
    last_backward: tuple[tuple[float, float], ...]
    divided: tuple[float, ...]


def spread_of(layout: Layout, durations: Durations, order: Schedule | None) -> Spread:
    """Returns when the last actions of a batch run, in the schedule of `layout` or in `order`."""
    if order is not None:
        return _last_actions(order, durations)
    shape = layout.nb_part, layout.chunks, layout.stages_per_device
    return _simulated(layout.schedule, *shape, durations)


@lru_cache(maxsize=1024)
def _simulated(
    schedule: str, nb_part: int, chunks: int, stages_per_device: int, durations: Durations
) -> Spread:
    """Returns when the last actions of a batch run, in a schedule that has a name."""
    stages = nb_part * stages_per_device

    def run(chunks: int) -> Spread:
        return _last_actions(make_schedule(schedule, nb_part, chunks, stages_per_device), durations)

    # after some groups the schedule repeats itself: a device that holds n micro-batches every n
    group = lcm(*range(1, nb_part + 1)) if nb_part <= _FEW_DEVICES else nb_part
    groups = min(max(2, MOST_ACTIONS // (2 * stages * group)), _MOST_GROUPS)
    less = groups * group + chunks % group
    if chunks <= less + group:
        return run(chunks)
    short, longer = run(less), run(less + group)
    rounds = (chunks - less) / group
    more = (longer.length - short.length) * rounds
    return Spread(
        short.length + more,
        tuple((a + more, b + more) for a, b in short.last_backward),
        tuple(a + (b - a) * rounds for a, b in zip(short.divided, longer.divided, strict=True)),
    )


def _last_actions(schedule: Schedule, durations: Durations) -> Spread:
    last = [(0.0, 0.0)] * schedule.stages
    for lane in durations.spans(schedule):
        for action, start, end in lane:
            if action.ends_microbatch and action.microbatch == schedule.chunks - 1:
                last[action.stage] = start, end
    return Spread(max(end for _, end in last), tuple(last), divided_backwards(schedule))


@lru_cache(maxsize=16)  # layouts that differ in their shards have the same
def searched_order(
    name: str, nb_part: int, chunks: int, stages_per_device: int, durations: Durations
) -> Schedule:
    """Returns what the search of this name finds for these durations."""
    return search(durations, nb_part, chunks, stages_per_device, name=name)


def shortest_named(layout: Layout, durations: Durations) -> str:
    """Returns the schedule that a search gives for a table that is too long to be searched.

    GPipe is left out: it holds too many micro-batches, or there are few.
    """
    shape = layout.nb_part, layout.chunks, layout.stages_per_device
    return min(layout.named, key=lambda name: _simulated(name, *shape, durations).length)
