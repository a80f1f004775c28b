"""The parts of a check that concern a step: order, plan, messages, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.hardware import host_memory
from hybridtrain._base.microbatch import Microbatch
from hybridtrain._base.text_table import counted, with_unit
from hybridtrain.cli.check.report import NotCheckedError
from hybridtrain.cli.check.start import Batches, Model
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
    recompute_policy,
)
from hybridtrain.pipeline import message_formats, messages_of, with_sync_batch_norm
from hybridtrain.price import why_not_priced
from hybridtrain.schedule import Schedule, make_schedule
from hybridtrain.world import World

# A model without values that cannot be cut is built with values if it is below this share of the
# host's memory.
_BUILDS_BELOW = 0.25


def schedule(
    worlds: Sequence[World], pipeline: PipelineOptions
) -> tuple[str, Callable[[int], Schedule]]:
    """Makes the table of a full batch; returns the function that makes one for other batches."""

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
    """Proves the order of each process in each kind of step, and both ends of each message."""
    messages = [messages_of(table(chunks)) for chunks in batches.chunks]
    steps = " and ".join(counted(chunks, "micro-batch", "es") for chunks in batches.chunks)
    text = f"{steps}: complete, in order, no circle"
    if worlds[0].processes_per_replica > 1:
        text += f"; {' and '.join(map(str, messages))} messages per replica, named alike at both "
        text += f"ends, for all {counted(len(worlds), 'rank')}"
    return text, True


@dataclass(frozen=True)
class Cut:
    """A model that is cut into stages.

    Attributes:
        net: the model.
        plan: its plan.
        planned: its layers, by stage.
        example: inputs and targets of a replica's batch.
        again: rebuilds the layers for the inputs of another micro-batch.
    """

    net: nn.Module
    plan: Plan
    planned: PlannedLayers
    example: tuple[Any, Any]
    again: Callable[[Any], PlannedLayers]


def plan(
    config: Config,
    data: DataSplits,
    worlds: Sequence[World],
    pipeline: PipelineOptions,
    model: Model,
    schedule: Callable[[int], Schedule],
) -> tuple[str, Cut]:
    """Cuts the model for the job's devices, with estimated costs in place of measured ones.

    The `schedule` has a table, which the plan holds.
    """
    world = worlds[0]
    example = example_of_run(config, data, world)

    def cut(net: nn.Module) -> Cut:
        net = with_sync_batch_norm(net, world) if pipeline.sync_batch_norm else net
        make = partial(Planner, net, pipeline, owners=world.stage_owners, costs="estimated")
        planner = make(example_inputs=example[0])
        plan = planner.plan()

        def again(inputs: Any) -> PlannedLayers:
            return make(example_inputs=Microbatch(inputs)).layers_of(plan)

        return Cut(net, plan, planner.layers_of(plan), example, again)

    draws = default_generators()
    try:
        found = cut(model.net)
    except Exception:
        if model.nbytes > _BUILDS_BELOW * host_memory():
            raise
        rewind(draws)
        found = cut(model.build())  # as the job does, or the error for a model with values
    names = [layer.name for stage in found.planned.stages for layer in stage]
    recompute_policy(pipeline.recompute, names)
    counts = ", ".join(map(str, found.plan.counts))
    text = f"{counted(len(found.plan.stages), 'stage')} with {counts} layers"
    if found.plan.costs_from == "estimated" and found.plan.split == pipeline.split:
        text += "; by estimated costs, where the job measures them"
    return text, found


def messages(
    data: DataSplits,
    loss_fn: LossFn,
    pipeline: PipelineOptions,
    batches: Batches,
    cut: Cut,
) -> tuple[str, bool]:
    """Runs micro-batches of all sizes through the stages, as fake tensors."""
    sizes = sorted({size for sizes in batches.cuts for size in sizes}, reverse=True)
    function = resolve(loss_fn, cut.net).function
    largest = 0
    for size in sizes:
        inputs, targets = example_batch(data.train, size, data.collate)
        # a graph that holds for some inputs only is traced anew, as a run does
        planned = cut.planned if cut.planned.variants is None else cut.again(inputs)
        loss = LossOfStep(function, targets)
        try:
            formats = message_formats(
                cut.net, planned.stages, inputs, loss, pipeline.precision, size
            )
        except NotOnFakesError as error:
            text = f"layer {error.layer!r}, micro-batch of {counted(size, 'sample')}"
            if error.needs_values:
                raise NotCheckedError(f"{text}: its shapes depend on values") from error
            way_out = "see model=, data= and trainer.loss="
            if size != sizes[0]:
                way_out = "set data.drop_last=true, or another data.batch_size= or pipeline.chunks="
            raise SplitError(f"{text} fails: {error.reason}; {way_out}") from error
        largest = max([largest, *map(_bytes_of, formats)])
    text = f"{counted(len(cut.planned.stages) - 1, 'border')}, "
    text += f"micro-batches of {' and '.join(map(str, sizes))}; the largest message has "
    return text + with_unit(largest), True


def _bytes_of(form: Any) -> int:
    elements = [torch.Size(tensor.shape).numel() for tensor in form.tensors]
    return sum(n * t.dtype.itemsize for n, t in zip(elements, form.tensors, strict=True))


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
    """Compares the predicted peak of each device with what it may use."""
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
            cut.planned.stages,
            cut.example,
            batches.samples,
            resolve(loss_fn, cut.net).function,
        )
    except NotOnFakesError as error:
        raise NotCheckedError(f"layer {error.layer!r} does not run on fake tensors") from error
    memory = prediction.memory_bytes
    assert memory is not None
    hardware = hardware_of_run(priced, world.devices[0], world.nb_part * world.data_parallel_size)
    limits = arrangement_of_run(hardware, world).usable_bytes(hardware, world.nb_part)
    fullest = max(range(len(memory)), key=lambda device: memory[device] / limits[device])
    text = f"{with_unit(memory[fullest])} on the fullest device, {fullest} of the pipeline"
    if not is_known:
        raise NotCheckedError(
            f"{text}; the limit is unknown: set hardware=, or pipeline.memory_limit_gib="
        )
    if over := [number for number, limit in enumerate(limits) if memory[number] > limit]:
        shown = ", ".join(f"device {n} needs {with_unit(memory[n])}" for n in over)
        source = "this machine" if config.hardware is None else "hardware="
        if pipeline.memory_limit_gib is not None:
            source = setting("memory_limit_gib", pipeline.memory_limit_gib)
        raise SplitError(
            f"{shown} of {with_unit(round(limits[over[0]]))} that may be used ({source}): raise "
            f"pipeline.nb_part= or pipeline.chunks=, set pipeline.recompute=always, or lower "
            f"data.batch_size="
        )
    text += f", of {with_unit(round(limits[fullest]))}"
    if prediction.step_ms is not None:
        text += f"; a step of {prediction.step_ms:.0f} ms is predicted"
    return text, True


def _with_hardware(config: Config, worlds: Sequence[World], is_here: bool) -> tuple[Config, bool]:
    """Returns the config with the job's hardware, and whether the memory of a device is known."""
    limit, device = config.pipeline.memory_limit_gib, worlds[0].devices[0].type
    if config.hardware is not None:
        return config, True
    is_one_node = worlds[-1].local_rank == len(worlds) - 1
    if limit is None and is_here and is_one_node and (device == "cpu" or torch.cuda.is_available()):
        return config, True  # of this machine
    hardware = HardwareConfig()
    hardware.device, hardware.reserved_gib = device, 0.0
    hardware.memory_gib = limit if isinstance(limit, int | float) else 1024.0
    return replace(config, hardware=hardware), limit is not None
