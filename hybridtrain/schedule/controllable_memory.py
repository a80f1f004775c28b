"""V-Half and V-Min: zero-bubble schedules with a half and a third of 1F1B's activation memory.

Both repeat a building block (Qi et al., *Pipeline Parallelism with Controllable Memory*,
arXiv:2405.15362). A device has two stages, in V placement. A forward, an I and a W take one unit of
time each, so a new micro-batch enters every six units. The block gives the times at which a
micro-batch passes each device on its way down and up the V, and so how long the device holds it,
from its forward to its W.

3 devices, 3 micro-batches; F, I, W: first stage of a device; f, i, w: its second stage; B, b: whole
backwards

V-Half
device 0  F0 F1 .. .. .. f0 i0 F2 w0 f1 b1--- B0--- .. f2 i2 w2 B1--- .. B2---
device 1     F0 .. .. f0 F1 .. i0 f1 w0 F2 I0 i1 W0 f2 w1 I1 i2 W1 w2 I2 W2
device 2        F0 f0 .. .. F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 W1 i2 I2 w2 W2

V-Min
device 0  F0 .. .. .. .. f0 F1 i0 w0 .. .. f1 F2 i1 B0--- w1 f2 i2 w2 B1--- .. B2---
device 1     F0 .. .. f0 .. .. F1 b0--- f1 .. I0 F2 W0 i1 f2 w1 I1 i2 W1 w2 I2 W2
device 2        F0 f0 .. .. .. .. F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from hybridtrain.schedule.named import merge_backwards, whole_on_first_stage
from hybridtrain.schedule.registry import schedule
from hybridtrain.schedule.simulation import Durations
from hybridtrain.schedule.table import Action, Schedule, made_by, needs_of, stages_at

# The actions of a device per micro-batch: F, I and W for each of its two stages.
_UNITS_PER_MICROBATCH = 6

_Block = dict[tuple[str, int], int]
"""The start times of a device's F and I for micro-batch 0, by kind and stage."""


@schedule("v-half", placement="v", stages_per_device=2, splits_backward=True, periodic=True)
def v_half(devices: int, chunks: int) -> Schedule:
    """Returns V-Half: half the activation memory of 1F1B, and half its idle time.

    A device holds at most `(P + 2) // 2` micro-batches of both of its stages. If a forward and both
    parts of a backward take one unit each, a device idles for at most 3 (P-1) units, compared with
    6 (P-1) for 1F1B, which has stages twice as large.
    """
    # Without it, actions of two micro-batches would fall on the same unit of time.
    gap = 3 * (devices % 2 == 0)
    blocks = []
    for d in range(devices):
        down, up = stages_at(d, devices, 2, "v")
        # forwards and backwards move down the V at half speed and up at full speed
        blocks.append(
            {
                ("F", down): 2 * d,
                ("F", up): 3 * devices - 2 - d,
                ("I", up): 3 * devices - 1 + gap + 2 * d,
                ("I", down): 6 * devices - 2 + gap - d,
            }
        )
    return _repeated("v-half", blocks, chunks, (devices + 2) // 2)


@schedule("v-min", placement="v", stages_per_device=2, splits_backward=True, periodic=True)
def v_min(devices: int, chunks: int) -> Schedule:
    """Returns V-Min: a third of the activation memory of 1F1B, and two thirds of its idle time.

    A device holds at most `(P + 4) // 3` micro-batches of both of its stages. If a forward and both
    parts of a backward take one unit each, a device idles for less than 4 (P-1) units, compared
    with 6 (P-1) for 1F1B, which has stages twice as large. If they take different times, devices
    wait for each other at every micro-batch.
    """
    # As in `v_half`.
    gap = 2 * (devices % 3 == 0)
    blocks = []
    for d in range(devices):
        down, up = stages_at(d, devices, 2, "v")
        blocks.append(
            {
                ("F", down): d,
                ("F", up): 2 * devices - 1 - d,
                ("I", up): 2 * devices + gap + d,
                ("I", down): 4 * devices - 1 + gap - d,
            }
        )
    return _repeated("v-min", blocks, chunks, (devices + 4) // 3)


def _repeated(name: str, blocks: Sequence[_Block], chunks: int, most_held: int) -> Schedule:
    """Returns the schedule in which each device repeats its block for every micro-batch.

    All actions take one unit. A device runs the next action of its block as soon as possible, and a
    W while it waits or is full. This cannot deadlock: the block itself never holds more than
    `most_held` micro-batches, so a full device always has a W to run before its next forward.

    Args:
        name: the name of the schedule.
        blocks: the block of each device.
        chunks: the number of micro-batches.
        most_held: the most micro-batches that a device may hold, each in both of its stages.
    """
    stages = 2 * len(blocks)
    lanes: list[list[Action]] = [[] for _ in blocks]
    upcoming = [_in_block_order(block, chunks) for block in blocks]
    weights: list[deque[Action]] = [deque() for _ in blocks]
    held = [0] * len(blocks)
    made: set[tuple[str, int, int]] = set()
    while any(upcoming) or any(weights):
        # Products of this unit of time are there only in the next one.
        made_now: list[tuple[str, int, int]] = []
        for d, lane in enumerate(lanes):
            # Twice, because a device counts each micro-batch in both of its stages.
            full = held[d] == 2 * most_held
            action = next(
                (
                    action
                    for action in _candidates(upcoming[d])
                    if made.issuperset(needs_of(action, stages)) and not (full and action[0] == "F")
                ),
                None,
            )
            if action is not None:
                upcoming[d].remove(action)
                if action.kind == "F":
                    held[d] += 1
                else:
                    # In the order of the Is, so that each stage's weights are summed micro-batch by
                    # micro-batch.
                    weights[d].append(action._replace(kind="W"))
            elif weights[d]:
                action = weights[d].popleft()
                held[d] -= 1
            else:
                continue
            lane.append(action)
            made_now += made_by(action)
        made.update(made_now)
    table = Schedule(name, stages, chunks, whole_on_first_stage(lanes))
    return merge_backwards(table, Durations.equal(stages))


def _in_block_order(block: _Block, chunks: int) -> deque[Action]:
    """Returns the F and I actions of a device, ordered by time."""
    timed = [
        (start + _UNITS_PER_MICROBATCH * i, kind, stage, i)
        for (kind, stage), start in block.items()
        for i in range(chunks)
    ]
    return deque(Action(kind, stage, i) for _, kind, stage, i in sorted(timed))  # type: ignore[arg-type]


def _candidates(upcoming: deque[Action]) -> list[Action]:
    """Returns the candidates for a device's next action, best first.

    The best candidate is the first action in the order of the block. After the last forward, a
    backward of the other stage may overtake it, because backwards do not increase memory.
    """
    if not upcoming:
        return []
    first = upcoming[0]
    if any(action.kind == "F" for action in upcoming):
        return [first]
    return [first, *islice((a for a in upcoming if a.stage != first.stage), 1)]
