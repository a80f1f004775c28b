"""The table of a schedule: the actions of each device, and the check that an engine can execute it.

There are two placements of stages on the devices of a pipeline:

loop    device 0: stages 0, P, ...      round robin over the devices
v       device 0: stages 0 and 2P-1     the second half runs backwards, so the first device
                                        has the last stage as well
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
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
"""The kinds of actions, in words."""

# The products of an action: activations, the gradient of the stage's input, the gradients of its
# weights.
_MAKES = {"F": "F", "B": "IW", "I": "I", "W": "W"}


class Action(NamedTuple):
    """The forward (`F`) or backward (`B`) of one micro-batch on one stage.

    A backward may be split into two actions: `I` computes the gradient of the stage's input, which
    the previous stage waits for, and `W` later computes the gradients of its weights, which no
    stage waits for.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"

    @property
    def ends_microbatch(self) -> bool:
        """True if it computes weight gradients, after which the activations can be freed."""
        return "W" in _MAKES[self.kind]


@dataclass(frozen=True)
class Schedule:
    """The actions of each device, in order: `lanes[d]` is the list of device `d`."""

    name: str
    stages: int
    chunks: int
    lanes: tuple[tuple[Action, ...], ...]

    @cached_property
    def trains(self) -> bool:
        """True if it has backwards."""
        return any(action.kind != "F" for action in self.lanes[0])

    @cached_property
    def made_before(self) -> frozenset[Need]:
        """What an earlier schedule has made: all forwards, if this one has none."""
        # Lane 0 speaks for all: a table has forwards on each device, or on none.
        if any(action.kind == "F" for action in self.lanes[0]):
            return frozenset()
        return frozenset(("F", s, i) for s in range(self.stages) for i in range(self.chunks))

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """The device of each stage."""
        return {action.stage: device for device, lane in enumerate(self.lanes) for action in lane}

    @cached_property
    def digest(self) -> str:
        """A short hash of the actions and their order."""
        text = "\n".join(" ".join(map(str, lane)) for lane in self.lanes)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @cached_property
    def in_one_order(self) -> tuple[tuple[int, Action], ...]:
        """All (device, action) pairs in an order that satisfies all dependencies.

        Raises:
            ScheduleError: the actions wait for one another in a circle; names them.
        """
        order: list[tuple[int, Action]] = []
        made: set[Need] = set(self.made_before)
        left = list(map(deque, self.lanes))
        moved = True
        while moved:
            moved = False
            # One action per device and round, in the order of the devices: all processes compute
            # the same order from the same table, which `message_wire` relies on.
            for device, lane in enumerate(left):
                # Greedy is enough: an action that can run now can run at any later time too, so no
                # choice can lead into a deadlock that another avoids.
                if lane and made.issuperset(needs_of(lane[0], self.stages)):
                    order.append((device, lane[0]))
                    made.update(made_by(lane.popleft()))
                    moved = True
        # Each device waits for one that waits as well, so following the waits leads into a cycle.
        if any(left):
            raise ScheduleError(
                f"{self.name}: deadlock; waiting in a cycle: "
                f"{'; '.join(_cycle(left, made, self.stages))}"
            )
        return tuple(order)

    @cached_property
    def furthest_ahead(self) -> tuple[tuple[int, Action], ...]:
        """All (device, action) pairs, one at a time, each stage as far ahead as it may be.

        The next action is the one with the earliest stage among those whose dependencies are done.
        """
        order: list[tuple[int, Action]] = []
        made: set[Need] = set(self.made_before)
        left = list(map(deque, self.lanes))
        while any(left):
            ready = [
                (lane[0].stage, device)
                for device, lane in enumerate(left)
                if lane and made.issuperset(needs_of(lane[0], self.stages))
            ]
            if not ready:
                return self.in_one_order  # which raises an error that names the cycle
            # The earliest stage first: it runs ahead until the table makes it wait.
            _, device = min(ready)
            order.append((device, left[device][0]))
            made.update(made_by(left[device].popleft()))
        return tuple(order)


class Span(NamedTuple):
    """The span of an action, measured or simulated, in the caller's unit."""

    action: Action
    start: float
    end: float


Spans = Sequence[Sequence[Span]]
"""The spans of one step: one sequence per device."""


class CopySpan(NamedTuple):
    """The span of a copy of the activations of a micro-batch between a device and the host.

    Attributes:
        stage: their stage.
        microbatch: their micro-batch.
        back: True from the host to the device, False to the host.
        start, end: in the caller's unit.
    """

    stage: int
    microbatch: int
    back: bool
    start: float
    end: float


class SpansWithCopies(tuple[tuple[Span, ...], ...]):
    """The spans of a step whose activations wait in the host's memory.

    Attributes:
        copies: the spans of the copies, one sequence per device.
    """

    copies: tuple[tuple[CopySpan, ...], ...]

    @classmethod
    def of(cls, spans: Spans, copies: Sequence[Sequence[CopySpan]]) -> SpansWithCopies:
        """Returns spans with those of their copies."""
        both = cls(map(tuple, spans))
        both.copies = tuple(map(tuple, copies))
        return both


def copies_of(spans: Spans) -> tuple[tuple[CopySpan, ...], ...]:
    """Returns the spans of the copies of each device; empty if there are none."""
    copies = spans.copies if isinstance(spans, SpansWithCopies) else ()
    return copies if any(copies) else ()


Need = tuple[str, int, int]
"""The product of an action: `F`, `I` or `W`, for a stage and a micro-batch."""


def made_by(action: Action) -> list[Need]:
    """Returns the products of `action`."""
    return [(product, action.stage, action.microbatch) for product in _MAKES[action.kind]]


def receiver_of(action: Action, stages: int) -> Action | None:
    """Returns the action that receives the message of `action` (`B` for any backward), or None."""
    kind, stage, microbatch = action
    if kind == "F":
        # Stages are linked by number, whichever devices they are on.
        return Action("F", stage + 1, microbatch) if stage + 1 < stages else None
    return Action("B", stage - 1, microbatch) if kind != "W" and stage > 0 else None


def needs_of(action: Action, stages: int) -> list[Need]:
    """Returns the products that `action` depends on."""
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
    """Describes a cycle of devices in which each waits for a later action of the next.

    Args:
        left: by device, the actions that have not run.
        made: the products of the actions that have run.
        stages: the number of stages.
    """
    maker = {
        need: (device, action)
        for device, lane in enumerate(left)
        for action in lane
        for need in made_by(action)
    }
    device = next(device for device, lane in enumerate(left) if lane)
    waits: dict[int, str] = {}
    # The walk enters the cycle after at most one pass over the devices, since each has exactly one
    # wait.
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
    """Proves that an engine can execute `schedule`: complete, in order and free of deadlock.

    In order means that each stage runs the micro-batches first to last, forward and backward:
    messages between stages are queued, and gradients must be summed as in the unsplit model.

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
                raise ScheduleError(
                    f"{schedule.name}: {action} has an invalid stage or micro-batch"
                )
            if device_of.setdefault(stage, device) != device:
                raise ScheduleError(f"{schedule.name}: stage {stage} is on two devices")
            for made, _, _ in made_by(action):
                # One comparison for order, gaps and repetitions.
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
    # Raises for a deadlock; the order itself is cached for the engines.
    _ = schedule.in_one_order


@cache
def backward_only(forwards: Schedule) -> Schedule:
    """Returns the backwards of micro-batches whose forwards have run in `forwards`.

    Each device takes them micro-batch by micro-batch, from its last stage to its first.
    """
    lanes = tuple(
        tuple(
            Action("B", stage, microbatch)
            for microbatch in range(forwards.chunks)
            for stage in sorted({action.stage for action in lane}, reverse=True)
        )
        for lane in forwards.lanes
    )
    return Schedule("backwards", forwards.stages, forwards.chunks, lanes)


def divided_backwards(schedule: Schedule) -> tuple[int, ...]:
    """Returns the number of split backwards of each stage."""
    divided = [0] * schedule.stages
    for lane in schedule.lanes:
        for kind, stage, _ in lane:
            divided[stage] += kind == "I"
    return tuple(divided)


Placement = Literal["loop", "v"]


def place_of(stage: int, devices: int, placement: Placement = "loop") -> int:
    """Returns the index of the pipeline device that runs `stage`."""
    turn, place = divmod(stage, devices)
    return devices - 1 - place if placement == "v" and turn % 2 else place


def stages_at(
    device: int, devices: int, stages_per_device: int, placement: Placement = "loop"
) -> list[int]:
    """Returns the stages of a device, first to last."""
    stages = range(devices * stages_per_device)
    return [stage for stage in stages if place_of(stage, devices, placement) == device]


def even_parts(number: int, parts: int) -> list[range]:
    """Splits `range(number)` into `parts` contiguous ranges, longer ones first."""
    small, longer = divmod(number, parts)
    starts = [part * small + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
