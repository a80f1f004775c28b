"""The schedules, and each by its name, as the options give it.

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

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, pairwise

from hybridtrain.errors import ScheduleError, did_you_mean
from hybridtrain.schedule.simulation import Durations
from hybridtrain.schedule.table import (
    STAGES_PER_DEVICE,
    Action,
    ActionKind,
    Placement,
    Schedule,
    peak_in_flight,
    stages_at,
    validate,
)

Builder = Callable[[int, int, int], Schedule]

# Two times that differ by less are the same.
_ROUNDING = 1e-9


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


def one_forward_one_backward(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns a schedule of a few forwards, then a backward and a forward in turn.

    With one stage per device, stage `s` holds at most `stages - s` micro-batches, whatever their
    number. With `v` stages per device (Narayanan et al., arXiv:2104.04473) device `d` has the
    stages `d`, `d + devices`, ... and takes the micro-batches in groups through one after the
    other; the bubble shrinks to a `v`th, from (P-1)/m of the computing time to (P-1)/(v m), for
    about twice the activations.
    """
    v = stages_per_device
    rounds = _even_parts(chunks, max(1, chunks // devices))
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


def zero_bubble_h1(devices: int, chunks: int, stages_per_device: int = 1) -> Schedule:
    """Returns ZB-H1 (Qi et al., arXiv:2401.10241), drawn at the head of this file.

    It is 1F1B with the backwards to the weights put off: on device `d` by `d` micro-batches, so
    that every device holds as many micro-batches as 1F1B's first one, `devices`. If a forward and
    both parts of a backward take a unit each, the bubble shrinks from 3 (P-1) units to P-1.

    Raises:
        ScheduleError: there are several stages per device.
    """
    _check_stages_per_device("zb-h1", stages_per_device)
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
    return Schedule("zb-h1", devices, chunks, _whole_on_first_stage(lanes))


def zero_bubble_v(devices: int, chunks: int, stages_per_device: int = 2) -> Schedule:
    """Returns ZB-V (Qi et al., arXiv:2405.15362): two stages per device, in a V.

    Device `d` has the stages `d` and `2 P - 1 - d`, so the last stage is on the first device, whose
    backwards begin at once. If a forward and both parts of a backward take a unit each and there
    are 2 P - 1 micro-batches or more, no device waits between its first and its last action. Each
    holds at most `2 P` micro-batches of its stages, of half the size of 1F1B's. A backward is whole
    where no device would wait for its end, if each part takes as long as a forward: with many
    micro-batches most are.

    Raises:
        ScheduleError: there are not two stages per device.
    """
    schedule = zero_bubble_v_in_parts(devices, chunks, stages_per_device)
    return merge_backwards(schedule, Durations.equal(2 * devices))


def zero_bubble_v_in_parts(devices: int, chunks: int, stages_per_device: int = 2) -> Schedule:
    """Returns ZB-V as it was published: all backwards but the first stage's are in two parts.

    Raises:
        ScheduleError: there are not two stages per device.
    """
    _check_stages_per_device("zb-v", stages_per_device)
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
    return Schedule("zb-v", 2 * devices, chunks, _whole_on_first_stage(lanes))


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


def _check_stages_per_device(name: str, given: int) -> None:
    """Checks that the schedule of this name is for `given` stages on each device.

    Raises:
        ScheduleError: it is not.
    """
    needed = STAGES_PER_DEVICE.get(name, given)
    if given != needed:
        raise ScheduleError(
            f"schedule={name} has {needed} stage{'s' * (needed > 1)} on each device: set "
            f"stages_per_device={needed}"
        )


def forward_only(
    devices: int, chunks: int, stages_per_device: int = 1, placement: Placement = "loop"
) -> Schedule:
    """Every micro-batch once through all stages, as in an evaluation; no backwards."""
    lanes = tuple(
        tuple(
            Action("F", s, i)
            for group in _even_parts(chunks, max(1, chunks // devices))
            for s in stages_at(device, devices, stages_per_device, placement)
            for i in group
        )
        for device in range(devices)
    )
    return Schedule("forward_only", devices * stages_per_device, chunks, lanes)


def _stages_of_devices(devices: int, stages_per_device: int) -> list[list[int]]:
    return [stages_at(device, devices, stages_per_device) for device in range(devices)]


def _even_parts(number: int, parts: int) -> list[range]:
    """Returns the numbers below `number` in `parts` ranges, the longer ones first."""
    small, longer = divmod(number, parts)
    starts = [part * small + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _whole_on_first_stage(lanes: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
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
    these durations no action comes later than before. Two parts take longer than a whole backward:
    its graph is walked, each node with weights is called by itself, and what both parts read is
    read twice.
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
                if not stage or begins[stage - 1, microbatch] >= end - _ROUNDING:
                    lane[-1] = action._replace(kind="B")
                    continue
            lane.append(action)
        lanes.append(tuple(lane))
    return Schedule(schedule.name, schedule.stages, schedule.chunks, tuple(lanes))


_BUILDERS: dict[str, Builder] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}

SCHEDULES = tuple(_BUILDERS)
"""The names that `make_schedule` knows."""


def splits_backwards(name: str) -> bool:
    """Returns whether the schedule of this name has backwards in two parts."""
    return name not in ("gpipe", "1f1b")


@lru_cache(maxsize=256)
def make_schedule(
    name: str,
    devices: int,
    chunks: int,
    stages_per_device: int = 1,
    max_inflight: int | None = None,
) -> Schedule:
    """Builds and validates the schedule `name`; a short last batch asks for fewer `chunks`.

    Args:
        name: one of `SCHEDULES`.
        devices: how many.
        chunks: micro-batches.
        stages_per_device: how many stages each device runs.
        max_inflight: how many micro-batches may be in flight, begun and not finished, at one time.

    Raises:
        ScheduleError: `name` is unknown, a count is not positive, or the schedule has another
            number of stages per device.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"schedule={name!r} is unknown; {did_you_mean(name, SCHEDULES, 'schedules')}"
        )
    if min(devices, chunks, stages_per_device, max_inflight or 1) < 1:
        raise ScheduleError(
            f"a schedule needs at least 1 device, 1 chunk, 1 stage per device and 1 micro-batch "
            f"in flight, not {devices}, {chunks}, {stages_per_device}, {max_inflight}"
        )
    schedule = _BUILDERS[name](devices, chunks, stages_per_device)
    # stage 0 holds every micro-batch that is in flight
    if max_inflight is not None and peak_in_flight(schedule)[0] > max_inflight:
        schedule = _in_blocks(_BUILDERS[name], max_inflight, devices, chunks, stages_per_device)
    validate(schedule)
    return schedule


def _in_blocks(builder: Builder, size: int, devices: int, chunks: int, v: int) -> Schedule:
    """Returns `builder`'s schedules for `size` micro-batches at a time, one after the other."""
    lanes: list[list[Action]] = [[] for _ in range(devices)]
    for block in _even_parts(chunks, -(-chunks // size)):
        part = builder(devices, len(block), v)
        for lane, actions in zip(lanes, part.lanes, strict=True):
            lane += [action._replace(microbatch=block[action.microbatch]) for action in actions]
    return Schedule(part.name, devices * v, chunks, tuple(map(tuple, lanes)))
