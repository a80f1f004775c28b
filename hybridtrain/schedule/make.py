"""Makes the schedule of a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from hybridtrain.errors import ScheduleError, did_you_mean
from hybridtrain.schedule.durations import Durations
from hybridtrain.schedule.lines import from_lines
from hybridtrain.schedule.named import (
    even_parts,
    gpipe,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)
from hybridtrain.schedule.placement import placement_of
from hybridtrain.schedule.search import SEARCHES, most_held, most_of_a_search, search
from hybridtrain.schedule.table import Action, Schedule, peak_in_flight, validate

Builder = Callable[[int, int, int], Schedule]

NAMED: dict[str, Builder] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}

SCHEDULES = (*NAMED, *SEARCHES)
"""The names that `make_schedule` knows."""


def splits_backwards(name: str) -> bool:
    """Returns whether the schedule of this name has backwards in two parts."""
    return name not in ("gpipe", "1f1b")


@lru_cache(maxsize=256)
def make_schedule(
    name: str,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    max_inflight: int | None = None,
    durations: Durations | None = None,
) -> Schedule:
    """Builds and validates the schedule `name`; a short last batch asks for fewer `chunks`.

    Args:
        name: one of `SCHEDULES`.
        devices: how many.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        max_inflight: how many micro-batches may be in flight, begun and not finished, at one time.
        durations: of the stages, for a search; None: all stages are equal.

    Raises:
        ScheduleError: `name` is unknown, a count is not positive, or the schedule has another
            number of stages per device.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"schedule={name!r} is unknown; {did_you_mean(name, SCHEDULES, 'schedules')}"
        )
    if min(devices, chunks, stages_per_device, max_inflight or 1) < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 device, 1 chunk, 1 stage per device and 1 micro-batch "
            f"in flight, not {devices}, {chunks}, {stages_per_device}, {max_inflight}"
        )
    builder = NAMED[name] if name in NAMED else _searched(name, durations, max_inflight)
    schedule = builder(devices, chunks, stages_per_device)
    # stage 0 holds every micro-batch that is in flight
    if max_inflight is not None and peak_in_flight(schedule)[0] > max_inflight:
        schedule = in_blocks(builder, max_inflight, devices, chunks, stages_per_device)
    validate(schedule)
    return schedule


def read_schedule(
    name: str,
    lines: Sequence[str],
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    max_inflight: int | None = None,
) -> Schedule:
    """Returns the schedule that was found by the search `name`, from its lines.

    Args:
        name: of the search.
        lines: see `as_lines`.
        devices: as of `make_schedule`, and so are the other arguments.
        chunks: see there.
        stages_per_device: see there.
        max_inflight: see there.

    Raises:
        ScheduleError: the lines are not such a schedule, no engine can execute it, more than
            `max_inflight` are in flight, or without it a device holds more than in a search.
    """
    placement = placement_of(name)
    schedule = from_lines(name, lines, devices, chunks, stages_per_device, placement)
    begun, held = peak_in_flight(schedule)[0], most_held(schedule)
    limit = most_of_a_search(devices, chunks, stages_per_device, placement)
    if max_inflight is None and held > limit:
        raise ScheduleError(f"a device holds {held} micro-batches, and {limit} are the limit")
    if max_inflight is not None and begun > max_inflight:
        raise ScheduleError(f"{begun} micro-batches are in flight, and max_inflight={max_inflight}")
    return schedule


def _searched(name: str, durations: Durations | None, max_inflight: int | None) -> Builder:
    @lru_cache
    def builder(devices: int, chunks: int, stages_per_device: int) -> Schedule:
        of_stages = durations or Durations.equal(devices * stages_per_device)
        # with several stages per device a bound on the pipeline is none on a device
        limit = min(max_inflight, devices) if max_inflight and stages_per_device == 1 else None
        return search(of_stages, devices, chunks, stages_per_device, limit, name)

    return builder


def in_blocks(builder: Builder, size: int, devices: int, chunks: int, v: int) -> Schedule:
    """Returns `builder`'s schedules for `size` micro-batches at a time, one after the other."""
    lanes: list[list[Action]] = [[] for _ in range(devices)]
    for block in even_parts(chunks, -(-chunks // size)):
        part = builder(devices, len(block), v)
        for lane, actions in zip(lanes, part.lanes, strict=True):
            lane += [action._replace(microbatch=block[action.microbatch]) for action in actions]
    return Schedule(part.name, devices * v, chunks, tuple(map(tuple, lanes)))
