"""V-Half and V-Min: zero-bubble schedules that hold a half and a third of 1F1B's activations.

Both repeat a building block (Qi et al., *Pipeline Parallelism with Controllable Memory*,
arXiv:2405.15362): every six units of time, a forward, an I and a W each, a micro-batch enters. A
device has two stages, in a V, and holds a micro-batch from its forward to its W. The block says at
what time each device takes a micro-batch down and up the V, and so how long it is held.

3 devices, 3 micro-batches; F, I, W: first stage of a device, f, i, w: its second stage,
B, b: whole backwards

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

# A device computes an F, an I and a W of each of its two stages for a micro-batch.
_UNITS_PER_MICROBATCH = 6

_Block = dict[tuple[str, int], int]
"""The time of a device's F and I of micro-batch 0, by kind and stage."""


@schedule("v-half", placement="v", stages_per_device=2, splits_backward=True, periodic=True)
def v_half(devices: int, chunks: int) -> Schedule:
    """Returns V-Half: half the activations of 1F1B, and half its idle time.

    A device holds at most `(P + 2) // 2` micro-batches of both of its stages. If a forward and both
    parts of a backward take a unit each, a device idles for at most 3 (P-1) units, and 6 (P-1) with
    1F1B, whose stages are twice as large.
    """
    gap = 3 * (devices % 2 == 0)
    blocks = []
    for d in range(devices):
        down, up = stages_at(d, devices, 2, "v")
        # the forwards go down at half speed and up at full speed, and so do the backwards
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
    """Returns V-Min: a third of the activations of 1F1B, and two thirds of its idle time.

    A device holds at most `(P + 4) // 3` micro-batches of both of its stages. If a forward and both
    parts of a backward take a unit each, a device idles for less than 4 (P-1) units, and 6 (P-1)
    with 1F1B, whose stages are twice as large. If they take different times, devices wait for one
    another at every micro-batch.
    """
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
    """Returns the table in which each device repeats its block for every micro-batch.

    All actions take one unit. A device runs the next action of its block as soon as possible,
    and a W while it waits or is full. This cannot deadlock: the block itself never holds more than
    `most_held` micro-batches, so a full device always has a W to run before its next forward.

    Args:
        name: of the schedule.
        blocks: of each device.
        chunks: micro-batches.
        most_held: the most micro-batches that a device may hold, each in both of its stages.
    """
    stages = 2 * len(blocks)
    lanes: list[list[Action]] = [[] for _ in blocks]
    upcoming = [_in_block_order(block, chunks) for block in blocks]
    weights: list[deque[Action]] = [deque() for _ in blocks]
    held = [0] * len(blocks)
    made: set[tuple[str, int, int]] = set()
    while any(upcoming) or any(weights):
        made_now: list[tuple[str, int, int]] = []
        for d, lane in enumerate(lanes):
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
    """Returns the forwards and the backwards to the input of a device, by their time."""
    timed = [
        (start + _UNITS_PER_MICROBATCH * i, kind, stage, i)
        for (kind, stage), start in block.items()
        for i in range(chunks)
    ]
    return deque(Action(kind, stage, i) for _, kind, stage, i in sorted(timed))  # type: ignore[arg-type]


def _candidates(upcoming: deque[Action]) -> list[Action]:
    """Returns what a device may run next, the best first.

    That is the first action in the order of the block. After the last forward, a backward of the
    other stage may overtake it, because no backward adds to the memory.
    """
    if not upcoming:
        return []
    first = upcoming[0]
    if any(action.kind == "F" for action in upcoming):
        return [first]
    return [first, *islice((a for a in upcoming if a.stage != first.stage), 1)]
