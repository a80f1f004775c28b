"""The registry of schedules, by the name used in `schedule=`.

    @schedule("wave", placement="v", stages_per_device=2)
    def wave(devices: int, chunks: int) -> Schedule:
        ...

Registering a function that builds a table makes it a schedule, in this package or in user code.
`make_schedule` checks each table it builds: `validate` proves that an engine can execute it, and
the table must match its registration.
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


@dataclass(frozen=True, eq=False)  # compared by identity: a name registered again is another key
class RegisteredSchedule:
    """A schedule's function, and its properties known before it builds a table.

    Attributes:
        name: the name, as used in `schedule=`.
        builder: called with the number of devices, the number of micro-batches and, if
            `stages_per_device` is None, the number of stages per device.
        placement: the placement of the stages.
        stages_per_device: the required number of stages per device; None for any.
        splits_backward: whether it splits backwards into two parts, `I` and `W`.
        periodic: whether each group of `devices` micro-batches after the first two repeats the
            previous group.
    """

    name: str
    builder: Callable[..., Schedule]
    placement: Placement = "loop"
    stages_per_device: int | None = None
    splits_backward: bool = False
    periodic: bool = False

    def build(self, devices: int, chunks: int, stages_per_device: int) -> Schedule:
        """Returns the unchecked table.

        Raises:
            ScheduleError: the schedule needs a different number of stages per device.
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
        """Checks that an engine can execute `table`, and that it matches the registration.

        Raises:
            ScheduleError: a check fails; names the rule and the first stage or action that breaks
                it.
        """
        if not isinstance(table, Schedule):
            raise ScheduleError(
                f"{setting('schedule', self.name)}: its function must return a "
                f"hybridtrain.schedule.Schedule, not a {type(table).__name__}"
            )
        wanted = devices * stages_per_device, chunks, devices
        if (table.stages, table.chunks, len(table.lanes)) != wanted:
            raise ScheduleError(
                f"{setting('schedule', self.name)}: its function returned a table for "
                f"{table.stages} stages, {table.chunks} micro-batches and {len(table.lanes)} "
                f"devices, expected {wanted[0]} stages, {chunks} micro-batches and {devices} "
                "devices"
            )
        # For each number of micro-batches that is asked for: a function may fail for some of them
        # only.
        validate(table)
        for stage, device in sorted(table.lane_of.items()):
            if device != (place := place_of(stage, devices, self.placement)):
                raise ScheduleError(
                    f"{setting('schedule', self.name)}: stage {stage} is on device {device}, but "
                    f"placement={self.placement!r} requires device {place}"
                )
        if any(divided_backwards(table)) and not self.splits_backward:
            raise ScheduleError(
                f"{setting('schedule', self.name)} splits backwards into two parts: register it "
                "with splits_backward=True"
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
    training step, and must support any number of micro-batches: the last batch of an epoch may be
    short, and the self-check of the first step runs a single micro-batch. It may raise a
    ScheduleError for unsupported numbers of devices; `plan` and `auto`, which search all registered
    schedules, then skip it.

    Args:
        name: the name of the schedule, for use in `PipelineOptions(schedule=name)` and configs.
        placement: the placement of the stages: `loop` puts stage `s` on device `s % devices`; `v`
            reverses the direction of every second round.
        stages_per_device: the required number of stages per device; None for any.
        splits_backward: whether it splits backwards into two parts.
        periodic: whether each group of `devices` micro-batches after the first two repeats the
            previous group. The planner extrapolates large tables of such a schedule from small
            ones; for other schedules it uses the full table, which takes longer.

    Raises:
        ScheduleError: another function has this name.
    """

    def register(builder: Builder) -> Builder:
        before = _REGISTERED.get(name)
        # a reloaded module or a rerun notebook cell replaces its function
        if before is not None and _origin(before.builder) != _origin(builder):
            raise ScheduleError(
                f"{setting('schedule', name)} is already registered by {_origin(before.builder)}: "
                f"register {_origin(builder)} under another name"
            )
        _REGISTERED[name] = RegisteredSchedule(
            name, builder, placement, stages_per_device, splits_backward, periodic
        )
        return builder

    return register


def _origin(builder: Callable[..., Schedule]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"


# The numbers of devices for which `periodic=True` is checked.
_CHECKED_DEVICES = (2, 3, 4)


@lru_cache(maxsize=256)
def is_periodic(entry: RegisteredSchedule, stages_per_device: int) -> bool:
    """Returns whether the planner may extrapolate the schedule, and checks the claim.

    The claim `periodic=True` cannot be proved for all numbers of micro-batches. It is checked on 2,
    3 and 4 devices with equal stage times: the 4th and 5th group of micro-batches must add the same
    to every stage's peak and split backwards, and to the end time of each device. A table that
    changes later, or only on more devices, passes. `hybridtrain.price` additionally compares the
    peak memory on the actual devices, and counts it in full if small tables do not extrapolate.

    Raises:
        ScheduleError: the groups differ.
    """
    if not entry.periodic:
        return False
    for devices in _CHECKED_DEVICES:
        # The first two groups are warm-up and may differ.
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
    """Returns the names of all registered schedules."""
    return tuple(_REGISTERED)


def registered(name: str) -> RegisteredSchedule:
    """Returns the schedule with this name or file; a process reads a file only once.

    Raises:
        ScheduleError: the name is unknown, or an engine cannot execute the file's table.
    """
    if is_file(name):
        return _of_file(name)
    if name not in _REGISTERED:
        raise ScheduleError(
            f"{setting('schedule', name, repr)} is unknown: "
            f"{did_you_mean(name, _REGISTERED, 'schedules')}"
        )
    return _REGISTERED[name]


@cache  # all steps of a run use one table, without reading the disk again
def _of_file(path: str) -> RegisteredSchedule:
    return _of_table(path, read_schedule(path))


def register_table(table: Schedule) -> None:
    """Registers a table as the schedule `table.name`, for its number of devices and micro-batches.

    A batch with fewer micro-batches, such as the last one of an epoch, runs the actions of the
    table's first micro-batches, in the same order.

    Raises:
        ScheduleError: an engine cannot execute the table, or another schedule has this name.
    """
    entry = _of_table(table.name, table)
    taken = _REGISTERED.get(table.name)
    if taken is not None and _origin(taken.builder) != _origin(entry.builder):
        raise ScheduleError(
            f"{setting('schedule', table.name)} is already registered by "
            f"{_origin(taken.builder)}: give the table another name"
        )
    _REGISTERED[table.name] = entry


def _of_table(name: str, table: Schedule) -> RegisteredSchedule:
    validate(table)
    devices = len(table.lanes)
    per_device = table.stages // devices
    # Read off the table: a file does not say its placement.
    on_v = all(place_of(s, devices, "v") == device for s, device in table.lane_of.items())

    def first_microbatches(nb_part: int, chunks: int) -> Schedule:
        if nb_part != devices or chunks > table.chunks:
            raise ScheduleError(
                f"{setting('schedule', name)} is a table for {devices} devices and up to "
                f"{table.chunks} micro-batches: set {setting('nb_part', devices)} and at most "
                f"{setting('chunks', table.chunks)}, not {nb_part} and {chunks}"
            )
        # actions do not depend on other micro-batches, so a subset of a valid table is valid
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
        devices: the number of devices.
        chunks: the number of micro-batches.
        stages_per_device: the number of stages per device.
        max_inflight: the maximum number of micro-batches in flight (begun and not finished) at a
            time.

    Raises:
        ScheduleError: `name` is unknown, a count is not positive, the schedule needs another number
            of stages per device, or its table breaks a rule.
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
    # stage 0 holds all micro-batches in flight
    if max_inflight is not None and peak_in_flight(table)[0] > max_inflight:
        table = _in_blocks(entry, max_inflight, devices, chunks, stages_per_device)
        # Again: joined blocks are another table.
        entry.check(table, devices, chunks, stages_per_device)
    return table


def _in_blocks(
    entry: RegisteredSchedule, size: int, devices: int, chunks: int, stages_per_device: int
) -> Schedule:
    """Concatenates schedules for `size` micro-batches at a time."""
    lanes: list[list[Action]] = [[] for _ in range(devices)]
    # One block must end before the next begins, so no more than `size` are in flight.
    for block in even_parts(chunks, -(-chunks // size)):
        part = entry.build(devices, len(block), stages_per_device)
        for lane, actions in zip(lanes, part.lanes, strict=True):
            lane += [action._replace(microbatch=block[action.microbatch]) for action in actions]
    return Schedule(part.name, devices * stages_per_device, chunks, tuple(map(tuple, lanes)))
