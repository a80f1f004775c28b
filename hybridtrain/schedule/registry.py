"""The registry of schedules: each by the name that `schedule=` chooses.

    @schedule("wave", placement="v", stages_per_device=2)
    def wave(devices: int, chunks: int) -> Schedule:
        ...

A function that builds a table is a schedule once it is registered, in this package or in a user's.
`make_schedule` checks each table that it builds: `validate` proves that an engine can execute it,
and it must agree with its registration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import TypeVar

from hybridtrain.errors import ScheduleError, did_you_mean, setting
from hybridtrain.schedule.files import is_file, read_schedule
from hybridtrain.schedule.memory import peak_in_flight
from hybridtrain.schedule.simulation import Durations
from hybridtrain.schedule.table import (
    Action,
    Placement,
    Schedule,
    divided_backwards,
    even_parts,
    place_of,
    validate,
)

Builder = TypeVar("Builder", bound=Callable[..., Schedule])


@dataclass(frozen=True, eq=False)  # by identity: a name that is registered again is another key
class RegisteredSchedule:
    """A schedule's function, and the facts that are known before it builds a table.

    Attributes:
        name: as `schedule=` has it.
        builder: called with the number of devices, the number of micro-batches and, where
            `stages_per_device` is None, the number of stages per device.
        placement: where the stages are.
        stages_per_device: the only number of stages per device that the schedule is for; None:
            any.
        splits_backward: whether it has backwards in two parts, `I` and `W`.
        periodic: whether each group of `devices` micro-batches after the first two repeats the
            group before it.
    """

    name: str
    builder: Callable[..., Schedule]
    placement: Placement = "loop"
    stages_per_device: int | None = None
    splits_backward: bool = False
    periodic: bool = False

    def build(self, devices: int, chunks: int, stages_per_device: int) -> Schedule:
        """Returns the table, which nobody has checked.

        Raises:
            ScheduleError: the schedule is for another number of stages per device.
        """
        if self.stages_per_device is None:
            return self.builder(devices, chunks, stages_per_device)
        if stages_per_device != self.stages_per_device:
            needed = self.stages_per_device
            raise ScheduleError(
                f"{setting('schedule', self.name)} has {needed} stage{'s' * (needed > 1)} on each "
                f"device: set {setting('stages_per_device', needed)}"
            )
        return self.builder(devices, chunks)

    def check(self, table: Schedule, devices: int, chunks: int, stages_per_device: int) -> None:
        """Proves that an engine can execute `table`, and that it agrees with the registration.

        Raises:
            ScheduleError: it does not; names the rule and the first stage or action that breaks it.
        """
        if not isinstance(table, Schedule):
            raise ScheduleError(
                f"{setting('schedule', self.name)}: its function returned a "
                f"{type(table).__name__}, not a hybridtrain.schedule.Schedule"
            )
        wanted = devices * stages_per_device, chunks, devices
        if (table.stages, table.chunks, len(table.lanes)) != wanted:
            raise ScheduleError(
                f"{setting('schedule', self.name)}: its function returned a table of "
                f"{table.stages} stages, {table.chunks} micro-batches and {len(table.lanes)} "
                f"lanes, not of {wanted[0]} stages, {chunks} micro-batches and {devices} lanes"
            )
        validate(table)
        for stage, device in sorted(table.lane_of.items()):
            if device != (place := place_of(stage, devices, self.placement)):
                raise ScheduleError(
                    f"{setting('schedule', self.name)}: stage {stage} is on device {device}, and "
                    f"placement={self.placement!r} puts it on device {place}"
                )
        if any(divided_backwards(table)) and not self.splits_backward:
            raise ScheduleError(
                f"{setting('schedule', self.name)} has backwards in two parts: register it with "
                f"splits_backward=True"
            )


_REGISTERED: dict[str, RegisteredSchedule] = {}


def schedule(
    name: str,
    *,
    placement: Placement = "loop",
    stages_per_device: int | None = None,
    splits_backward: bool = False,
    periodic: bool = False,
) -> Callable[[Builder], Builder]:
    """Registers the decorated function as the schedule `name`, and returns it unchanged.

    The function is called with the number of devices, the number of micro-batches and, unless
    `stages_per_device` is given, the number of stages per device. It returns the table of a
    training step. It must have one for any number of micro-batches: the last batch of an epoch may
    be short, and the first step's self-check runs a single one. It may raise a ScheduleError for
    numbers of devices that it has none for: `plan` and `auto`, which search all registered
    schedules, then leave it out.

    Args:
        name: valid from then on wherever a schedule is named, such as
            `PipelineOptions(schedule=name)`.
        placement: where the stages are: `loop`, stage `s` on device `s % devices`, or `v`, where
            each second turn goes back.
        stages_per_device: the only number of stages per device that it is for; None: any.
        splits_backward: whether it has backwards in two parts.
        periodic: whether each group of `devices` micro-batches after the first two repeats the
            group before it. The planner extrapolates large tables of such a schedule from small
            ones, and prices other schedules from their full table, which takes longer.

    Raises:
        ScheduleError: another function has that name.
    """

    def register(builder: Builder) -> Builder:
        before = _REGISTERED.get(name)
        # a module that is loaded again, or a notebook's cell that runs again, replaces its function
        if before is not None and _origin(before.builder) != _origin(builder):
            raise ScheduleError(
                f"{setting('schedule', name)} is {_origin(before.builder)} already: register "
                f"{_origin(builder)} by another name"
            )
        _REGISTERED[name] = RegisteredSchedule(
            name, builder, placement, stages_per_device, splits_backward, periodic
        )
        return builder

    return register


def _origin(builder: Callable[..., Schedule]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"


# The numbers of devices for which the claim of a periodic schedule is checked.
_CHECKED_DEVICES = (2, 3, 4)


@lru_cache(maxsize=256)
def is_periodic(entry: RegisteredSchedule, stages_per_device: int) -> bool:
    """Returns whether the planner may extrapolate the schedule, as it was registered.

    A function may do anything for a number of micro-batches that nobody has asked for, so the claim
    cannot be proved. It is checked on 2, 3 and 4 devices, with stages of equal times: the 4th and
    the 5th group of micro-batches must add the same to every stage's peak and divided backwards,
    and to the end of each device. A table that changes later, or on more devices only, passes.
    `hybridtrain.price` compares what a device holds at its peak on the devices in question too, and
    counts it in full where small tables do not continue one another.

    Raises:
        ScheduleError: a group adds something else.
    """
    if not entry.periodic:
        return False
    for devices in _CHECKED_DEVICES:
        facts = [_facts(entry, devices, groups, stages_per_device) for groups in (3, 4, 5)]
        added = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(facts)]
        if added[0] != added[1]:
            raise ScheduleError(
                f"{setting('schedule', entry.name)} is registered with periodic=True, but on "
                f"{devices} devices its 4th and 5th groups of {devices} micro-batches differ: "
                f"register it without periodic=True"
            )
    return True


def _facts(
    entry: RegisteredSchedule, devices: int, groups: int, stages_per_device: int
) -> list[float]:
    table = entry.build(devices, groups * devices, stages_per_device)
    entry.check(table, devices, groups * devices, stages_per_device)
    ends = [lane[-1].end for lane in Durations.equal(table.stages).spans(table)]
    return [*peak_in_flight(table), *divided_backwards(table), *ends]


def schedule_names() -> tuple[str, ...]:
    """Returns the names of the schedules that are registered so far."""
    return tuple(_REGISTERED)


def registered(name: str) -> RegisteredSchedule:
    """Returns the schedule of this name, or of this file, which a process reads once.

    Raises:
        ScheduleError: there is none, or the file has none that an engine can execute.
    """
    if is_file(name):
        return _of_file(name)
    if name not in _REGISTERED:
        raise ScheduleError(
            f"{setting('schedule', name, repr)} is unknown; "
            f"{did_you_mean(name, _REGISTERED, 'schedules')}"
        )
    return _REGISTERED[name]


@cache  # all steps of a run take one table, and none of them looks at the disk
def _of_file(path: str) -> RegisteredSchedule:
    return _of_table(path, read_schedule(path))


def register_table(table: Schedule) -> None:
    """Registers a table as the schedule `table.name`, for its devices and micro-batches.

    A batch with fewer micro-batches, such as the last one of an epoch, takes the actions of the
    table's first ones, in the same order.

    Raises:
        ScheduleError: an engine cannot execute it, or another schedule has its name.
    """
    entry = _of_table(table.name, table)
    taken = _REGISTERED.get(table.name)
    if taken is not None and _origin(taken.builder) != _origin(entry.builder):
        raise ScheduleError(
            f"{setting('schedule', table.name)} is {_origin(taken.builder)} already: give the "
            f"table another name"
        )
    _REGISTERED[table.name] = entry


def _of_table(name: str, table: Schedule) -> RegisteredSchedule:
    validate(table)
    devices = len(table.lanes)
    per_device = table.stages // devices
    on_v = all(place_of(s, devices, "v") == device for s, device in table.lane_of.items())

    def first_microbatches(nb_part: int, chunks: int) -> Schedule:
        if nb_part != devices or chunks > table.chunks:
            raise ScheduleError(
                f"{setting('schedule', name)} is a table for {devices} devices and up to "
                f"{table.chunks} micro-batches: set {setting('nb_part', devices)} and at most "
                f"{setting('chunks', table.chunks)}, not {nb_part} and {chunks}"
            )
        # an action needs no results of other micro-batches, so a part of a valid table is valid
        lanes = tuple(
            tuple(action for action in lane if action.microbatch < chunks) for lane in table.lanes
        )
        return Schedule(name, table.stages, chunks, lanes)

    entry = RegisteredSchedule(
        name,
        first_microbatches,
        placement="v" if on_v and per_device > 1 else "loop",
        stages_per_device=per_device,
        splits_backward=any(divided_backwards(table)),
    )
    entry.check(table, devices, table.chunks, per_device)
    return entry


def make_schedule(
    name: str,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    max_inflight: int | None = None,
) -> Schedule:
    """Builds and validates the schedule `name`; a short last batch asks for fewer `chunks`.

    Args:
        name: one of `schedule_names()`, or the path of a file (`.csv`, or a plan's `.yaml`).
        devices: how many.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        max_inflight: how many micro-batches may be in flight, begun and not finished, at one time.

    Raises:
        ScheduleError: `name` is unknown, a count is not positive, the schedule is for another
            number of stages per device, or its table breaks a rule.
    """
    return _made(registered(name), devices, chunks, stages_per_device, max_inflight)


@lru_cache(maxsize=256)
def _made(
    entry: RegisteredSchedule,
    devices: int,
    chunks: int,
    stages_per_device: int,
    max_inflight: int | None,
) -> Schedule:
    if min(devices, chunks, stages_per_device, max_inflight or 1) < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 device, 1 chunk, 1 stage per device and 1 micro-batch "
            f"in flight, not {devices}, {chunks}, {stages_per_device}, {max_inflight}"
        )
    table = entry.build(devices, chunks, stages_per_device)
    entry.check(table, devices, chunks, stages_per_device)
    # stage 0 holds every micro-batch that is in flight
    if max_inflight is not None and peak_in_flight(table)[0] > max_inflight:
        table = _in_blocks(entry, max_inflight, devices, chunks, stages_per_device)
        entry.check(table, devices, chunks, stages_per_device)
    return table


def _in_blocks(
    entry: RegisteredSchedule, size: int, devices: int, chunks: int, stages_per_device: int
) -> Schedule:
    """Returns the schedules for `size` micro-batches at a time, one after the other."""
    lanes: list[list[Action]] = [[] for _ in range(devices)]
    for block in even_parts(chunks, -(-chunks // size)):
        part = entry.build(devices, len(block), stages_per_device)
        for lane, actions in zip(lanes, part.lanes, strict=True):
            lane += [action._replace(microbatch=block[action.microbatch]) for action in actions]
    return Schedule(part.name, devices * stages_per_device, chunks, tuple(map(tuple, lanes)))
