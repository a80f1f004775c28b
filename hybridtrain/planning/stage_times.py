"""The times of the stages of a layout: their actions, and the messages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hybridtrain.machine import Machine
from hybridtrain.planning.cost_table import CostTable
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.layout import Job, Layout
from hybridtrain.planning.plan import durations_of
from hybridtrain.schedule import Durations, placement_of

# The host's time for a backward in two parts, over that for a whole one: the graph is walked once,
# and each node with weights is called by itself.
SPLIT_HOST = 2.5


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of each stage for one micro-batch, and of each border between two stages.

    `weight` is the part of `backward` that a schedule may put off.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    host: tuple[float, ...]
    recompute: tuple[float, ...]

    @property
    def durations(self) -> Durations:
        """The times that a schedule is simulated with."""
        return Durations(self.forward, self.backward, self.weight, self.transfer)


def stage_times(
    table: CostTable, machine: Machine, job: Job, layout: Layout, counts: Sequence[int]
) -> StageTimes:
    """Returns how long the actions of each stage take, and the messages between stages."""
    costs = table.costs_at(layout.samples(job))
    again = layout.recomputed
    forward, backward, weight, host, recompute = [], [], [], [], []
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        own, called = costs[start:end], table.host_ms[start:end]
        f, b = sum(c.forward_ms for c in own), sum(c.backward_ms for c in own)
        action = _action_ms(machine, layout, stage)
        # the first stage's input needs no gradient: its backward is to the weights alone
        in_two = layout.splits_backwards and stage > 0
        # a GPU computes meanwhile; a CPU does not
        before = action if machine.device == "cpu" else 0.0
        host_f = sum(f for f, _ in called) + action
        host_b = sum(b for _, b in called) * (SPLIT_HOST if in_two else 1.0) + (1 + in_two) * action
        forward.append(max(f + before, host_f))
        backward.append(
            max(b + again * f + (1 + in_two) * before, host_b + again * (host_f - action))
        )
        # what is recomputed is not divided
        weight.append((0.5 if in_two else 1.0) * backward[-1] if layout.splits_backwards else 0.0)
        host.append(host_f + host_b + again * (host_f - action))
        recompute.append(again * f)
    cuts = list(accumulate(counts))[:-1]
    transfer = [
        _transfer_ms(machine, layout, border, costs[cut - 1].crossing_bytes)
        for border, cut in enumerate(cuts)
    ]
    return StageTimes(*map(tuple, (forward, backward, weight, transfer, host, recompute)))


def planned_durations(
    table: CostTable, machine: Machine, job: Job, layout: Layout, counts: Sequence[int]
) -> Durations:
    """Returns the durations for which a run with the plan of this layout searches its schedule."""
    costs = planned_costs(table, machine, job, layout, counts)
    placement = placement_of(layout.schedule)
    durations = durations_of(costs, counts, layout.checkpoint, layout.nb_part, placement)
    return durations or Durations.equal(len(counts))


def planned_costs(
    table: CostTable, machine: Machine, job: Job, layout: Layout, counts: Sequence[int]
) -> list[LayerCost]:
    """Returns the costs that the plan of this layout has, with the times of its messages."""
    costs = list(table.costs_at(layout.samples(job)))
    for border, cut in enumerate(list(accumulate(counts))[:-1]):
        ms = _transfer_ms(machine, layout, border, costs[cut - 1].crossing_bytes)
        costs[cut - 1] = replace(costs[cut - 1], crossing_ms=ms)
    return costs


def _action_ms(machine: Machine, layout: Layout, stage: int) -> float:
    """Returns the host's time for a forward or backward of `stage`, beside its operators.

    With a process for each device, what comes from another stage is received and what goes to
    another is sent.
    """
    messages = (stage > 0) + (stage < layout.stages - 1)
    if layout.engine == "local" or layout.nb_part == 1:
        messages = 0
    return (machine.action_s + messages * machine.message_s) * 1e3


def _transfer_ms(machine: Machine, layout: Layout, border: int, nbytes: float) -> float:
    """Returns the time of a message from stage `border` to the next one."""
    device, to = layout.device_of(border), layout.device_of(border + 1)
    in_node = machine.devices_per_node
    if device == to or (layout.engine == "local" and machine.device == "cpu"):
        return 0.0
    return machine.transfer_s(nbytes, device // in_node != to // in_node) * 1e3
