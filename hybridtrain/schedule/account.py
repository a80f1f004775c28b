"""The account of a step: where the time of each device went, in parts that add up to the whole.

The time from the first action of all devices to the last is divided by steps that did not happen:
the same table of actions, each time with one more reason to wait. What a reason makes the step
longer is its part:

    equal stages           |compute.........|bubble|
    + their own times      |compute.........|bubble|imbalance|
    + between two actions  |compute.........|bubble|imbalance|host|
    + messages             |compute.........|bubble|imbalance|host|messages|
    + the all-reduce       |compute.........|bubble|imbalance|host|messages|reduction|
    + slower replicas      |compute.........|bubble|imbalance|host|messages|reduction|stragglers|
                           first action                                                last one

So a message that is late counts for all that waits because of it, on any device, and an all-reduce
that runs while its device would be idle anyway costs nothing. The batch, the optimizer and the rest
of the host's time are around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hybridtrain.schedule.simulation import length, spans_of
from hybridtrain.schedule.table import Action, Schedule, Spans
from hybridtrain.schedule.waits import late_starts

_Times = Mapping[Action, float]

COMPUTING = ("forward", "backward", "recompute")
"""The parts of an account in which a device computes."""


class Account(NamedTuple):
    """The time of one device in one step, in seconds; the parts add up to the step.

    Attributes:
        data: waiting for the batch.
        forward: computing.
        backward: computing, without what is computed again.
        recompute: forwards that are run again in a backward, taken as long as the first time.
        bubble: idle as the schedule has it with equal stages, at this number of devices and
            micro-batches.
        imbalance: idle because other stages take longer.
        messages: idle because a value was on its way.
        reduction: the all-reduce of the gradients, where it is not hidden.
        stragglers: waiting in the all-reduce for the slowest replica.
        optimizer: the norm, clipping, the check, and the optimizer's step.
        host: what is left: Python between actions, and before and after them.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    imbalance: float = 0.0
    messages: float = 0.0
    reduction: float = 0.0
    stragglers: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The time of the step."""
        return sum(self)

    @classmethod
    def sum_of(cls, accounts: Iterable[Account]) -> Account:
        """Returns all added up, such as those of the batches of a step."""
        return cls(*map(sum, zip(*accounts, strict=True)))

    def scaled(self, factor: float) -> Account:
        """Returns every part `factor` times."""
        return Account(*(factor * part for part in self))

    @classmethod
    def mean(cls, accounts: Sequence[Account]) -> Account:
        """Returns the mean, over devices or steps."""
        return cls.sum_of(accounts).scaled(1 / len(accounts))


def account_of(
    schedule: Schedule,
    measured: Spans,
    reductions: _Times | None = None,
    reductions_of_last: _Times | None = None,
    recomputed: Sequence[Sequence[float]] | None = None,
) -> list[Account]:
    """Returns where the time from the first action to the last went, of each device.

    Args:
        schedule: of the step.
        measured: its spans, in seconds.
        reductions: of the actions that end in a wait for the all-reduce, that wait.
        reductions_of_last: the same of the replica that came last, for which nobody had to wait:
            the all-reduce itself. None: as `reductions`.
        recomputed: by stage and micro-batch, the share of the forward that its backward runs again.
    """
    reductions = reductions or {}
    reductions_of_last = reductions if reductions_of_last is None else reductions_of_last
    whole = {span.action: span.end - span.start for lane in measured for span in lane}
    computing, reduced = dict(whole), dict(whole)
    for action, waited in reductions.items():
        computing[action] = max(0.0, whole[action] - waited)
        of_last = reductions_of_last.get(action, 0.0)
        reduced[action] = min(whole[action], computing[action] + of_last)
    delays, between = late_starts(schedule, measured)
    steps: list[tuple[_Times, _Times | None]]
    steps = [
        (computing, None), (computing, between), (computing, delays), (reduced, delays),
        (whole, delays),
    ]  # fmt: skip
    lengths = [_length(schedule, *steps[0])]
    for before, step in pairwise(steps):  # without messages or replicas some are the same
        lengths.append(lengths[-1] if step == before else _length(schedule, *step))
    # Each step is as long as the one before or longer, since nothing in it ends earlier.
    host, messages, reduction, stragglers = (
        max(0.0, after - before) for before, after in pairwise(lengths)
    )
    equal = _equal_stages(schedule, computing)
    busy_if_equal = sum(equal.values()) / len(schedule.lanes)
    least_idle = _length(schedule, equal) - busy_if_equal
    accounts = []
    for lane in schedule.lanes:
        forward = sum(computing[action] for action in lane if action.kind == "F")
        backward = sum(computing[action] for action in lane if action.kind != "F")
        again = 0.0
        if recomputed is not None:
            again = sum(
                computing[action] * recomputed[action.stage][action.microbatch]
                for action in lane
                if action.kind == "F"
            )
            again = min(again, backward)
        idle = max(0.0, lengths[0] - forward - backward)  # sums are rounded
        bubble = max(0.0, min(least_idle, idle))
        accounts.append(
            Account(
                forward=forward,
                backward=backward - again,
                recompute=again,
                bubble=bubble,
                imbalance=idle - bubble,
                messages=messages,
                reduction=reduction,
                stragglers=stragglers,
                host=host,
            )
        )
    return accounts


def mean_delays(schedule: Schedule, measured: Spans) -> tuple[float, float]:
    """Returns how late actions begin on the mean: by the host, and by messages between devices."""
    delays, between = late_starts(schedule, measured)
    late = [
        delays[action] - between[action] for action in delays if delays[action] > between[action]
    ]
    return sum(between.values()) / len(between), sum(late) / max(1, len(late))


def _length(schedule: Schedule, durations: _Times, delays: _Times | None = None) -> float:
    """Returns the time of a step with these durations and delays."""
    return length(spans_of(schedule, durations.__getitem__, delays=delays))


def _equal_stages(schedule: Schedule, durations: _Times) -> _Times:
    """Returns the durations of stages that are all the mean of those that there are."""
    sums = dict.fromkeys("FBIW", 0.0)
    for action, seconds in durations.items():
        sums[action.kind] += seconds
    count = schedule.stages * schedule.chunks
    backward = (sums["B"] + sums["I"] + sums["W"]) / count
    in_parts = sums["I"] + sums["W"]
    to_input = backward * sums["I"] / in_parts if in_parts else 0.0
    mean = {"F": sums["F"] / count, "B": backward, "I": to_input, "W": backward - to_input}
    return {action: mean[action.kind] for action in durations}
