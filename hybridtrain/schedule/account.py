"""The time breakdown of a step: the time of each device, in parts that add up to the whole.

The time from the first to the last action is divided by simulating the same schedule repeatedly,
each time with one more cause of waiting. Each cause is charged with the time it adds to the step:

    equal stages           |compute.........|bubble|
    + actual times         |compute.........|bubble|imbalance|
    + between two actions  |compute.........|bubble|imbalance|host|
    + messages             |compute.........|bubble|imbalance|host|messages|
    + the all-reduce       |compute.........|bubble|imbalance|host|messages|reduction|
    + slower replicas      |compute.........|bubble|imbalance|host|messages|reduction|stragglers|
                           first action                                                last one

A late message is therefore charged with all waits that it triggers, on any device, and an
all-reduce that runs while its device is idle anyway costs nothing. Data, the optimizer and other
host time come before and after this window.
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
"""The parts of the time breakdown in which a device computes."""


class Account(NamedTuple):
    """The time breakdown of one device in one step, in seconds; the parts add up to the step.

    Attributes:
        data: waiting for the batch.
        forward: computing forwards.
        backward: computing backwards, without recomputation.
        recompute: recomputing forwards in a backward, assumed to take as long as the first time.
        bubble: idle because of the schedule, with equal stages and this number of devices and
            micro-batches.
        imbalance: idle because other stages take longer.
        messages: idle while a message was in transit.
        reduction: the all-reduce of the gradients, as far as it is not overlapped.
        stragglers: waiting in the all-reduce for the slowest replica.
        optimizer: the gradient norm, clipping, the finite check and the optimizer step.
        host: the rest: Python between, before and after the actions.
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
        """Returns the sum of several breakdowns, such as of the batches of a step."""
        return cls(*map(sum, zip(*accounts, strict=True)))

    def scaled(self, factor: float) -> Account:
        """Returns all parts multiplied by `factor`."""
        return Account(*(factor * part for part in self))

    @classmethod
    def mean(cls, accounts: Sequence[Account]) -> Account:
        """Returns the mean over devices or steps."""
        if len(accounts) == 1:
            return accounts[0]
        return cls.sum_of(accounts).scaled(1 / len(accounts))


def account_of(
    schedule: Schedule,
    measured: Spans,
    reductions: _Times | None = None,
    reductions_of_last: _Times | None = None,
    recomputed: Sequence[Sequence[float]] | None = None,
) -> list[Account]:
    """Returns the time breakdown of each device between the first and last action of the step.

    Args:
        schedule: the schedule of the step.
        measured: the measured spans, in seconds.
        reductions: for actions that end with a wait for the all-reduce, the seconds of that wait.
        reductions_of_last: the same for the replica that arrived last, where the wait is the
            all-reduce itself; None if equal to `reductions`.
        recomputed: by stage and micro-batch, the fraction of the forward that the backward
            recomputes.
    """
    reductions = reductions or {}
    reductions_of_last = reductions if reductions_of_last is None else reductions_of_last
    whole = {span.action: span.end - span.start for lane in measured for span in lane}
    # The same actions three times: without the wait for the all-reduce, with the wait of the last
    # replica, and as measured.
    computing, reduced = dict(whole), dict(whole)
    for action, waited in reductions.items():
        computing[action] = max(0.0, whole[action] - waited)
        of_last = reductions_of_last.get(action, 0.0)
        reduced[action] = min(whole[action], computing[action] + of_last)
    if len(schedule.lanes) == 1:  # nothing to simulate: its actions follow one another
        computed, ended = sum(computing.values()), sum(reduced.values())
        busy = sum(whole.values())
        host, messages = max(0.0, length(measured) - busy), 0.0
        reduction, stragglers = ended - computed, busy - ended
        shortest, least_idle = computed, 0.0
    else:
        shortest, causes = _causes_of_waiting(schedule, measured, computing, reduced, whole)
        host, messages, reduction, stragglers = causes
        equal = _equal_stages(schedule, computing)
        least_idle = _length(schedule, equal) - sum(equal.values()) / len(schedule.lanes)
    accounts = []
    for lane in schedule.lanes:
        forward = sum(computing[action] for action in lane if action.kind == "F")
        backward = sum(computing[action] for action in lane if action.kind != "F")
        recomputed_time = 0.0
        if recomputed is not None:
            recomputed_time = sum(
                computing[action] * recomputed[action.stage][action.microbatch]
                for action in lane
                if action.kind == "F"
            )
            recomputed_time = min(recomputed_time, backward)
        idle = max(0.0, shortest - forward - backward)  # absorbs rounding of the sums
        bubble = max(0.0, min(least_idle, idle))
        accounts.append(
            Account(
                forward=forward,
                backward=backward - recomputed_time,
                recompute=recomputed_time,
                bubble=bubble,
                imbalance=idle - bubble,
                messages=messages,
                reduction=reduction,
                stragglers=stragglers,
                host=host,
            )
        )
    return accounts


def _causes_of_waiting(
    schedule: Schedule, measured: Spans, computing: _Times, reduced: _Times, whole: _Times
) -> tuple[float, list[float]]:
    """Returns the time of a step of computing alone, and what each cause of waiting adds to it.

    The causes are the host, messages, the all-reduce and slower replicas.

    Args:
        schedule: the schedule of the step.
        measured: the measured spans.
        computing: the durations of actions without the wait for the all-reduce.
        reduced: those with the wait of the replica that arrived last.
        whole: those as measured.
    """
    delays, between = late_starts(schedule, measured)
    steps: list[tuple[_Times, _Times | None]]
    # In this order each step adds one cause of waiting to the one before, see the module.
    steps = [
        (computing, None), (computing, between), (computing, delays), (reduced, delays),
        (whole, delays),
    ]  # fmt: skip
    lengths = [_length(schedule, *steps[0])]
    for before, step in pairwise(steps):  # without messages or replicas some are equal
        lengths.append(lengths[-1] if step == before else _length(schedule, *step))
    # Each simulated step is at least as long as the previous one, since no action ends earlier.
    return lengths[0], [max(0.0, after - before) for before, after in pairwise(lengths)]


def mean_delays(schedule: Schedule, measured: Spans) -> tuple[float, float]:
    """Returns the mean delays of actions: by the host, and by messages between devices."""
    delays, between = late_starts(schedule, measured)
    late = [
        delays[action] - between[action] for action in delays if delays[action] > between[action]
    ]
    return sum(between.values()) / len(between), sum(late) / max(1, len(late))


def _length(schedule: Schedule, durations: _Times, delays: _Times | None = None) -> float:
    """Returns the time of a step with these durations and delays."""
    return length(spans_of(schedule, durations.__getitem__, delays=delays))


def _equal_stages(schedule: Schedule, durations: _Times) -> _Times:
    """Returns durations in which all stages take the mean over stages."""
    sums = dict.fromkeys("FBIW", 0.0)
    for action, seconds in durations.items():
        sums[action.kind] += seconds
    count = schedule.stages * schedule.chunks
    backward = (sums["B"] + sums["I"] + sums["W"]) / count
    in_parts = sums["I"] + sums["W"]
    to_input = backward * sums["I"] / in_parts if in_parts else 0.0
    mean = {"F": sums["F"] / count, "B": backward, "I": to_input, "W": backward - to_input}
    return {action: mean[action.kind] for action in durations}
