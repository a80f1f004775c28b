"""The parts of a check that concern a step: order, plan, messages, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.hardware import host_memory
from hybridtrain._base.text_table import counted, with_unit
from hybridtrain.cli.check.report import NotCheckedError
from hybridtrain.cli.check.start import Batches, Model
from hybridtrain.cli.command_table import listed
from hybridtrain.cli.config.schema import Config, HardwareConfig
from hybridtrain.cli.run.build import example_of_run
from hybridtrain.cli.run.hardware import arrangement_of_run, hardware_of_run
from hybridtrain.cli.run.prediction import predict_step_of_run
from hybridtrain.data import DataSplits, example_batch
from hybridtrain.errors import SplitError, setting
from hybridtrain.loss import LossFn, resolve
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LossOfStep,
    NotOnFakesError,
    Plan,
    PlannedLayers,
    Planner,
    count_layers,
    recompute_policy,
)
from hybridtrain.pipeline import messages_of, with_sync_batch_norm
from hybridtrain.price import why_not_priced
from hybridtrain.schedule import Schedule, make_schedule
from hybridtrain.world import World

# If a model on meta tensors cannot be split, and it takes less than this fraction of host memory,
# it is built with values.
_BUILDS_BELOW = 0.25


def schedule(
    worlds: Sequence[World], pipeline: PipelineOptions
) -> tuple[str, Callable[[int], Schedule]]:
    """Makes the table of a full batch; returns a function that makes tables for other batches."""

    def table(chunks: int) -> Schedule:
        return make_schedule(
            pipeline.schedule,
            worlds[0].nb_part,
            chunks,
            pipeline.stages_per_device,
            pipeline.max_inflight,
        )

    full = table(pipeline.chunks)
    return f"{pipeline.schedule} of {counted(full.stages, 'stage')}", table


def order(
    worlds: Sequence[World],
    batches: Batches,
    table: Callable[[int], Schedule],
) -> tuple[str, bool]:
    """Checks the order of actions on each process, and that sends match receives, in any step."""
    messages = [messages_of(table(chunks)) for chunks in batches.chunks]
    *others, last = batches.chunks
    steps = listed([*map(str, others), counted(last, "micro-batch", "es")])
    text = f"{steps}: complete, in order, no deadlock"
    if worlds[0].processes_per_replica > 1:
        text += f"; {listed([*map(str, messages)])} messages per replica, sends match receives "
        text += f"on all {counted(len(worlds), 'rank')}"
    return text, True


@dataclass(frozen=True)
class Cut:
    """A model that is split into stages.

    Attributes:
        net: the model.
        plan: its plan.
        planned: its layers, by stage.
        example: inputs and targets of a replica's batch.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers
    example: tuple[Any, Any]


def plan(
    config: Config,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    model: Model,
    schedule: Callable[[int], Schedule],
) -> tuple[str, Cut]:
    """Splits the model for the job's devices, with estimated costs instead of measured ones.

    It depends on `schedule`, because the plan contains the schedule's table.
    """
    world = worlds[0]
    example = example_of_run(config, data, world)

    def cut(net: nn.Module) -> Cut:
        net = with_sync_batch_norm(net, world) if pipeline.sync_batch_norm else net
        make = partial(
            Planner,
            net,
            pipeline,
            owners=world.stage_owners,
            costs="estimated",
        )
        planner = make(example_inputs=example[0])
        plan = planner.plan()

        return Cut(net, plan, planner.layers_of(plan), example)

    draws = default_generators()
    try:
        result = cut(model.net)
    except Exception:
        if model.nbytes > _BUILDS_BELOW * host_memory():
            raise
        rewind(draws)
        result = cut(model.build())  # as the job does, or the error for a model with values
    names = [layer.name for stage in result.planned.stages for layer in stage]
    recompute_policy(pipeline.recompute, names)
    counts = ", ".join(map(str, result.plan.counts))
    text = f"{counted(len(result.plan.stages), 'stage')} with {counts} layers"
    if result.plan.costs_from == "estimated" and result.plan.split == pipeline.split:
        text += "; from estimated costs (the job measures them)"
    return text, result


def messages(
    data: DataSplits,
    loss_fn: LossFn,
    pipeline: PipelineOptions,
    batches: Batches,
    cut: Cut,
) -> tuple[str, bool]:
    """Runs micro-batches of all sizes through the stages, with fake tensors."""
    sizes = sorted({size for sizes in batches.cuts for size in sizes}, reverse=True)
    function = resolve(loss_fn, cut.net).function
    largest = 0
    for size in sizes:
        inputs, targets = example_batch(data.train, size, data.collate)
        loss = LossOfStep(function, targets, pipeline.head)
        try:
            largest = max([largest, *_message_bytes(cut.planned, inputs, loss, pipeline)])
        except NotOnFakesError as error:
            text = f"layer {error.layer!r}, micro-batch of {counted(size, 'sample')}"
            if error.needs_values:
                raise NotCheckedError(f"{text}: its shapes depend on values") from error
            advice = "check model=, data= and trainer.loss="
            if size != sizes[0]:
                advice = "set data.drop_last=true, or change data.batch_size= or pipeline.chunks="
            raise SplitError(f"{text} fails: {error.reason}; {advice}") from error
    text = f"{counted(len(cut.planned.stages), 'stage')}, "
    text += f"micro-batches of {listed([*map(str, sizes)])}; the largest message has "
    return text + with_unit(largest), True


def _message_bytes(
    planned: PlannedLayers, inputs: Any, loss: LossOfStep, pipeline: PipelineOptions
) -> list[int]:
    """Returns the bytes that cross each border between two stages in a forward.

    Raises:
        NotOnFakesError: a layer, or the loss, fails for these inputs.
    """
    counted = count_layers(planned.layers, inputs, pipeline.precision, loss)
    borders = list(accumulate(map(len, planned.stages)))[:-1]
    return [counted[border - 1].cost.crossing_bytes for border in borders]


def memory(
    config: Config,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    loss_fn: LossFn,
    batches: Batches,
    cut: Cut,
    is_here: bool,
) -> tuple[str, bool]:
    """Compares each device's predicted peak memory with its limit."""
    world = worlds[0]
    if (reason := why_not_priced(pipeline)) is not None:
        raise NotCheckedError(reason)
    priced, is_known = _with_hardware(config, worlds, is_here)
    try:
        prediction = predict_step_of_run(
            priced,
            world,
            pipeline,
            data,
            cut.planned,
            cut.example,
            batches.samples,
            resolve(loss_fn, cut.net).function,
        )
    except NotOnFakesError as error:
        raise NotCheckedError(f"layer {error.layer!r} cannot run on fake tensors") from error
    memory = prediction.memory_bytes
    assert memory is not None
    hardware = hardware_of_run(priced, world.devices[0], world.nb_part * world.data_parallel_size)
    limits = arrangement_of_run(hardware, world).usable_bytes(hardware, world.nb_part)
    fullest = max(range(len(memory)), key=lambda device: memory[device] / limits[device])
    text = f"{with_unit(memory[fullest])} on device {fullest}, the most loaded one"
    if not is_known:
        raise NotCheckedError(
            f"{text}; its limit is unknown: set hardware=, or pipeline.memory_limit_gib="
        )
    if over := [number for number, limit in enumerate(limits) if memory[number] > limit]:
        shown = ", ".join(f"device {n} needs {with_unit(memory[n])}" for n in over)
        source = "this machine" if config.hardware is None else "hardware="
        if pipeline.memory_limit_gib is not None:
            source = setting("memory_limit_gib", pipeline.memory_limit_gib)
        recompute = "" if pipeline.recompute == "always" else "set pipeline.recompute=always, "
        raise SplitError(
            f"{shown}, more than the usable {with_unit(round(limits[over[0]]))} ({source}): raise "
            f"pipeline.nb_part= or pipeline.chunks=, {recompute}or lower data.batch_size="
        )
    text += f", of {with_unit(round(limits[fullest]))}"
    if prediction.step_ms is not None:
        text += f"; predicted step time {prediction.step_ms:.0f} ms"
    return text, True


def _with_hardware(config: Config, worlds: Sequence[World], is_here: bool) -> tuple[Config, bool]:
    """Returns the config with the job's hardware, and whether a device's memory is known."""
    limit, device = config.pipeline.memory_limit_gib, worlds[0].devices[0].type
    if config.hardware is not None:
        return config, True
    is_one_node = worlds[-1].local_rank == len(worlds) - 1
    if limit is None and is_here and is_one_node and (device == "cpu" or torch.cuda.is_available()):
        return config, True  # this machine
    hardware = HardwareConfig()
    hardware.device, hardware.reserved_gib = device, 0.0
    hardware.memory_gib = limit if isinstance(limit, int | float) else 1024.0
    return replace(config, hardware=hardware), limit is not None
