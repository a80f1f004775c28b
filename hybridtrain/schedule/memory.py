"""The memory of the devices while they run a table, counted in micro-batches.

zb-v, 2 devices, device 0   F0 F1 F2 f0 i0 w0 f1 b1 F3 ...
stage 0 holds                1  2  3  3  3  3  3  3  4
stage 3 holds                0  0  0  1  1  1  1  1  0
the device holds             1  2  3  4  4  4  4  4  4     at most 4, and not 4 + 1

The stages of a device hold their most at different times, so the peak of a device is the peak of
the sum over its stages, and not the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from hybridtrain.schedule.table import Action, Schedule


class Moment(NamedTuple):
    """The micro-batches that a device holds while it runs an action, for each of its stages.

    Attributes:
        stage: the stage that runs.
        inputs: micro-batches that have begun and not finished, in the order of the device's stages.
        activations: those of them whose activations are there; fewer where they are recomputed.
        waiting: those between the two parts of their backward, from the beginning of the first.
    """

    stage: int
    inputs: tuple[int, ...]
    activations: tuple[int, ...]
    waiting: tuple[int, ...]


def fullest_moments(
    schedule: Schedule, recomputed: Set[int] = frozenset(), splits_backward: bool = True
) -> tuple[tuple[Moment, ...], ...]:
    """Returns, for each device, the moments of a step at which it may hold the most bytes.

    Whatever a micro-batch takes in each stage, the peak of the device is at one of them: at every
    other moment it runs the same stage and holds no more of anything.

    Args:
        schedule: the table.
        recomputed: the micro-batches whose activations are recomputed in their backward, which is
            then whole.
        splits_backward: False: all backwards are whole, at the place of their first part.
    """
    return tuple(_fullest_moments_of(lane, recomputed, splits_backward) for lane in schedule.lanes)


def _fullest_moments_of(
    lane: Sequence[Action], recomputed: Set[int], splits_backward: bool
) -> tuple[Moment, ...]:
    place = {stage: i for i, stage in enumerate(sorted({action.stage for action in lane}))}
    inputs, activations, waiting = ([0] * len(place) for _ in range(3))
    fullest: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in place}
    seen: set[tuple[int, ...]] = set()
    for kind, stage, microbatch in lane:
        i, again = place[stage], microbatch in recomputed
        divided = kind in "IW" and splits_backward and not again
        if kind == "W" and not divided:
            continue  # the backward ran at the place of its first part
        inputs[i] += kind == "F"
        activations[i] += again if kind in "BI" else kind == "F" and not again
        waiting[i] += divided and kind == "I"
        held = (stage, *inputs, *activations, *waiting)
        if held not in seen:
            seen.add(held)
            _keep_if_fullest(fullest[stage], held)
        if kind == "W" or (kind in "BI" and not divided):
            inputs[i] -= 1
            activations[i] -= 1
            waiting[i] -= divided
    n = len(place)
    return tuple(
        Moment(held[0], held[1 : n + 1], held[n + 1 : 2 * n + 1], held[2 * n + 1 :])
        for frontier in fullest.values()
        for held in sorted(frontier)
    )


def _keep_if_fullest(frontier: list[tuple[int, ...]], held: tuple[int, ...]) -> None:
    """Adds `held` unless the frontier has as much of everything; removes what has less than it."""
    if any(all(a >= b for a, b in zip(other, held, strict=True)) for other in frontier):
        return
    frontier[:] = [
        other for other in frontier if any(a > b for a, b in zip(other, held, strict=True))
    ]
    frontier.append(held)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most micro-batches whose activations each stage holds at one time."""
    in_flight = [0] * schedule.stages
    peak = [0] * schedule.stages
    for lane in schedule.lanes:
        for action in lane:
            stage = action.stage
            if action.kind == "F":
                in_flight[stage] += 1
                peak[stage] = max(peak[stage], in_flight[stage])
            elif action.ends_microbatch:
                in_flight[stage] -= 1
    return tuple(peak)
