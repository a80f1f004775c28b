"""List scheduling: time goes on from action to action, and each device takes one that can begin.

The device that can begin first takes the best of the actions whose inputs are there. Which that is,
depends on a few preferences.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridtrain.schedule.durations import ROUNDING, Durations
from hybridtrain.schedule.table import Action, Schedule

_Choice = tuple[float, Action]
"""An action and when it can begin."""


@dataclass(frozen=True)
class Preferences:
    """The preferences of a device.

    Attributes:
        held: micro-batches that it holds at most.
        fits: the part of an action that a gap must be long enough for, to be filled with it: of a
            backward to the weights, and with a guide of any.
        forward_first: take a forward before a backward if both can begin.
        guide: the places of the actions in another schedule. The device takes them in that order,
            but one that could begin while it waits for another; None: what can begin first.
    """

    held: int
    fits: float
    forward_first: bool = False
    guide: Mapping[Action, int] | None = None


def places_in(schedule: Schedule) -> dict[Action, int]:
    """Returns the place of each action in its lane, of a whole backward as that of both parts."""
    places: dict[Action, int] = {}
    for lane in schedule.lanes:
        for place, action in enumerate(lane):
            places[action] = place
            if action.kind == "B":
                places[action._replace(kind="I")] = places[action._replace(kind="W")] = place
    return places


class Stuck(Exception):
    """No device can go on without holding more than it may."""


class ListScheduling:
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
        preferences: Preferences,
    ) -> None:
        self._own = own
        self._chunks = chunks
        self._preferences = preferences
        self._transfer = times.transfer
        stages = len(times.forward)
        self._cost = times.of_actions
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
            raise Stuck
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

    def _choice(self, device: int) -> _Choice | None:
        """Returns the next action of a device, and when it begins; None if nothing is there."""
        ready, weights = self._ready(device), self._weights(device)
        guide = self._preferences.guide
        if guide is not None:
            return self._guided(ready + weights, guide)
        return self._first(self._clock[device], ready, weights)

    def _ready(self, device: int) -> list[_Choice]:
        """Returns the forwards and backwards to the input whose inputs have come or will come."""
        clock, own = self._clock[device], self._own[device]
        ready: list[_Choice] = []
        for place, stage in enumerate(own):
            forwards, backwards = self._done["F"][stage], self._done["I"][stage]
            if backwards < min(len(self._gradients[stage]), forwards):
                at = max(clock, self._gradients[stage][backwards])
                ready.append((at, Action("I", stage, backwards)))
            # each later stage of the device keeps space for a micro-batch, or none would get on
            most = self._preferences.held - (len(own) - 1 - place)
            if forwards < len(self._inputs[stage]) and self._held[device] < most:
                at = max(clock, self._inputs[stage][forwards])
                ready.append((at, Action("F", stage, forwards)))
        return ready

    def _weights(self, device: int) -> list[_Choice]:
        """Returns the backwards to the weights that wait, by stage."""
        return [
            (self._clock[device], Action("W", stage, self._done["W"][stage]))
            for stage in self._own[device]
            if self._done["W"][stage] < self._done["I"][stage]
        ]

    def _first(
        self, clock: float, ready: Sequence[_Choice], weights: Sequence[_Choice]
    ) -> _Choice | None:
        """Returns what can begin first, or weights that fill the time until then."""
        kind = "F" if self._preferences.forward_first else "I"
        # later stages first: more waits for their forwards, and their weights are due first
        best = min(
            ready,
            key=lambda one: (one[0], one[1].kind != kind, -one[1].stage),
            default=None,
        )
        if weights:
            fill = weights[-1]
            if best is None or not self._delays(fill[1], best[0] - clock):
                return fill
        return best

    def _guided(self, choices: Sequence[_Choice], guide: Mapping[Action, int]) -> _Choice | None:
        """Returns what the guide has first, or the next that fills the time until it begins."""
        in_order = sorted(choices, key=lambda one: guide[one[1]])
        for at, action in in_order:
            if not self._delays(action, in_order[0][0] - at):
                return at, action
        return in_order[0] if in_order else None

    def _delays(self, action: Action, gap: float) -> bool:
        """Returns whether `action` is too long to be put into a gap of so much time."""
        fits = self._preferences.fits * self._cost[action.kind][action.stage]
        return gap <= max(fits, ROUNDING) - ROUNDING
