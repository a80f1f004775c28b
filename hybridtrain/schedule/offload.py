"""When the activations of a micro-batch leave their device, and when they come back.

    actions      F0     F1     F2     F3     B0     F4     B1     F5       stage 0 of 1F1B
    on device    0      1      2      0 3    0      1 4    1      2 5      instead of 0 1 2 3 in F3
    copies          0>     1>     2> <0  3>     <1     4>     <2     5>

A device's list of actions says when a micro-batch is used again, so nothing is guessed: activations
come back one action before their use. They leave if they are then away for at least one action, and
only where this lowers the most that the device holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from hybridtrain.schedule.table import Action, Schedule, backward_only

_AHEAD = 1  # actions before their use at which activations begin to come back

# A stage and a micro-batch.
Held = tuple[int, int]

Offloading = Literal["instant", "overlapped"]
"""How long a copy to the host takes: no time, as on a CPU, or until the next action has ended.

Until then, what is copied is on the device, too.
"""


def offloading_on(device_type: str) -> Offloading:
    """Returns how long copies to the host take."""
    return "instant" if device_type == "cpu" else "overlapped"


class Copies(NamedTuple):
    """The activations that a device copies around an action, each by stage and micro-batch.

    Attributes:
        back: those that begin to come back before it.
        away: those that begin to leave after it; None if they stay or are used up.
    """

    back: tuple[Held, ...] = ()
    away: Held | None = None


@cache
def offload_copies(schedule: Schedule, offloading: Offloading) -> Mapping[Action, Copies]:
    """Returns the copies around each action.

    The backwards of a schedule of forwards are those of `backward_only`.
    """
    follows = [()] * len(schedule.lanes) if schedule.trains else backward_only(schedule).lanes
    copies: dict[Action, Copies] = {}
    for lane, later in zip(schedule.lanes, follows, strict=True):
        # The backwards of a later schedule count too: it uses the activations of forwards alone.
        actions = [*lane, *later]
        of_lane = _copies_of(actions, offloading, bool(schedule.made_before))
        most = _most_held(actions, of_lane, offloading)
        # All or nothing per device: copies that do not lower the peak only cost time.
        if not schedule.made_before and most == _most_held(actions, {}, offloading):
            of_lane = {}
        copies |= {action: of_lane.get(action, Copies()) for action in lane}
    return copies


def _copies_of(
    lane: Sequence[Action], offloading: Offloading, made_before: bool
) -> dict[Action, Copies]:
    """Returns the copies around the actions of a device.

    Args:
        lane: the actions.
        offloading: how long copies take.
        made_before: whether the forwards have run, so that activations may be away.
    """
    uses: dict[Held, list[int]] = defaultdict(list)
    for number, action in enumerate(lane):
        if action.kind != "F":
            uses[action[1:]].append(number)
    away = set(uses) if made_before else set()
    copies: dict[Action, Copies] = {}
    for number, action in enumerate(lane):
        # This action and the next: what comes back for the first action of a lane has no earlier
        # one.
        soon = dict.fromkeys(other[1:] for other in lane[number : number + 1 + _AHEAD])
        back = tuple(held for held in soon if held in away)
        away.difference_update(back)
        held, left = action[1:], number + 1 + (offloading == "overlapped")
        use = next((use for use in uses[held] if use > number), 0)
        # Gone after `left`, wanted at `use - _AHEAD`: between them at least one action must run.
        is_away_for_long = use - _AHEAD > left
        if is_away_for_long:
            away.add(held)
        copies[action] = Copies(back, held if is_away_for_long else None)
    return copies


def _most_held(
    lane: Sequence[Action], copies: Mapping[Action, Copies], offloading: Offloading
) -> int:
    """Returns the most micro-batches, over its stages, with activations on a device."""
    on_device: set[Held] = set()
    leaving: set[Held] = set()
    most = 0
    for action in lane:
        back, away = copies.get(action, Copies())
        on_device |= {*back, action[1:]}
        most = max(most, len(on_device))
        on_device -= leaving
        leaving = set() if away is None else {away}
        if offloading == "instant":
            on_device -= leaving
        if action.ends_microbatch:
            on_device.discard(action[1:])
    return most


def offloads_anything(schedule: Schedule, offloading: Offloading) -> bool:
    """Returns whether any activations would leave a device."""
    return any(copies.away for copies in offload_copies(schedule, offloading).values())
