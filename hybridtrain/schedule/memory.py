"""The memory of the devices while they run a schedule, counted in micro-batches.

zb-v, 2 devices, device 0   F0 F1 F2 f0 i0 w0 f1 b1 F3 ...
stage 0 holds                1  2  3  3  3  3  3  3  4
stage 3 holds                0  0  0  1  1  1  1  1  0
the device holds             1  2  3  4  4  4  4  4  4     at most 4, and not 4 + 1

The stages of a device peak at different times, so a device's peak is the peak of the sum over its
stages, not the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from hybridtrain.schedule.offload import Held, Offloading, offload_copies
from hybridtrain.schedule.table import Action, Schedule


class Moment(NamedTuple):
    """The micro-batches that a device holds while it runs an action, for each of its stages.

    Attributes:
        stage: the running stage.
        recomputes: 1 if it runs a micro-batch whose layers are recomputed, otherwise 0.
        inputs: the number of micro-batches begun and not finished, for each of the device's stages.
        activations: the number of those whose layers are not recomputed.
        waiting: the number of those between the two parts of their backward, counted from the start
            of the first part.
        on_device: the number of micro-batches begun and not finished with activations on the
            device; fewer than `inputs` if activations are offloaded.
    """

    stage: int
    recomputes: int
    inputs: tuple[int, ...]
    activations: tuple[int, ...]
    waiting: tuple[int, ...]
    on_device: tuple[int, ...]


def fullest_moments(
    schedule: Schedule,
    recomputed: Set[int] = frozenset(),
    splits_backward: bool = True,
    offloading: Offloading | None = None,
) -> tuple[tuple[Moment, ...], ...]:
    """Returns, for each device, the moments of a step at which its memory may peak.

    For any memory per micro-batch and stage, the device's peak is at one of these moments: at every
    other moment the device runs the same stage and holds no more of anything.

    Args:
        schedule: the schedule.
        recomputed: the micro-batches whose layers are recomputed in their backward, one after the
            other; it is then not split.
        splits_backward: False to run all backwards whole, at the position of their first part.
        offloading: how activations leave the device, see `offload_copies`; None: they stay.
    """
    return tuple(
        _fullest_moments_of(schedule, lane, recomputed, splits_backward, offloading)
        for lane in schedule.lanes
    )


def _fullest_moments_of(
    schedule: Schedule,
    lane: Sequence[Action],
    recomputed: Set[int],
    splits_backward: bool,
    offloading: Offloading | None,
) -> tuple[Moment, ...]:
    place = {stage: i for i, stage in enumerate(sorted({action.stage for action in lane}))}
    inputs, activations, waiting = ([0] * len(place) for _ in range(3))
    copies = offload_copies(schedule, offloading) if offloading is not None else {}
    on_device: set[Held] = set()
    finished: set[Held] = set()
    leaving: set[Held] = set()  # until the present action has ended
    fullest: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in place}
    seen: set[tuple[int, ...]] = set()
    for action in lane:
        kind, stage, microbatch = action
        i, is_recomputed = place[stage], microbatch in recomputed
        divided = kind in "IW" and splits_backward and not is_recomputed
        if copies:
            # Back before the action, since the copy begins then and takes its memory.
            on_device.update(held for held in copies[action].back if held not in finished)
        if kind == "W" and not divided:
            continue  # the backward ran at the position of its first part
        inputs[i] += kind == "F"
        activations[i] += kind == "F" and not is_recomputed
        waiting[i] += divided and kind == "I"
        if kind == "F":
            on_device.add((stage, microbatch))
        counts = [0] * len(place)
        for other, _ in on_device:
            counts[place[other]] += 1
        held = (stage, int(is_recomputed), *inputs, *activations, *waiting, *counts)
        # A long schedule repeats its moments; only new ones are compared.
        if held not in seen:
            seen.add(held)
            _keep_if_fullest(fullest[stage], held)
        if kind == "W" or (kind in "BI" and not divided):
            inputs[i] -= 1
            activations[i] -= not is_recomputed
            waiting[i] -= divided
            finished.add((stage, microbatch))
        # What left after the action before is gone only now: its copy ran beside this action.
        on_device -= leaving | finished
        away = copies[action].away if copies else None
        leaving = set() if away is None else {away}
        if offloading == "instant":
            on_device -= leaving
    n = len(place)
    return tuple(
        Moment(held[0], held[1], *(held[k * n + 2 : (k + 1) * n + 2] for k in range(4)))
        for frontier in fullest.values()
        for held in sorted(frontier)
    )


def _keep_if_fullest(frontier: list[tuple[int, ...]], held: tuple[int, ...]) -> None:
    """Adds `held` unless an entry dominates it; removes entries that it dominates."""
    # In every count at least as full: for any sizes of them, this moment is no peak.
    if any(all(a >= b for a, b in zip(other, held, strict=True)) for other in frontier):
        return
    frontier[:] = [
        other for other in frontier if any(a > b for a, b in zip(other, held, strict=True))
    ]
    frontier.append(held)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Returns the maximum number of micro-batches with stored activations, for each stage."""
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
