"""Lower bounds of the time of a step, in closed form: for any schedule, and for any cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridtrain._base.hardware import Hardware
from hybridtrain.partitioning import CostTable
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.price.stage_needs import StageTimes, action_ms, microbatch_ms, most_in_flight


def least_step_ms(
    work: StepWork, layout: ParallelLayout, times: StageTimes, optimizer: float
) -> float:
    """Returns a lower bound of the step time in milliseconds, for any schedule."""
    data = work.data_ms_per_sample * work.samples * work.accumulate / layout.replicas
    return max(least_batch_ms(layout, times) * work.accumulate + optimizer, data)


def least_batch_ms(layout: ParallelLayout, times: StageTimes) -> float:
    """Returns a lower bound of a batch's milliseconds, for any schedule of these stages.

    Device d cannot begin before the first micro-batch has passed the devices before it. Then it
    computes all its actions, and after its last backward the gradient passes those devices again.
    If it may hold n micro-batches, every n of them take at least the time of one micro-batch from
    d to the last device and back.
    """
    through = 0.0
    least = 0.0
    # with two-part backwards, the weight parts may run after the gradients have gone back
    whole = not layout.splits_backwards
    in_flight = most_in_flight(layout) if layout.stages_per_device == 1 and whole else ()
    end_to_end = sum(times.whole) + 2 * sum(times.transfer)
    busy = layout.by_device(times.whole)
    for device in range(layout.nb_part):
        least = max(least, through + busy[device] * layout.microbatches)
        if in_flight:
            rounds = 1 + (layout.microbatches - 1) // in_flight[device]
            least = max(least, through + (end_to_end - through) * rounds)
        through += times.forward[device] + whole * times.backward[device]
        if device < len(times.transfer):
            through += (1 + whole) * times.transfer[device]
    return max(least, host_bound_ms(layout, times))


def host_bound_ms(
    layout: ParallelLayout, times: StageTimes, divided: Sequence[float] | None = None
) -> float:
    """Returns the milliseconds of the process that launches the most operators.

    The threads of `engine=local` take turns in one interpreter.

    Args:
        layout: the parallel layout.
        times: the times of its stages.
        divided: the number of backwards of each stage that run in two parts; None: no backward.
    """
    calls_ms = [host * layout.microbatches for host in times.host]
    if divided is not None:
        split_calls = zip(calls_ms, times.host_in_parts, divided, strict=True)
        calls_ms = [host + extra * number for host, extra, number in split_calls]
    by_device = layout.by_device(calls_ms)
    return sum(by_device) if layout.engine != "distributed" else max(by_device)


class AllLayers(NamedTuple):
    """Milliseconds of a forward and a backward of a micro-batch, in all layers of a model.

    Attributes:
        sum_ms: all layers on one device.
        largest_ms: the slowest layer.
        host_ms: the host's calls of all operators.
    """

    sum_ms: float
    largest_ms: float
    host_ms: float

    @staticmethod
    def of(table: CostTable, samples: int, recomputed: float) -> AllLayers:
        """Returns the times of these costs, with each forward `recomputed` times."""
        times = [
            cost.forward_ms * (1 + recomputed) + cost.backward_ms
            for cost in table.costs_at(samples)
        ]
        calls = [(1 + recomputed) * forward + backward for forward, backward in table.host_ms]
        return AllLayers(sum(times), max(times), sum(calls))


def least_step_ms_of_any_cut(
    layers: AllLayers, hardware: Hardware, work: StepWork, layout: ParallelLayout
) -> float:
    """Returns a lower bound of the step time in milliseconds, for any schedule and any cut.

    With the best cut all devices are equally busy, and so are the processes that call their
    operators. Small models are bound by these calls: without them, the search would have to cut
    the model for nearly all layouts.
    """
    busy = max(layers.sum_ms / sum(layout.speeds), layers.largest_ms / max(layout.speeds))
    busy *= layout.microbatches
    is_equal = len(set(layout.speeds)) == 1
    if layout.stages_per_device == 1 and not layout.splits_backwards and is_equal:
        of_speed = layers.sum_ms / layout.speeds[0]
        busy = max(busy, _least_with_idle_time(of_speed, layout.nb_part, layout.microbatches))
    actions = [2 * action_ms(hardware, layout, stage) for stage in range(layout.stages)]
    processes = layout.nb_part if layout.engine == "distributed" else 1
    begins = [microbatch_ms(hardware, layout, stage) for stage in range(layout.stages)]
    host = (layers.host_ms + sum(actions) + sum(begins)) * layout.microbatches / processes
    load = work.data_ms_per_sample * work.samples / layout.replicas
    return max(busy, host, load) * work.accumulate


def _least_with_idle_time(whole: float, stages: int, chunks: int) -> float:
    """Returns the least time of a batch, with one stage per device and whole backwards.

    Stage `s` takes `t[s]` per micro-batch. It begins when the first micro-batch has passed the
    stages before it, and their backwards follow its last backward. So a batch of `m` micro-batches
    takes at least `t[0] + ... + t[s-1] + m t[s]`. The maximum over `s` is smallest, M, if all are
    equal: `t[s] = M / m * (1 - 1 / m) ** s`, and these add up to `whole`.
    """
    return whole / (1 - (1 - 1 / chunks) ** stages)
