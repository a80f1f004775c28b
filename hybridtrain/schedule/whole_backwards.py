"""Whole backwards in place of two parts that gain nothing.

A backward in two parts takes longer than a whole one: its graph is walked, each node with weights
is called by itself, and what both parts read is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrain.schedule.durations import ROUNDING, Durations
from hybridtrain.schedule.table import Action, Schedule


def whole_on_first_stage(lanes: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Returns `lanes` with whole backwards on stage 0, which sends no gradient to anybody."""
    return tuple(
        tuple(
            action._replace(kind="B") if action[:2] == ("W", 0) else action
            for action in lane
            if action[:2] != ("I", 0)
        )
        for lane in lanes
    )


def merge_backwards(schedule: Schedule, durations: Durations) -> Schedule:
    """Returns `schedule` with one backward for each I with its W right after it, if none waits.

    That is where the stage before begins its own backward no sooner than the whole one ends. So for
    these durations no action comes later than before.
    """
    spans = durations.spans(schedule)
    begins = {
        (action.stage, action.microbatch): start
        for lane in spans
        for action, start, _ in lane
        if action.kind in "BI"
    }
    lanes = []
    for own in spans:
        lane: list[Action] = []
        for action, _, _ in own:
            stage, microbatch = action.stage, action.microbatch
            if action.kind == "W" and lane[-1:] == [action._replace(kind="I")]:
                end = begins[stage, microbatch] + durations.backward[stage]
                if stage:
                    end += durations.transfer[stage - 1]
                if not stage or begins[stage - 1, microbatch] >= end - ROUNDING:
                    lane[-1] = action._replace(kind="B")
                    continue
            lane.append(action)
        lanes.append(tuple(lane))
    return Schedule(schedule.name, schedule.stages, schedule.chunks, tuple(lanes))
