"""The table of a schedule: actions by device, and the proof that an engine can execute it.

The stages are placed on the devices of a pipeline in one of two ways:

loop    device 0: stages 0, P, ...      the stages go round the devices
v       device 0: stages 0 and 2P-1     the second half comes back, so that the first device
                                        has the last stage as well
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from hybridtrain.errors import ScheduleError

ActionKind = Literal["F", "B", "I", "W"]

WORDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the input",
    "W": "backward to the weights",
}
"""The kinds of actions in words."""

# What an action makes: activations, the gradient of the stage's input, those of its weights.
_MAKES = {"F": "F", "B": "IW", "I": "I", "W": "W"}


class Action(NamedTuple):
    """The forward (`F`) or backward (`B`) of one micro-batch on one stage.

    A backward may be in two actions: `I` computes the gradient of the stage's input, which the
    stage before waits for, and `W` later those of its weights, for which nobody waits.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"

    @property
    def ends_microbatch(self) -> bool:
        """True if it computes the gradients of the weights: the activations are not needed more."""
        return "W" in _MAKES[self.kind]


@dataclass(frozen=True)
class Schedule:
    """The actions of each device, in order: `lanes[d]` are those of device `d`."""

    name: str
    stages: int
    chunks: int
    lanes: tuple[tuple[Action, ...], ...]

    @cached_property
    def trains(self) -> bool:
        """True if it has backwards."""
        return any(action.kind != "F" for action in self.lanes[0])

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """The device of each stage."""
        return {action.stage: device for device, lane in enumerate(self.lanes) for action in lane}

    @cached_property
    def digest(self) -> str:
        """A few letters that differ for other actions, or another order of them."""
        text = "\n".join(" ".join(map(str, lane)) for lane in self.lanes)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def in_one_order(self) -> tuple[tuple[int, Action], ...]:
        """The device and the action of each, after all that it needs; the devices take turns.

        Raises:
            ScheduleError: the actions wait for one another in a circle; names them.
        """
        order: list[tuple[int, Action]] = []
        made: set[Need] = set()
        left = list(map(deque, self.lanes))
        moved = True
        while moved:
            moved = False
            for device, lane in enumerate(left):
                if lane and made.issuperset(needs_of(lane[0], self.stages)):
                    order.append((device, lane[0]))
                    made.update(made_by(lane.popleft()))
                    moved = True
        if any(left):
            raise ScheduleError(
                f"{self.name}: deadlock; waiting in a cycle: "
                f"{'; '.join(_cycle(left, made, self.stages))}"
            )
        return tuple(order)


class Span(NamedTuple):
    """The time of an action, measured or simulated; the unit is the caller's."""

    action: Action
    start: float
    end: float


Spans = Sequence[Sequence[Span]]
"""The spans of one step: a sequence per device."""

Need = tuple[str, int, int]
"""Something made for a micro-batch: `F`, `I` or `W` of a stage and a micro-batch."""


def made_by(action: Action) -> list[Need]:
    """Returns what `action` makes."""
    return [(one, action.stage, action.microbatch) for one in _MAKES[action.kind]]


def receiver_of(action: Action, stages: int) -> Action | None:
    """Returns what waits for what `action` sends, `B` for any backward; None: it sends nothing."""
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage + 1, microbatch) if stage + 1 < stages else None
    return Action("B", stage - 1, microbatch) if kind != "W" and stage > 0 else None


def needs_of(action: Action, stages: int) -> list[Need]:
    """Returns what must be there before `action` can run."""
    kind, stage, microbatch = action
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    if kind == "W":
        return [("I", stage, microbatch)]
    needs: list[Need] = [("F", stage, microbatch)]
    if stage + 1 < stages:
        needs.append(("I", stage + 1, microbatch))
    return needs


def _cycle(left: Sequence[Sequence[Action]], made: Set[Need], stages: int) -> list[str]:
    """Returns the waits of a cycle of devices, each for an action that the next device runs later.

    Args:
        left: by device, the actions that have not run.
        made: what the others have made.
        stages: how many.
    """
    maker = {
        need: (device, action)
        for device, lane in enumerate(left)
        for action in lane
        for need in made_by(action)
    }
    device = next(device for device, lane in enumerate(left) if lane)
    waits: dict[int, str] = {}
    while device not in waits:
        action = left[device][0]
        missing = [need for need in needs_of(action, stages) if need not in made]
        if missing[0] not in maker:
            return [f"device {device}: {action} needs {Action(*missing[0])}, which never runs"]  # type: ignore[arg-type]
        other, needed = maker[missing[0]]
        waits[device] = f"device {device}: {action} needs {needed}, which is after "
        waits[device] += f"{left[other][0]} on device {other}"
        device = other
    return list(waits.values())[list(waits).index(device) :]


def validate(schedule: Schedule) -> None:
    """Proves that an engine can execute `schedule`: complete, in order, free of deadlock.

    In order means that each stage takes the micro-batches first to last, forward and backward:
    the engine's links are queues, and gradients must be added up as in the unsplit model.

    Raises:
        ScheduleError: names the rule and the first action that breaks it.
    """
    seen: dict[tuple[str, int], int] = {}
    device_of: dict[int, int] = {}
    for device, lane in enumerate(schedule.lanes):
        for action in lane:
            kind, stage, microbatch = action
            if kind not in _MAKES:
                raise ScheduleError(
                    f"{schedule.name}: {action} is not a forward (F), a backward (B), or a part of "
                    f"one (I, W)"
                )
            if not (0 <= stage < schedule.stages and 0 <= microbatch < schedule.chunks):
                raise ScheduleError(f"{schedule.name}: {action}: no such stage or micro-batch")
            if device_of.setdefault(stage, device) != device:
                raise ScheduleError(f"{schedule.name}: stage {stage} is on two devices")
            for made, _, _ in made_by(action):
                if seen.get((made, stage), 0) != microbatch:
                    raise ScheduleError(
                        f"{schedule.name}: {action} is out of order; stage {stage} must take each "
                        f"micro-batch once, first to last"
                    )
                seen[made, stage] = microbatch + 1
    for stage in range(schedule.stages):
        for made, word in (("F", "an F"), ("I", "a B or I"), ("W", "a B or W")):
            if seen.get((made, stage), 0) != schedule.chunks:
                raise ScheduleError(f"{schedule.name}: stage {stage} lacks {word}")
    _ = schedule.in_one_order


def divided_backwards(schedule: Schedule) -> tuple[int, ...]:
    """Returns how many backwards of each stage are in two parts."""
    divided = [0] * schedule.stages
    for lane in schedule.lanes:
        for kind, stage, _ in lane:
            divided[stage] += kind == "I"
    return tuple(divided)


Placement = Literal["loop", "v"]


def place_of(stage: int, devices: int, placement: Placement = "loop") -> int:
    """Returns the number of the device, among those of the pipeline, that runs `stage`."""
    turn, place = divmod(stage, devices)
    return devices - 1 - place if placement == "v" and turn % 2 else place


def stages_at(
    device: int, devices: int, stages_per_device: int, placement: Placement = "loop"
) -> list[int]:
    """Returns the stages of a device, first to last."""
    stages = range(devices * stages_per_device)
    return [stage for stage in stages if place_of(stage, devices, placement) == device]


def even_parts(number: int, parts: int) -> list[range]:
    """Returns the numbers below `number` in `parts` ranges, the longer ones first."""
    small, longer = divmod(number, parts)
    starts = [part * small + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
