"""A schedule for the durations of a model's own stages, under a bound on what devices hold.

List scheduling: time goes on from action to action, and the device that can begin first takes the
best of the actions whose inputs are there. That depends on a few preferences (`_Preferences`), of
which all are tried. The shortest of these tables and of the named schedules that keep to the bound
is the result, so it is never longer than any of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from hybridtrain.errors import ScheduleError
from hybridtrain.schedule.named import (
    gpipe,
    one_forward_one_backward,
    whole_backwards_on_first_stage,
    zero_bubble_h1,
)
from hybridtrain.schedule.placement import stages_at
from hybridtrain.schedule.simulation import simulate
from hybridtrain.schedule.table import Action, Schedule, Span, validate

# Two lengths that differ by less are the same, but for rounding.
_ROUNDING = 1e-9

# A table of more actions is searched with two preferences alone, and one of too many not at all:
# all processes search, at the start of a run and once more for a short last batch.
_MANY_ACTIONS = 4_000
_TOO_MANY_ACTIONS = 20_000


@dataclass(frozen=True)
class Durations:
    """The time that each stage takes for one micro-batch, in any unit.

    Attributes:
        forward: of each stage.
        backward: both parts of it.
        weight: of the backward's second part, to the weights.
        transfer: from each stage to the next, and back.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def of(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        transfer: Sequence[float] | None = None,
    ) -> Durations:
        """Returns durations in which a backward has two equal parts.

        But for the first stage, whose input needs no gradient: all of it is to the weights.
        """
        weight = [b if stage == 0 else b / 2 for stage, b in enumerate(backward)]
        ways = transfer or [0.0] * (len(forward) - 1)
        return cls(tuple(forward), tuple(backward), tuple(weight), tuple(ways))

    @classmethod
    def equal(cls, stages: int) -> Durations:
        """Returns those of stages that take 1 for a forward and 2 for a backward."""
        return cls.of([1.0] * stages, [2.0] * stages)

    def spans(self, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
        """Returns when each action of `schedule` runs."""
        return simulate(schedule, self.forward, self.backward, self.transfer, self.weight)

    def length(self, schedule: Schedule) -> float:
        """Returns when the last action of `schedule` ends."""
        return max(lane[-1].end for lane in self.spans(schedule))


def search(
    durations: Durations,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    limit: int | None = None,
) -> Schedule:
    """Returns the shortest schedule that was found for `durations`.

    Args:
        durations: of the stages.
        devices: how many; stages go round them.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        limit: micro-batches that a device may hold at one time, each of its stages counted; None:
            as many as 1F1B's first device, which holds most.
    """
    named = list(_named(devices, chunks, stages_per_device))
    if limit is None:
        limit = most_of_a_search(devices, chunks, stages_per_device)
    fitting = [schedule for schedule in named if most_held(schedule) <= limit]
    own = [stages_at(device, devices, stages_per_device) for device in range(devices)]
    actions = _actions(len(durations.forward), chunks)
    for preferences in _preferences(limit, actions, needed=not fitting):
        try:
            lanes = _ListScheduling(durations, own, chunks, preferences).lanes()
        except _Stuck:
            continue
        whole = whole_backwards_on_first_stage(lanes)
        fitting.append(Schedule("search", devices * stages_per_device, chunks, whole))
    if not fitting:
        raise ScheduleError(
            f"search: no schedule was found in which a device holds at most {limit} micro-batches "
            f"of its {stages_per_device} stages"
        )
    best = min(fitting, key=durations.length)
    if best in named:
        best = Schedule("search", best.stages, best.chunks, best.lanes)
    if actions <= _MANY_ACTIONS:
        best = _with_whole_backwards(best, durations)
    validate(best)
    return best


def is_too_long(stages: int, chunks: int) -> bool:
    """Returns whether the table of so many stages is so long that only named ones are compared."""
    return _actions(stages, chunks) > _TOO_MANY_ACTIONS


def _actions(stages: int, chunks: int) -> int:
    return 3 * chunks * stages


def most_of_a_search(devices: int, chunks: int, stages_per_device: int = 1) -> int:
    """Returns the most micro-batches that a device holds in a schedule that a search finds."""
    return most_held(one_forward_one_backward(devices, chunks, stages_per_device))


def most_held(schedule: Schedule) -> int:
    """Returns the most micro-batches that a device holds at one time, each stage's counted."""
    most = 0
    for lane in schedule.lanes:
        held = 0
        for action in lane:
            held += (action.kind == "F") - action.ends_microbatch
            most = max(most, held)
    return most


def _named(devices: int, chunks: int, stages_per_device: int) -> Iterator[Schedule]:
    yield one_forward_one_backward(devices, chunks, stages_per_device)
    yield gpipe(devices, chunks, stages_per_device)
    if stages_per_device == 1:
        yield zero_bubble_h1(devices, chunks)


@dataclass(frozen=True)
class _Preferences:
    """The preferences of a device.

    Attributes:
        held: micro-batches that it holds at most.
        fits: the part of a backward to the weights that a gap must be long enough for, to be
            filled with it.
        forward_first: take a forward before a backward if both can begin.
    """

    held: int
    fits: float
    forward_first: bool


def _preferences(limit: int, actions: int, needed: bool) -> Iterator[_Preferences]:
    """Yields the preferences to try for a table of so many actions; some, if that is needed."""
    if actions > _TOO_MANY_ACTIONS and not needed:
        return
    few = actions > _MANY_ACTIONS
    helds = [limit] if few else list(dict.fromkeys((limit, max(1, limit - 1), -(-limit // 2))))
    parts = [1.0] if few else [1.0, 0.5, 0.0]
    for held, fits, forward_first in product(helds, parts, (False, True)):
        yield _Preferences(held, fits, forward_first)


class _Stuck(Exception):
    """No device can go on without holding more than it may."""


class _ListScheduling:
    """One pass of list scheduling.

    The device with the earliest next action comes first, so whatever arrives before that action is
    known when it is chosen. A choice is made anew when something arrives at its device.

    Args:
        times: of the stages.
        own: the stages of each device.
        chunks: micro-batches.
        preferences: of all devices.
    """

    def __init__(
        self,
        times: Durations,
        own: Sequence[Sequence[int]],
        chunks: int,
        preferences: _Preferences,
    ) -> None:
        self._own = own
        self._chunks = chunks
        self._preferences = preferences
        self._transfer = times.transfer
        stages = len(times.forward)
        self._cost = {
            "F": times.forward,
            "I": [b - w for b, w in zip(times.backward, times.weight, strict=True)],
            "W": times.weight,
        }
        self._device = {stage: device for device, each in enumerate(own) for stage in each}
        # when the input of each micro-batch's forward and backward is there
        self._inputs: list[list[float]] = [[0.0] * chunks if s == 0 else [] for s in range(stages)]
        self._gradients: list[list[float]] = [[] for _ in range(stages)]
        self._done = {kind: [0] * stages for kind in "FIW"}
        self._clock = [0.0] * len(own)
        self._held = [0] * len(own)
        self._lanes: list[list[Action]] = [[] for _ in own]

    def lanes(self) -> list[list[Action]]:
        """Returns the actions of each device."""
        version = [0] * len(self._own)
        queue: list[tuple[float, int, int, Action]] = []

        def choose(device: int) -> None:
            version[device] += 1
            choice = self._choice(device)
            if choice is not None:
                heapq.heappush(queue, (choice[0], device, version[device], choice[1]))

        for device in range(len(self._own)):
            choose(device)
        while queue:
            start, device, number, action = heapq.heappop(queue)
            if number != version[device]:
                continue
            for other in {device, *self._run(device, start, action)}:
                choose(other)
        if any(done < self._chunks for done in self._done["W"]):
            raise _Stuck
        return self._lanes

    def _run(self, device: int, start: float, action: Action) -> list[int]:
        """Adds an action to its lane; returns the devices that wait for what it makes."""
        kind, stage, _ = action
        end = start + self._cost[kind][stage]
        self._clock[device] = end
        self._lanes[device].append(action)
        self._done[kind][stage] += 1
        transfer, last = self._transfer, len(self._inputs) - 1
        if kind == "F":
            self._held[device] += 1
            if stage == last:
                self._gradients[stage].append(end)
                return []
            self._inputs[stage + 1].append(end + transfer[stage])
            return [self._device[stage + 1]]
        if kind == "I" and stage:
            self._gradients[stage - 1].append(end + transfer[stage - 1])
            return [self._device[stage - 1]]
        if kind == "W":
            self._held[device] -= 1
        return []

    def _choice(self, device: int) -> tuple[float, Action] | None:
        """Returns the next action of a device, and when it begins; None if nothing is there."""
        clock, own = self._clock[device], self._own[device]
        ready: list[tuple[float, int, Action]] = []
        for place, stage in enumerate(own):
            forwards, backwards = self._done["F"][stage], self._done["I"][stage]
            forward_first = self._preferences.forward_first
            if backwards < min(len(self._gradients[stage]), forwards):
                at = max(clock, self._gradients[stage][backwards])
                ready.append((at, int(forward_first), Action("I", stage, backwards)))
            # each later stage of the device keeps space for a micro-batch, or none would get on
            most = self._preferences.held - (len(own) - 1 - place)
            if forwards < len(self._inputs[stage]) and self._held[device] < most:
                at = max(clock, self._inputs[stage][forwards])
                ready.append((at, int(not forward_first), Action("F", stage, forwards)))
        weights = [
            Action("W", stage, self._done["W"][stage])
            for stage in own
            if self._done["W"][stage] < self._done["I"][stage]
        ]
        # later stages first: more waits for their forwards, and their weights are due first
        best = min(ready, key=lambda one: (one[0], one[1], -one[2].stage), default=None)
        if weights:
            fill = weights[-1]
            fits = self._preferences.fits * self._cost["W"][fill.stage]
            if best is None or best[0] - clock > max(fits, _ROUNDING) - _ROUNDING:
                return clock, fill
        return None if best is None else (best[0], best[2])


def _with_whole_backwards(schedule: Schedule, durations: Durations) -> Schedule:
    """Returns `schedule` with whole backwards where that makes it no longer.

    A backward in two parts costs a little more of the host's time.
    """
    length = durations.length(schedule)
    for stage in range(schedule.stages):
        lanes = tuple(tuple(_joined(lane, stage)) for lane in schedule.lanes)
        joined = Schedule(schedule.name, schedule.stages, schedule.chunks, lanes)
        if durations.length(joined) <= length * (1 + _ROUNDING):
            schedule = joined
    return schedule


def _joined(lane: Sequence[Action], stage: int) -> Iterator[Action]:
    """Yields the actions of a lane, in which an I and its W, one after the other, are a B."""
    held: Action | None = None
    for action in lane:
        if held is not None:
            if action == held._replace(kind="W"):
                yield held._replace(kind="B")
                held = None
                continue
            yield held
            held = None
        if action.kind == "I" and action.stage == stage:
            held = action
        else:
            yield action
    if held is not None:
        yield held
