"""The schedules that come with the package, each registered by its name.

1F1B, 4 stages, 6 micro-batches (GPipe: Huang et al., arXiv:1811.06965; 1F1B: Narayanan et al.,
arXiv:2006.09503); time runs to the right, a backward is drawn twice as long as a forward

stage 0  F0 F1 F2 F3 .. .. .. .. .. B0-- F4 B1-- F5 B2-- .. B3-- .. B4-- .. B5--
stage 1     F0 F1 F2 .. .. .. B0-- F3 B1-- F4 B2-- F5 B3-- .. B4-- .. B5--
stage 2        F0 F1 .. B0-- F2 B1-- F3 B2-- F4 B3-- F5 B4-- .. B5--
stage 3           F0 B0-- F1 B1-- F2 B2-- F3 B3-- F4 B4-- F5 B5--

ZB-H1 (Qi et al., arXiv:2401.10241): a backward is an I, which the stage before waits for, and
a W, which fills the time until the next I comes

stage 0  F0 F1 F2 F3 .. .. .. B0-- F4 B1-- F5 B2-- B3-- B4-- B5--
stage 1     F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
stage 2        F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
stage 3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
"""

from __future__ import annotations

from collections.abc import Sequence
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

# Two times that differ by less are the same.
_ROUNDING = 1e-9


@schedule("1f1b", periodic=True)
def one_forward_one_backward(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns a schedule of a few forwards, then a backward and a forward in turn.

    With one stage per device, stage `s` holds at most `stages - s` micro-batches, whatever their
    number. With `v` stages per device (Narayanan et al., arXiv:2104.04473) device `d` has the
    stages `d`, `d + devices`, ... and takes the micro-batches in groups through one after the
    other; the bubble shrinks to a `v`th, from (P-1)/m of the computing time to (P-1)/(v m), for
    about twice the activations.
    """
    v = stages_per_device
    rounds = even_parts(chunks, max(1, chunks // devices))
    lanes = []
    for d, own in enumerate(_stages_of_devices(devices, v)):
        # each later device adds a forward to the warm-up, or two if stages are interleaved; each
        # further stage of this device adds a whole group
        later_devices = devices - 1 - d
        warm_up = 1 + (later_devices if v == 1 else 2 * later_devices + (v - 1) * len(rounds[0]))
        forwards = [Action("F", s, i) for group in rounds for s in own for i in group]
        backwards = [Action("B", s, i) for group in rounds for s in reversed(own) for i in group]
        lane = forwards[:warm_up]
        for k, backward in enumerate(backwards):
            lane += [backward, *forwards[warm_up + k : warm_up + k + 1]]
        lanes.append(tuple(lane))
    return Schedule("1f1b", devices * v, chunks, tuple(lanes))


@schedule("gpipe", periodic=True)
def gpipe(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns a schedule of all forwards, then all backwards.

    The backwards go in the order of the micro-batches, so that gradients are added up in the
    same order as in the unsplit model under gradient accumulation.
    """
    lanes = tuple(
        tuple(Action("F", s, i) for s in own for i in range(chunks))
        + tuple(Action("B", s, i) for s in reversed(own) for i in range(chunks))
        for own in _stages_of_devices(devices, stages_per_device)
    )
    return Schedule("gpipe", devices * stages_per_device, chunks, lanes)


@schedule("zb-h1", stages_per_device=1, splits_backward=True, periodic=True)
def zero_bubble_h1(devices: int, chunks: int) -> Schedule:
    """Returns ZB-H1 (Qi et al., arXiv:2401.10241), drawn at the head of this file.

    It is 1F1B with the backwards to the weights put off: on device `d` by `d` micro-batches, so
    that every device holds as many micro-batches as 1F1B's first one, `devices`. If a forward and
    both parts of a backward take a unit each, the bubble shrinks from 3 (P-1) units to P-1.
    """
    lanes = []
    for d in range(devices):
        warm_up = min(devices - d, chunks)
        lane = [Action("F", d, i) for i in range(warm_up)]
        for k in range(chunks):
            lane.append(Action("I", d, k))
            if k >= d:
                lane.append(Action("W", d, k - d))
            if warm_up + k < chunks:
                lane.append(Action("F", d, warm_up + k))
        lane += [Action("W", d, i) for i in range(max(0, chunks - d), chunks)]
        lanes.append(lane)
    return Schedule("zb-h1", devices, chunks, whole_on_first_stage(lanes))


@schedule("zb-v", placement="v", stages_per_device=2, splits_backward=True, periodic=True)
def zero_bubble_v(devices: int, chunks: int) -> Schedule:
    """Returns ZB-V (Qi et al., arXiv:2405.15362): two stages per device, in a V.

    Device `d` has the stages `d` and `2 P - 1 - d`, so the last stage is on the first device, whose
    backwards begin at once. If a forward and both parts of a backward take a unit each and there
    are 2 P - 1 micro-batches or more, no device waits between its first and its last action. Each
    holds at most `2 P` micro-batches of its stages, of half the size of 1F1B's. A backward is whole
    where no device would wait for its end, if each part takes as long as a forward: with many
    micro-batches most are.
    """
    in_parts = zero_bubble_v_in_parts(devices, chunks)
    return merge_backwards(in_parts, Durations.equal(2 * devices))


def zero_bubble_v_in_parts(devices: int, chunks: int) -> Schedule:
    """Returns ZB-V as it was published: all backwards but the first stage's are in two parts."""
    lanes = []
    for d in range(devices):
        down, up = stages_at(d, devices, 2, "v")
        lane = _LaneBuilder()
        lane.add(2 * (devices - d) - 1, ("F", down))
        lane.add(d, ("F", up), ("F", down))
        lane.add(devices - d, ("F", up), ("I", up), ("W", up))
        # fewer micro-batches run the same lane with gaps
        whole = max(chunks, 2 * devices - 1)
        both: tuple[tuple[ActionKind, int], ...] = (
            ("I", down),
            ("W", down),
            ("F", up),
            ("I", up),
            ("W", up),
        )
        lane.add(whole - lane.begun("F", down), ("F", down), *both)
        lane.add(whole - lane.begun("F", up), *both)
        lane.add(d, ("I", down), ("I", up))
        lane.add(devices - d, ("I", down), ("W", down))
        lane.add(whole - lane.begun("W", up), ("W", up))
        lane.add(whole - lane.begun("W", down), ("W", down))
        lanes.append([action for action in lane.actions if action.microbatch < chunks])
    return Schedule("zb-v", 2 * devices, chunks, whole_on_first_stage(lanes))


class _LaneBuilder:
    """The actions of a device, of which each takes the next micro-batch of its kind and stage."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[ActionKind, int], count[int]] = {}

    def add(self, times: int, *group: tuple[ActionKind, int]) -> None:
        """Adds a group of actions, given as kind and stage, so many times."""
        for _ in range(times):
            for kind, stage in group:
                microbatch = next(self._next.setdefault((kind, stage), count()))
                self.actions.append(Action(kind, stage, microbatch))

    def begun(self, kind: ActionKind, stage: int) -> int:
        """Returns how many micro-batches the actions of this kind have taken."""
        return sum(action[:2] == (kind, stage) for action in self.actions)


def forward_only(
    devices: int, chunks: int, stages_per_device: int = 1, placement: Placement = "loop"
) -> Schedule:
    """Every micro-batch once through all stages, as in an evaluation; no backwards."""
    lanes = tuple(
        tuple(
            Action("F", s, i)
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
    """Returns `lanes` with whole backwards on stage 0, which sends no gradient to anybody."""
    return tuple(
        tuple(
            action._replace(kind="B") if action[:2] == ("W", 0) else action
            for action in lane
            if action[:2] != ("I", 0)
        )
        for lane in lanes
    )


def merge_backwards(table: Schedule, durations: Durations) -> Schedule:
    """Returns `table` with one backward for each I with its W right after it, if none waits.

    That is where the stage before begins its own backward no sooner than the whole one ends. So for
    these durations no action comes later than before. Two parts take longer than a whole backward:
    its graph is walked, each node with weights is called by itself, and what both parts read is
    read twice.
    """
    spans = durations.spans(table)
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
                if not stage or begins[stage - 1, microbatch] >= end - _ROUNDING:
                    lane[-1] = action._replace(kind="B")
                    continue
            lane.append(action)
        lanes.append(tuple(lane))
    return Schedule(table.name, table.stages, table.chunks, tuple(lanes))
