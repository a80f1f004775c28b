"""The built-in schedules, each registered by its name.

1F1B, 4 stages, 6 micro-batches (GPipe: Huang et al., arXiv:1811.06965; 1F1B: Narayanan et al.,
arXiv:2006.09503); time runs to the right, a backward is drawn twice as long as a forward

stage 0  F0 F1 F2 F3 .. .. .. .. .. B0-- F4 B1-- F5 B2-- .. B3-- .. B4-- .. B5--
stage 1     F0 F1 F2 .. .. .. B0-- F3 B1-- F4 B2-- F5 B3-- .. B4-- .. B5--
stage 2        F0 F1 .. B0-- F2 B1-- F3 B2-- F4 B3-- F5 B4-- .. B5--
stage 3           F0 B0-- F1 B1-- F2 B2-- F3 B3-- F4 B4-- F5 B5--

ZB-H1 (Qi et al., arXiv:2401.10241): a backward is split into an I, which the previous stage waits
for, and a W, which fills the time until the next I

stage 0  F0 F1 F2 F3 .. .. .. B0-- F4 B1-- F5 B2-- B3-- B4-- B5--
stage 1     F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
stage 2        F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
stage 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count

from hybridtrain.schedule.registry import schedule
from hybridtrain.schedule.simulation import Durations
from hybridtrain.schedule.table import (
    Action,
    ActionKind,
    Placement,
    Schedule,
    even_parts,
    stages_at,
)

# Times that differ by less are treated as equal.
_ROUNDING = 1e-9


@schedule("1f1b", periodic=True)
def one_forward_one_backward(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns 1F1B: a few warm-up forwards, then backwards and forwards in alternation.

    With one stage per device, stage `s` holds at most `stages - s` micro-batches, however many
    there are. With `v` stages per device (Narayanan et al., arXiv:2104.04473), device `d` has the
    stages `d`, `d + devices`, ... and runs groups of micro-batches through one stage after the
    other. The bubble shrinks by a factor of `v`, from (P-1)/m of the computing time to (P-1)/(v m),
    for about twice the activations.
    """
    v = stages_per_device
    rounds = even_parts(chunks, max(1, chunks // devices))
    lanes = []
    for d, stages_here in enumerate(_stages_of_devices(devices, v)):
        # the warm-up has one more forward for each later device, two if stages are interleaved, and
        # a whole group for each further stage of this device
        later_devices = devices - 1 - d
        warm_up = 1 + (later_devices if v == 1 else 2 * later_devices + (v - 1) * len(rounds[0]))
        forwards = [Action("F", s, i) for group in rounds for s in stages_here for i in group]
        backwards = [
            Action("B", s, i) for group in rounds for s in reversed(stages_here) for i in group
        ]
        lane = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            lane += [backward, *forwards[warm_up + k : warm_up + k + 1]]
        lanes.append(tuple(lane))
    return Schedule("1f1b", devices * v, chunks, tuple(lanes))


@schedule("gpipe", periodic=True)
def gpipe(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns GPipe: all forwards, then all backwards.

    The backwards run in micro-batch order, so gradients are summed in the same order as by gradient
    accumulation in the unsplit model.
    """
    lanes = tuple(
        tuple(Action("F", s, i) for s in stages_here for i in range(chunks))
        + tuple(Action("B", s, i) for s in reversed(stages_here) for i in range(chunks))
        for stages_here in _stages_of_devices(devices, stages_per_device)
    )
    return Schedule("gpipe", devices * stages_per_device, chunks, lanes)


@schedule("zb-h1", stages_per_device=1, splits_backward=True, periodic=True)
def zero_bubble_h1(devices: int, chunks: int) -> Schedule:
    """Returns ZB-H1 (Qi et al., arXiv:2401.10241), drawn at the top of this file.

    1F1B with delayed backwards to the weights: device `d` delays them by `d` micro-batches, so that
    every device holds as many micro-batches as the first device of 1F1B, `devices`. If a forward
    and both parts of a backward take one unit each, the bubble shrinks from 3 (P-1) units to P-1.
    """
    lanes = []
    for d in range(devices):
        warm_up = min(devices - d, chunks)
        lane = [Action("F", d, i) for i in range(warm_up)]
        for k in range(chunks):
            lane.append(Action("I", d, k))
            # A W is delayed by the device's number, so that it fills the wait at the end.
            if k >= d:
                lane.append(Action("W", d, k - d))
            if warm_up + k < chunks:
                lane.append(Action("F", d, warm_up + k))
        lane += [Action("W", d, i) for i in range(max(0, chunks - d), chunks)]
        lanes.append(lane)
    return Schedule("zb-h1", devices, chunks, whole_on_first_stage(lanes))


@schedule("zb-v", placement="v", stages_per_device=2, splits_backward=True, periodic=True)
def zero_bubble_v(devices: int, chunks: int) -> Schedule:
    """Returns ZB-V (Qi et al., arXiv:2405.15362): two stages per device, in V placement.

    Device `d` has the stages `d` and `2 P - 1 - d`, so the last stage is on the first device, which
    can begin its backwards at once. If a forward and both parts of a backward take one unit each
    and there are at least 2 P - 1 micro-batches, no device waits between its first and last action.
    Each device holds at most `2 P` micro-batches of its stages, which are half the size of 1F1B's.
    A backward is not split if no device would wait for it, assuming that each part takes as long as
    a forward; with many micro-batches most are not.
    """
    in_parts = zero_bubble_v_in_parts(devices, chunks)
    return merge_backwards(in_parts, Durations.equal(2 * devices))


def zero_bubble_v_in_parts(devices: int, chunks: int) -> Schedule:
    """Returns ZB-V as published: all backwards except the first stage's are split."""
    lanes = []
    for d in range(devices):
        down, up = stages_at(d, devices, 2, "v")
        lane = _LaneBuilder()
        # Warm-up, in three parts: until the first micro-batch has gone down the V and comes back up
        # to this device,
        lane.add(2 * (devices - d) - 1, ("F", down))
        # until its backward has come from the end of the V to this device's second stage,
        lane.add(d, ("F", up), ("F", down))
        # and until its backward reaches this device's first stage.
        lane.add(devices - d, ("F", up), ("I", up), ("W", up))
        # fewer micro-batches run the same actions with gaps
        whole = max(chunks, 2 * devices - 1)
        both: tuple[tuple[ActionKind, int], ...] = (
            ("I", down),
            ("W", down),
            ("F", up),
            ("I", up),
            ("W", up),
        )
        # Steady: one of each action per micro-batch, so nothing accumulates.
        lane.add(whole - lane.begun("F", down), ("F", down), *both)
        # Cool-down: no micro-batch enters any more. Ws come last, since no stage waits for them.
        lane.add(whole - lane.begun("F", up), *both)
        lane.add(d, ("I", down), ("I", up))
        lane.add(devices - d, ("I", down), ("W", down))
        lane.add(whole - lane.begun("W", up), ("W", up))
        lane.add(whole - lane.begun("W", down), ("W", down))
        lanes.append([action for action in lane.actions if action.microbatch < chunks])
    return Schedule("zb-v", 2 * devices, chunks, whole_on_first_stage(lanes))


class _LaneBuilder:
    """Builds a device's actions; each takes the next micro-batch of its kind and stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[ActionKind, int], count[int]] = {}

    def add(self, times: int, *group: tuple[ActionKind, int]) -> None:
        """Adds a group of actions, given by kind and stage, `times` times."""
        for _ in range(times):
            for kind, stage in group:
                microbatch = next(self._next.setdefault((kind, stage), count()))
                self.actions.append(Action(kind, stage, microbatch))

    def begun(self, kind: ActionKind, stage: int) -> int:
        """Returns the number of micro-batches that actions of this kind have taken."""
        return sum(action[:2] == (kind, stage) for action in self.actions)


@cache
def forward_only(
    devices: int, chunks: int, stages_per_device: int = 1, placement: Placement = "loop"
) -> Schedule:
    """Returns a schedule without backwards, for evaluation."""
    lanes = tuple(
        tuple(
            Action("F", s, i)
            # In groups of about as many micro-batches as devices: when a device has run a group,
            # its next stage can begin with the first of them.
            for group in even_parts(chunks, max(1, chunks // devices))
            for s in stages_at(device, devices, stages_per_device, placement)
            for i in group
        )
        for device in range(devices)
    )
    return Schedule("forward_only", devices * stages_per_device, chunks, lanes)


def _stages_of_devices(devices: int, stages_per_device: int) -> list[list[int]]:
    return [stages_at(device, devices, stages_per_device) for device in range(devices)]


def whole_on_first_stage(lanes: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Returns `lanes` with whole backwards on stage 0, which sends no gradient."""
    return tuple(
        tuple(
            action._replace(kind="B") if action[:2] == ("W", 0) else action
            for action in lane
            if action[:2] != ("I", 0)
        )
        for lane in lanes
    )


def merge_backwards(table: Schedule, durations: Durations) -> Schedule:
    """Returns `table` with each I and directly following W merged, if no action is delayed.

    This holds if the previous stage begins its own backward no sooner than the whole one ends, so
    that for these durations no action comes later. A split backward takes longer than a whole one:
    it walks the graph, calls each node with weights separately, and reads shared values twice.
    """
    spans = durations.spans(table)
    begins = {
        (action.stage, action.microbatch): start
        for lane in spans
        for action, start, _ in lane
        if action.kind in "BI"
    }
    lanes = []
    for device_spans in spans:
        lane: list[Action] = []
        for action, _, _ in device_spans:
            stage, microbatch = action.stage, action.microbatch
            # Only pairs without another action between them: merging others would move one.
            if action.kind == "W" and lane[-1:] == [action._replace(kind="I")]:
                end = begins[stage, microbatch] + durations.backward[stage]
                if stage:
                    end += durations.transfer[stage - 1]
                # The stage before does not wait for the first part, so a whole backward delays
                # nobody.
                if not stage or begins[stage - 1, microbatch] >= end - _ROUNDING:
                    lane[-1] = action._replace(kind="B")
                    continue
            lane.append(action)
        lanes.append(tuple(lane))
    return Schedule(table.name, table.stages, table.chunks, tuple(lanes))
