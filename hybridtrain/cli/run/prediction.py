"""The prediction of a run's step, and its comparison with the measured step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from operator import mul
from typing import Any

from hybridtrain._base.construction import default_generators, rewind
from hybridtrain._base.microbatch import chunk_sizes
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain._base.summation_tree import most_waiting
from hybridtrain._base.text_table import with_unit
from hybridtrain.cli.config.schema import Config
from hybridtrain.cli.run.context import RunContext
from hybridtrain.cli.run.hardware import arrangement_of_run, hardware_of_run
from hybridtrain.data import DataSplits, largest_batch, length_of
from hybridtrain.loss import LossFn
from hybridtrain.options import PipelineOptions
from hybridtrain.partitioning import (
    LayerCost,
    LossOfStep,
    Plan,
    PlannedLayers,
    priced_mode,
    recompute_policy,
)
from hybridtrain.price import (
    ParallelLayout,
    Prediction,
    StepWork,
    predict_step,
    why_not_priced,
)
from hybridtrain.schedule import Schedule, fullest_moments, peak_in_flight
from hybridtrain.world import World

_log = logging.getLogger(__name__)


def predict_run(context: RunContext) -> Prediction:
    """Returns the predicted time and memory of a step; only rank 0 needs it.

    It uses the costs measured for the split, or else FLOPs and bytes. An error here does not end
    the run.
    """
    if (reason := why_not_priced(context.model.options)) is not None:
        return Prediction(reason=reason)
    try:
        with without_errors_of_fake_tensors():
            return _prediction_of(context)
    except Exception as error:  # also from the user's layers, which run on fake tensors
        _log.debug("no prediction", exc_info=True)
        message = str(error).partition("\n")[0]
        return Prediction(reason=f"{type(error).__name__}: {message}")


def _prediction_of(context: RunContext) -> Prediction:
    model, samples = context.model, context.config.data["batch_size"]
    if there := length_of(context.data.train):
        samples = min(samples, there)  # a smaller data set is one batch
    assert context.options.loss_fn is not None  # of a run that trains
    return predict_step_of_run(
        context.config,
        context.world,
        model.options,
        context.data,
        model.planned,
        (context.example_inputs, context.example_targets),
        samples,
        model.resolve_loss(context.options.loss_fn).function,
        _measured_costs(context),
    )


def predict_step_of_run(
    config: Config,
    world: World,
    options: PipelineOptions,
    data: DataSplits,
    planned: PlannedLayers,
    example: tuple[Any, Any],
    samples: int,
    loss_fn: LossFn,
    measured: Sequence[LayerCost] | None = None,
) -> Prediction:
    """Predicts a step with batches of `samples`, of which `example` is a replica's share."""
    hardware = hardware_of_run(config, world.devices[0], world.nb_part * world.data_parallel_size)
    sizes = chunk_sizes(max(world.samples_by_replica(samples)), options.chunks)
    layout = ParallelLayout(
        nb_part=world.nb_part,
        replicas=world.data_parallel_size,
        engine=world.engine,
        chunks=len(sizes),
        schedule=options.schedule,
        stages_per_device=options.stages_per_device,
        recompute=priced_mode(options.recompute),
        shard=options.shard if world.data_parallel_size > 1 else "none",
        arrangement=arrangement_of_run(hardware, world),
        offload=options.offload,
        owned_replicas=len(world.owned_replicas),
        gradient_sums=most_waiting(world.owned_replicas, world.logical_replicas),
    )
    names = [layer.name for layer in planned.layers]
    first = tuple(split_batch(tree, sizes)[0] for tree in example)
    draws = default_generators()
    inputs, targets = largest_batch(data.train, sizes[0], data.collate, first)
    rewind(draws)  # transforms may draw
    return predict_step(
        planned.layers,
        [len(stage) for stage in planned.stages],
        inputs,
        hardware,
        StepWork(samples, config.trainer.accumulate, options.optimizer_tensors_per_param),
        layout,
        measured,
        precision=options.precision,
        tf32=config.trainer.tf32,
        loss=LossOfStep(loss_fn, targets, "fused" if planned.head.names else "plain"),
        recomputed=recompute_policy(options.recompute, names).layers,
        gpus=_gpus_of(world),
    )


def _gpus_of(world: World) -> list[int]:
    """Returns the GPU of each device of this process's pipeline; empty: they differ, or are CPUs.

    Each process of `engine=distributed` has an allocator of its own.
    """
    devices = world.devices
    if world.engine == "distributed" or devices[0].type != "cuda":
        return []
    return [list(dict.fromkeys(devices)).index(device) for device in devices]


def _measured_costs(context: RunContext) -> list[LayerCost] | None:
    """Returns the plan's costs if they were measured for the run's micro-batch size."""
    plan = context.model.plan
    split = context.model.options.split
    if plan.costs_from != "measured":
        return None
    if isinstance(split, str) and split.endswith((".yaml", ".yml")):  # an earlier plan
        batch_has_changed = any(c.key == "data.batch_size" for c in context.settings.changes)
        if batch_has_changed or Plan.read(split).chunks != plan.chunks:
            return None
    names = [layer.name for layer in context.model.planned.layers]
    if names != [cost.name for cost in plan.costs]:  # a plan with finer or coarser layers
        return None
    return plan.costs


@contextmanager
def without_errors_of_fake_tensors() -> Iterator[None]:
    """Silences the log of fake tensors: a layer that fails raises its error at run time."""
    fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = fake_tensors.disabled
    fake_tensors.disabled = True
    try:
        yield
    finally:
        fake_tensors.disabled = was_disabled


def beside_measured(
    prediction: Prediction, summary: Mapping[str, Any], table: Schedule
) -> dict[str, Any]:
    """Returns `predicted` and `measured` with the same keys, for `summary.json`.

    Args:
        prediction: the prediction of a step.
        summary: the summary of the run.
        table: the schedule of a full batch.
    """
    measured = {
        "step_ms": summary["step_ms"]["p50"],
        "bubble": summary["bubble_fraction"],
        "memory_bytes": _by_device(summary, table),
    }
    return {"predicted": asdict(prediction), "measured": measured}


def _by_device(summary: Mapping[str, Any], table: Schedule) -> list[int]:
    """Returns the peak bytes of each device.

    For CPU stages, the summary counts bytes at each stage's own peak; the table accounts for the
    stages of a device peaking at different times. All stages of a GPU report the allocator's peak.
    """
    in_flight, peak_bytes = peak_in_flight(table), []
    for device, moments in enumerate(fullest_moments(table)):
        stages = [stage for stage in range(table.stages) if table.lane_of[stage] == device]
        peaks = [summary["stages"][stage]["peak_memory_bytes"] for stage in stages]
        if summary["device_memory"]:
            peak_bytes.append(max(peaks))
            continue
        sizes = [summary["stages"][stage].get("microbatch_bytes", 0) for stage in stages]
        at_peaks = sum(
            in_flight[stage] * nbytes for stage, nbytes in zip(stages, sizes, strict=True)
        )
        together = max(sum(map(mul, moment.inputs, sizes)) for moment in moments)
        peak_bytes.append(sum(peaks) - at_peaks + together)
    return peak_bytes


def prediction_in_words(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """Returns prediction and measurement in one line."""
    parts = []
    pairs = {key: (predicted[key], measured[key]) for key in measured}
    if None not in (steps := pairs["step_ms"]):
        limit = ", limited by the host" if predicted["host_bound"] else ""
        parts.append(f"predicted {steps[0]:.1f} ms{limit}, measured {steps[1]:.1f} ms per step")
    if None not in (bubbles := pairs["bubble"]):
        parts.append("idle {:.0%} predicted, {:.0%} measured".format(*bubbles))
    if None not in (memory := pairs["memory_bytes"]):
        fullest = max(range(len(memory[1])), key=memory[1].__getitem__)
        expected, peak = (with_unit(by_device[fullest]) for by_device in memory)
        parts.append(f"memory of device {fullest}: {expected} predicted, {peak} measured")
    if predicted["costs_from"] is not None:
        parts.append(f"from {predicted['costs_from']} costs")
    if predicted["reason"] is not None:
        missing = "no prediction" if not parts else "no prediction of the step time"
        parts.append(f"{missing}: {predicted['reason']}")
    return "; ".join(parts)
