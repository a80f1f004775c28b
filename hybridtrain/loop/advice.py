"""Proposals to make a step shorter, by its own account, each with its price.

A price is what the step would take with one thing changed, by the times that this run has measured:
the same table of actions with other durations, or the table for other settings. What has no price
is not proposed, nor what wins less than a twentieth.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import setting
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import Objective, Plan, cut_by_costs, stage_costs
from hybridtrain.schedule import (
    Account,
    ActionKind,
    Schedule,
    Spans,
    bubble_fraction,
    length,
    make_schedule,
    mean_delays,
    spans_for,
)

# What is won by less is noise, and is not worth a change.
_LEAST_GAIN = 0.05
# Parts of a step that are too small to look at.
_SMALL = 0.05
_MOST = 2

Costs = dict[ActionKind, list[float]]


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step, and the settings that it ran with.

    Attributes:
        account: the mean over the devices.
        schedule: of a batch.
        spans: of the same batch, in seconds.
        batches: of the step, in this replica.
        samples: of the largest micro-batch.
        plan: the stages and what their layers cost.
        options: of the pipeline.
        workers: that load data; None: the loader is the user's own.
        costs: what a micro-batch takes, by kind of action and stage, in seconds.
    """

    account: Account
    schedule: Schedule
    spans: Spans
    batches: int
    samples: int
    plan: Plan
    options: PipelineOptions
    workers: int | None
    costs: Costs


class Proposal(NamedTuple):
    """A change, and its price.

    Attributes:
        part: of the account, which it is about.
        seconds: of the step with it.
        text: in a sentence.
    """

    part: str
    seconds: float
    text: str


def advise(step: RecordedStep) -> list[Proposal]:
    """Returns the changes worth making, that of the largest part first; none where all is well."""
    proposals = []
    for part, propose in _PROPOSALS.items():
        if getattr(step.account, part) > _SMALL * step.account.total:
            proposal = propose(step)
            if proposal is not None and proposal.seconds < (1 - _LEAST_GAIN) * step.account.total:
                proposals.append(proposal)
    proposals.sort(key=lambda proposal: -getattr(step.account, proposal.part))
    return proposals[:_MOST]


def _load_ahead(step: RecordedStep) -> Proposal | None:
    """More workers: the loader, which the step waits for, takes as long as the whole step."""
    if step.workers is None:
        return None
    total, rest = step.account.total, step.account.total - step.account.data
    loading = total * max(1, step.workers)
    workers = min(math.ceil(loading / rest), os.cpu_count() or 1)
    return Proposal(
        "data",
        max(rest, loading / workers),
        f"waiting for data takes {_share(step, 'data')} of a step: {setting('workers', workers)} "
        f"would take {_times(step, max(rest, loading / workers))}, if there are as many free cores",
    )


def _smaller_microbatches(step: RecordedStep) -> Proposal | None:
    """Twice as many micro-batches of half the size."""
    chunks = 2 * step.schedule.chunks
    if step.samples < 2:
        return None
    devices = len(step.schedule.lanes)
    made = make_schedule(
        step.options.schedule, devices, chunks, step.schedule.stages // devices,
        step.options.max_inflight,
    )  # fmt: skip
    costs: Costs = {kind: [t / 2 for t in times] for kind, times in step.costs.items()}
    seconds = _with(step, made, costs)
    even = {kind: [sum(times) / len(times)] * len(times) for kind, times in costs.items()}
    idle = spans_for(made, even)
    bubble = step.batches * bubble_fraction(idle) * length(idle) / seconds
    if bubble >= step.account.bubble / step.account.total:
        return None  # what makes the step shorter is not the bubble
    return Proposal(
        "bubble",
        seconds,
        f"the bubble is {_share(step, 'bubble')} of a step: {setting('chunks', chunks)} would "
        f"make it {bubble:.0%}, and a step would take {_times(step, seconds)}, if half a "
        "micro-batch takes half the time",
    )


def _even_stages(step: RecordedStep) -> Proposal | None:
    """Another cut, by the times of the layers, where they are known."""
    # one that was measured already, a list, or the plan that a resumed run keeps
    if step.options.split not in ("uniform", "size", "memory", "balanced"):
        return None
    costs, plan = step.costs, step.plan
    times = [f + b for f, b in zip(costs["F"], costs["B"], strict=True)]
    mean = sum(times) / len(times)
    slow = max(range(len(times)), key=times.__getitem__)
    wanted, at_best = [mean] * len(times), "at best "
    if all(cost.forward_ms > 0 for cost in plan.costs):
        planned = [stage.forward_ms + stage.backward_ms for stage in plan.stage_costs()]
        factors = [time * 1e3 / ms for time, ms in zip(times, planned, strict=True)]
        layers = [
            replace(
                cost,
                forward_ms=cost.forward_ms * factor,
                backward_ms=cost.backward_ms * factor,
            )
            for stage, factor in zip(plan.stages, factors, strict=True)
            for cost in stage.layers
        ]
        counts = cut_by_costs(layers, plan.in_flight, Objective())
        cut = stage_costs(layers, counts, plan.in_flight)
        wanted = [(stage.forward_ms + stage.backward_ms) / 1e3 for stage in cut]
        at_best = ""
    seconds = _with(step, step.schedule, _scaled(costs, wanted))
    return Proposal(
        "imbalance",
        seconds,
        f"stage {slow} takes {times[slow] / mean:.1f} times as long as the stages do on average: "
        f"{setting('split', 'time')} would take {at_best}{_times(step, seconds)}",
    )


def _keep_activations(step: RecordedStep) -> Proposal | None:
    """No recomputation, where what it saves is known."""
    sizes = [sum(cost.activation_bytes for cost in stage.layers) for stage in step.plan.stages]
    if not any(sizes):  # not measured; a single stage may keep nothing but what it was sent
        return None
    more = max(size * stage.in_flight for size, stage in zip(sizes, step.plan.stages, strict=True))
    costs = step.costs
    saved = step.account.recompute / step.account.forward
    once = {
        kind: times
        if kind == "F"
        else [
            b - saved * f * b / whole if whole else b
            for b, f, whole in zip(times, costs["F"], costs["B"], strict=True)
        ]
        for kind, times in costs.items()
    }
    seconds = _with(step, step.schedule, once)
    return Proposal(
        "recompute",
        seconds,
        f"recomputation takes {_share(step, 'recompute')} of a step: "
        f"{setting('recompute', 'never')} would take {_times(step, seconds)}, for up to "
        f"{with_unit(more)} more on a device",
    )


_PROPOSALS = {
    "data": _load_ahead,
    "bubble": _smaller_microbatches,
    "imbalance": _even_stages,
    "recompute": _keep_activations,
}


def _scaled(costs: Costs, times: Sequence[float]) -> Costs:
    """Returns the costs of stages that take `times` for a micro-batch, forward and backward."""
    whole = [f + b for f, b in zip(costs["F"], costs["B"], strict=True)]
    forward, backward = sum(costs["F"]) / sum(whole), sum(costs["B"]) / sum(whole)
    in_parts = sum(costs["I"]) + sum(costs["W"]) or 1.0
    to_input, to_weights = (backward * sum(costs[kind]) / in_parts for kind in ("I", "W"))
    shares: dict[ActionKind, float]
    shares = {"F": forward, "B": backward, "I": to_input, "W": to_weights}
    return {kind: [share * time for time in times] for kind, share in shares.items()}


def _with(step: RecordedStep, schedule: Schedule, costs: Costs) -> float:
    """Returns the time of a step whose batches run `schedule` at these costs."""
    between, crossing = mean_delays(step.schedule, step.spans)

    def window(schedule: Schedule, costs: Costs) -> float:
        late = {kind: [time + between for time in times] for kind, times in costs.items()}
        return length(spans_for(schedule, late, [crossing] * (schedule.stages - 1)))

    # One prediction less another: what neither has, such as the all-reduce, is not won.
    won = window(step.schedule, step.costs) - window(schedule, costs)
    return step.account.total - step.batches * won


def _share(step: RecordedStep, part: str) -> str:
    return f"{getattr(step.account, part) / step.account.total:.0%}"


def _times(step: RecordedStep, seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms instead of {step.account.total * 1e3:.4g}"
