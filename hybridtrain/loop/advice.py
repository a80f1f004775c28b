"""Suggestions that would make a step shorter, each with a predicted step time.

A prediction simulates the step with one setting changed, from the times that this run measured: the
same schedule with other action durations, or the schedule for other settings. A change that cannot
be predicted, or that saves less than a twentieth of the step, is not suggested.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hybridtrain._base.text_table import with_unit
from hybridtrain.errors import setting
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LayerCost,
    Objective,
    Plan,
    balances,
    cut_by_costs,
    find_cut,
    recompute_policy,
    stage_costs,
)
from hybridtrain.schedule import (
    Account,
    ActionKind,
    Schedule,
    Spans,
    bubble_fraction,
    length,
    make_schedule,
    mean_costs,
    mean_delays,
    spans_for,
)

# A smaller gain is noise, and not worth a change.
_LEAST_GAIN = 0.05
# Parts of a step below this share are ignored.
_SMALL = 0.05
_MOST = 2
# Devices whose speeds differ by less than this factor from the planned ones are as planned.
_UNEQUAL = 1.25

Costs = dict[ActionKind, list[float]]


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step and its settings.

    Attributes:
        account: the step's time breakdown, averaged over the devices.
        schedule: the schedule of one batch.
        spans: the measured spans of that batch, in seconds.
        computing: the same without the waits for the all-reduce.
        batches: the number of batches in the step, on this replica.
        samples: the size of the largest micro-batch.
        plan: the stages and the costs of their layers.
        options: the pipeline's options.
        workers: the number of data loading workers; None for a user-defined loader.
    """

    account: Account
    schedule: Schedule
    spans: Spans
    computing: Spans
    batches: int
    samples: int
    plan: Plan
    options: PipelineOptions
    workers: int | None

    @cached_property
    def costs(self) -> Costs:
        """The seconds per micro-batch, by action kind and stage."""
        return mean_costs(self.computing, self.schedule.stages)


class Proposal(NamedTuple):
    """A suggested change and its predicted effect.

    Attributes:
        part: the part of the time breakdown that it reduces.
        seconds: the predicted step time.
        text: one sentence for the user.
    """

    part: str
    seconds: float
    text: str


def advise(step: RecordedStep) -> list[Proposal]:
    """Returns the changes worth making, largest part of the step first; empty if there are none."""
    proposals = []
    for part, propose in _PROPOSALS.items():
        if getattr(step.account, part) > _SMALL * step.account.total:
            proposal = propose(step)
            if proposal is not None and proposal.seconds < (1 - _LEAST_GAIN) * step.account.total:
                proposals.append(proposal)
    proposals.sort(key=lambda proposal: -getattr(step.account, proposal.part))
    return proposals[:_MOST]


def _load_ahead(step: RecordedStep) -> Proposal | None:
    """Suggests more workers: a loader that the step waits for takes as long as the whole step."""
    if step.workers is None:
        return None
    total, rest = step.account.total, step.account.total - step.account.data
    loading = total * max(1, step.workers)
    workers = min(math.ceil(loading / rest), os.cpu_count() or 1)
    return Proposal(
        "data",
        max(rest, loading / workers),
        f"waiting for data takes {_share(step, 'data')} of a step: with "
        f"{setting('workers', workers)} a step would take "
        f"{_times(step, max(rest, loading / workers))}, assuming as many free cores",
    )


def _smaller_microbatches(step: RecordedStep) -> Proposal | None:
    """Suggests twice as many micro-batches of half the size."""
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
        return None  # the gain does not come from the bubble
    return Proposal(
        "bubble",
        seconds,
        f"the bubble is {_share(step, 'bubble')} of a step: {setting('chunks', chunks)} would "
        f"make it {bubble:.0%}, and a step would take {_times(step, seconds)}, if half a "
        "micro-batch takes half the time",
    )


def _even_stages(step: RecordedStep) -> Proposal | None:
    """Suggests a split by the times of layers and the speeds of devices, where they are known."""
    costs, plan = step.costs, step.plan
    if not balances(step.options):  # a list, or the plan that a resumed run keeps
        return None
    times = [f + b for f, b in zip(costs["F"], costs["B"], strict=True)]
    mean = sum(times) / len(times)
    slow = max(range(len(times)), key=times.__getitem__)
    wanted, at_best = [mean] * len(times), "at best "
    if all(cost.forward_ms > 0 for cost in plan.costs):
        with_recompute = _with_recomputation(step)
        stages = stage_costs(with_recompute, plan.counts, plan.on_device, speeds=plan.speeds)
        planned = [stage.forward_ms + stage.backward_ms for stage in stages]
        if (unequal := _unequal_devices(step, times, planned, with_recompute)) is not None:
            return unequal
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
        goal = Objective(speeds=tuple(plan.speeds))
        counts = cut_by_costs(layers, plan.on_device, goal)
        cut = stage_costs(layers, counts, plan.on_device, speeds=plan.speeds)
        wanted = [(stage.forward_ms + stage.backward_ms) / 1e3 for stage in cut]
        at_best = ""
    if step.options.split == "time":  # measured already
        return None
    seconds = _with(step, step.schedule, _scaled(costs, wanted))
    return Proposal(
        "imbalance",
        seconds,
        f"stage {slow} takes {times[slow] / mean:.1f} times as long as the average stage: with "
        f"{setting('split', 'time')} a step would take {at_best}{_times(step, seconds)}",
    )


def _with_recomputation(step: RecordedStep) -> list[LayerCost]:
    """Returns the plan's costs with backwards that include recomputed forwards."""
    costs, chunks = step.plan.costs, step.schedule.chunks
    policy = recompute_policy(step.plan.recompute, [cost.name for cost in costs])
    shares = policy.shares([[cost.forward_ms] for cost in costs], chunks)
    return [
        replace(cost, backward_ms=cost.backward_ms + cost.forward_ms * sum(share) / chunks)
        for cost, share in zip(costs, shares, strict=True)
    ]


def _unequal_devices(
    step: RecordedStep,
    times: Sequence[float],
    planned: Sequence[float],
    layers: Sequence[LayerCost],
) -> Proposal | None:
    """Suggests device speeds, where one device takes longer than another for the same layers.

    The last stage also computes the loss, which the plan does not include. So its device is not
    called slow for that stage.

    Args:
        step: the recorded step.
        times: the seconds of each stage for a micro-batch.
        planned: its milliseconds by the plan, from layers that were measured on one device.
        layers: the costs of the layers for `planned`.
    """
    plan, lane_of = step.plan, step.schedule.lane_of
    if plan.costs_from not in ("measured", "given"):
        return None
    devices, last = range(len(step.schedule.lanes)), len(times) - 1
    rates, assumed = [], []
    for device in devices:
        stages = [stage for stage in range(len(times)) if lane_of[stage] == device]
        assumed.append(plan.speeds[stages[0]])
        stages = [stage for stage in stages if stage != last] or [last]
        seconds = sum(times[stage] for stage in stages)
        rates.append(assumed[device] * sum(planned[stage] for stage in stages) / seconds)
    errors = [rate / speed for rate, speed in zip(rates, assumed, strict=True)]
    of_loss = lane_of[last]
    if list(lane_of.values()).count(of_loss) == 1:  # at least this fast
        errors[of_loss] = max(errors)
        rates[of_loss] = max(rates[of_loss], assumed[of_loss] * errors[of_loss])
    if max(errors) < _UNEQUAL * min(errors):
        return None
    speeds = [round(rate / min(rates), 1) for rate in rates]
    goal = Objective.of(replace(step.options, split="time", device_speeds=speeds))
    counts = find_cut(plan.costs, plan.on_device, goal)
    if counts is None:  # the fast device has too little memory
        return None
    by_stage = [speeds[lane_of[stage]] for stage in range(len(times))]
    cut = stage_costs(layers, counts, plan.on_device, speeds=by_stage)
    # the rate of a device of speed 1, in planned milliseconds per second
    unit = min(rates)
    wanted = [(stage.forward_ms + stage.backward_ms) / unit for stage in cut]
    loss = times[last] - planned[last] * assumed[of_loss] / rates[of_loss]
    wanted[last] += max(0.0, loss)
    seconds = _with(step, step.schedule, _scaled(step.costs, wanted))
    fast, slow = (choose(devices, key=rates.__getitem__) for choose in (max, min))
    by_time = "" if step.options.split == "time" else f" {setting('split', 'time')}"
    return Proposal(
        "imbalance",
        seconds,
        f"device {slow} takes {rates[fast] / rates[slow]:.1f} times as long as device {fast} for "
        f"the same layers: {setting('device_speeds', speeds)}{by_time} would take "
        f"{_times(step, seconds)}",
    )


def _keep_activations(step: RecordedStep) -> Proposal | None:
    """Suggests no recomputation, where the size of the activations is known."""
    sizes = [sum(cost.activation_bytes for cost in stage.layers) for stage in step.plan.stages]
    if not any(sizes):  # not measured
        return None
    moves_inputs = step.options.offload == "inputs"  # which would then move nothing
    held_by = step.plan.in_flight if moves_inputs else step.plan.on_device
    more = max(size * held for size, held in zip(sizes, held_by, strict=True))
    settings = setting("recompute", "never") + f" and {setting('offload', 'none')}" * moves_inputs
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
        f"{settings} would take {_times(step, seconds)}, using up to "
        f"{with_unit(more)} more memory per device",
    )


_PROPOSALS = {
    "data": _load_ahead,
    "bubble": _smaller_microbatches,
    "imbalance": _even_stages,
    "recompute": _keep_activations,
}


def _scaled(costs: Costs, times: Sequence[float]) -> Costs:
    """Returns costs for stages whose forward and backward of a micro-batch take `times` seconds."""
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

    # The difference of two predictions, so that unmodelled time, such as the all-reduce, cancels.
    won = window(step.schedule, step.costs) - window(schedule, costs)
    return step.account.total - step.batches * won


def _share(step: RecordedStep, part: str) -> str:
    return f"{getattr(step.account, part) / step.account.total:.0%}"


def _times(step: RecordedStep, seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms instead of {step.account.total * 1e3:.4g}"
