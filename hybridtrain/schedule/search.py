"""A schedule for the durations of a model's own stages, under a bound on what devices hold.

Tables are made by list scheduling, with every combination of a few preferences, also along the
named schedules with backwards in two parts. The shortest of these and of the named schedules that
keep to the bound is the result, so it is never longer than any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.durations import ROUNDING, Durations
from hybridtrain.schedule.list_scheduling import ListScheduling, Preferences, Stuck, places_in
from hybridtrain.schedule.named import (
    check_stages_per_device,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
    zero_bubble_v_in_parts,
)
from hybridtrain.schedule.placement import Placement, placement_of, stages_at
from hybridtrain.schedule.table import Schedule, divided_backwards, validate
from hybridtrain.schedule.whole_backwards import merge_backwards, whole_on_first_stage

BOUND_OF = {"search": "1f1b", "search-v": "zb-v"}
"""The named schedule that holds as much as each search may, with its stages on the same devices."""

SEARCHES = tuple(BOUND_OF)
"""The schedules that are searched."""

# A table of more actions is searched with two preferences alone, and one of too many not at all:
# all processes search, at the start of a run and once more for a short last batch.
_MANY_ACTIONS = 4_000
_TOO_MANY_ACTIONS = 20_000

# Along a schedule a gap is filled if it is as long as these parts of what is put into it.
_PARTS_ALONG = (0.75, 0.5)


def search(
    durations: Durations,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    limit: int | None = None,
    name: str = "search",
) -> Schedule:
    """Returns the shortest schedule that was found for `durations`.

    Of equally short ones it is one that divides fewest backwards.

    Args:
        durations: of the stages.
        devices: how many.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        limit: micro-batches that a device may hold at one time, each of its stages counted; None:
            as many as in `most_of_a_search`.
        name: one of `SEARCHES`.

    Raises:
        ScheduleError: no schedule keeps to the limit, or `name` has another number of stages per
            device.
    """
    check_stages_per_device(name, stages_per_device)
    placement = placement_of(name)
    shape = devices, chunks, stages_per_device, placement
    if limit is None:
        limit = most_of_a_search(*shape)
    found = [schedule for schedule in _named(*shape) if most_held(schedule) <= limit]
    if not found or not is_too_long(len(durations.forward), chunks):
        searched = _searched(durations, *shape, limit)
        found += [merge_backwards(schedule, durations) for schedule in searched]
    if not found:
        raise ScheduleError(
            f"{name}: no schedule was found in which a device holds at most {limit} micro-batches "
            f"of its {stages_per_device} stages"
        )
    lengths = [durations.length(schedule) for schedule in found]
    least = min(lengths) * (1 + ROUNDING)
    shortest = [one for one, length in zip(found, lengths, strict=True) if length <= least]
    best = min(shortest, key=lambda schedule: sum(divided_backwards(schedule)))
    best = Schedule(name, best.stages, best.chunks, best.lanes)
    validate(best)
    return best


def _searched(
    durations: Durations,
    devices: int,
    chunks: int,
    stages_per_device: int,
    placement: Placement,
    limit: int,
) -> Iterator[Schedule]:
    """Yields schedules by list scheduling, and the one along which some of them are made."""
    along = _along(devices, chunks, stages_per_device, placement)
    if along is not None and most_held(along) <= limit:
        yield along
    own = [stages_at(device, devices, stages_per_device, placement) for device in range(devices)]
    for preferences in _preferences(limit, _actions(devices * stages_per_device, chunks), along):
        with suppress(Stuck):
            lanes = ListScheduling(durations, own, chunks, preferences).lanes()
            whole = whole_on_first_stage(lanes)
            yield Schedule("searched", devices * stages_per_device, chunks, whole)


def is_too_long(stages: int, chunks: int) -> bool:
    """Returns whether the table of so many stages is so long that only named ones are compared."""
    return _actions(stages, chunks) > _TOO_MANY_ACTIONS


def _actions(stages: int, chunks: int) -> int:
    return 3 * chunks * stages


def most_of_a_search(
    devices: int, chunks: int, stages_per_device: int = 1, placement: Placement = "loop"
) -> int:
    """Returns the most micro-batches that a device may hold in a search, each stage's counted.

    As many as 1F1B's first device, which holds most; in a V as many as with ZB-V.
    """
    return most_held(next(_named(devices, chunks, stages_per_device, placement)))


def most_held(schedule: Schedule) -> int:
    """Returns the most micro-batches that a device holds at one time, each stage's counted."""
    most = 0
    for lane in schedule.lanes:
        held = 0
        for action in lane:
            held += (action.kind == "F") - action.ends_microbatch
            most = max(most, held)
    return most


def _named(
    devices: int, chunks: int, stages_per_device: int, placement: Placement
) -> Iterator[Schedule]:
    """Yields the named schedules of this placement; the first one is the bound."""
    if placement == "v":
        yield zero_bubble_v(devices, chunks)
        return
    yield one_forward_one_backward(devices, chunks, stages_per_device)
    yield gpipe(devices, chunks, stages_per_device)
    if stages_per_device == 1:
        yield zero_bubble_h1(devices, chunks)


def _along(
    devices: int, chunks: int, stages_per_device: int, placement: Placement
) -> Schedule | None:
    """Returns a schedule of this placement with backwards in two parts; None: there is none."""
    if placement == "v":
        return zero_bubble_v_in_parts(devices, chunks)
    return zero_bubble_h1(devices, chunks) if stages_per_device == 1 else None


def _preferences(limit: int, actions: int, along: Schedule | None) -> Iterator[Preferences]:
    """Yields the preferences to try for a table of so many actions."""
    few = actions > _MANY_ACTIONS
    helds = [limit] if few else list(dict.fromkeys((limit, max(1, limit - 1), -(-limit // 2))))
    parts = [1.0] if few else [1.0, 0.5, 0.0]
    for held, fits, forward_first in product(helds, parts, (False, True)):
        yield Preferences(held, fits, forward_first)
    if along is not None:
        guide = places_in(along)
        for fits in _PARTS_ALONG[: 1 if few else None]:
            yield Preferences(limit, fits, guide=guide)
