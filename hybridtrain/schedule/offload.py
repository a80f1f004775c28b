"""When the activations of a micro-batch leave their device, and when they come back.

    actions      F0     F1     F2     F3     B0     F4     B1     F5       stage 0 of 1F1B
    on device    0      1      2      0 3    0      1 4    1      2 5      instead of 0 1 2 3 in F3
    copies          0>     1>     2> <0  3>     <1     4>     <2     5>

A device's list of actions says when a micro-batch is used again, so nothing is guessed: activations
come back one action before they are used, and leave unless that is the next action but one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from hybridtrain.schedule.table import Action, Schedule, backward_only

AHEAD = 1
"""How many actions before their use activations begin to come back."""

# A stage and a micro-batch.
Held = tuple[int, int]


class Copies(NamedTuple):
    """The activations that a device copies around an action, each by stage and micro-batch.

    Attributes:
        back: those that begin to come back before it.
        away: those that begin to leave after it; None if they stay or are used up.
    """

    back: tuple[Held, ...]
    away: Held | None


@cache
def offload_copies(schedule: Schedule) -> Mapping[Action, Copies]:
    """Returns the copies around each action.

    The backwards of a schedule of forwards are those of `backward_only`.
    """
    follows = backward_only(schedule).lanes if not schedule.trains else [()] * len(schedule.lanes)
    copies: dict[Action, Copies] = {}
    for lane, later in zip(schedule.lanes, follows, strict=True):
        of_lane = _copies_of([*lane, *later])
        copies |= {action: of_lane[action] for action in lane}
    return copies


def _copies_of(lane: Sequence[Action]) -> dict[Action, Copies]:
    uses: dict[Held, list[int]] = defaultdict(list)
    for number, action in enumerate(lane):
        if action.kind != "F":
            uses[action[1:]].append(number)
    made_before = lane[0].kind != "F" and all(action.kind != "F" for action in lane)
    away = set(uses) if made_before else set()
    copies: dict[Action, Copies] = {}
    for number, action in enumerate(lane):
        soon = dict.fromkeys(other[1:] for other in lane[number : number + 1 + AHEAD])
        back = tuple(held for held in soon if held in away)
        away.difference_update(back)
        held = action[1:]
        later = [use for use in uses[held] if use > number]
        leaves = bool(later) and later[0] > number + 1 + AHEAD
        if leaves:
            away.add(held)
        copies[action] = Copies(back, held if leaves else None)
    return copies


def offloads_anything(schedule: Schedule) -> bool:
    """Returns whether any activations would leave a device."""
    return any(copies.away is not None for copies in offload_copies(schedule).values())
