"""The predicted numbers of the one layout that a run has."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from hybridtrain._base.hardware import GIB, Hardware
from hybridtrain.errors import setting
from hybridtrain.graph import Layer
from hybridtrain.options import PRECISIONS, PipelineOptions
from hybridtrain.partitioning import (
    CalledLayers,
    LayerCost,
    LossOfStep,
    counted_costs_of_one_size,
    given_costs,
    layer_sizes,
    state_of,
)
from hybridtrain.price.layout import ParallelLayout, StepWork
from hybridtrain.price.price import price
from hybridtrain.price.stage_needs import DeviceMemory, device_memory, stage_times

# A placeholder rate where only memory is predicted.
_ANY_RATE = 1e12


@dataclass(frozen=True)
class Prediction:
    """The predicted numbers of a step; None for an unknown number, with the reason.

    Attributes:
        step_ms: the milliseconds of an optimizer step.
        bubble: the share of the devices' time in the pipeline in which they are idle, 0 to 1.
        memory_bytes: the peak memory of each device of a replica, in pipeline order.
        costs_from: the source of the layers' times: `measured` or `estimated`.
        reason: why a number is None.
        host_bound: whether the devices wait for the host more than for anything else.
    """

    step_ms: float | None = None
    bubble: float | None = None
    memory_bytes: tuple[int, ...] | None = None
    costs_from: str | None = None
    reason: str | None = None
    host_bound: bool = False


def predict_step(
    layers: Sequence[Layer],
    counts: Sequence[int],
    microbatch: Any,
    hardware: Hardware,
    work: StepWork,
    layout: ParallelLayout,
    measured: Sequence[LayerCost] | None = None,
    *,
    precision: str = "fp32",
    tf32: bool = False,
    loss: LossOfStep | None = None,
    recomputed: Set[int] = frozenset(),
    gpus: Sequence[int] = (),
) -> Prediction:
    """Predicts a step of a model that is already cut, without running a kernel.

    Args:
        layers: the layers of the model, also on the meta device.
        counts: the number of layers of each stage.
        microbatch: the inputs of the first micro-batch; only shapes and types matter.
        hardware: the devices and links. Without a rate for the precision only memory is predicted,
            unless `measured` is given.
        work: the work of a step.
        layout: the parallel layout.
        measured: measured costs of all layers for such a micro-batch; None: count them.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: whether fp32 matrix products run in TF32.
        loss: the loss that ends the last stage; None, or with measured costs: left out.
        recomputed: the indices of the layers that are recomputed individually.
        gpus: the GPU of each device of a pipeline, by its index; empty: all differ. Devices that
            share a GPU compute one after the other, and their idle time is not predicted.

    Raises:
        SplitError: a layer does not run on fake tensors.
    """
    if measured is not None:
        table = replace(given_costs(lambda _: measured, layer_sizes(layers)), costs_from="measured")
    else:
        rates = hardware.flops_per_s or dict.fromkeys((*PRECISIONS, "tf32"), _ANY_RATE)
        rated_hardware = replace(hardware, flops_per_s=rates)
        table = counted_costs_of_one_size(layers, microbatch, rated_hardware, precision, tf32, loss)
    if isinstance(layers, CalledLayers):
        state = state_of(work.optimizer_tensors_per_param, layers.net)
        table = replace(table, sizes=layer_sizes(layers, state))
    table = table.recomputing(recomputed)
    if measured is None and not hardware.flops_per_s:
        return Prediction(
            memory_bytes=_as_measured(
                device_memory(table, hardware, work, layout, counts), hardware, gpus
            ),
            reason="to predict times, run `hybridtrain measure-machine` or set "
            f"{setting('split', 'time')}",
        )
    priced = price(table, hardware, work, layout, counts)
    memory = _as_measured(priced.memory, hardware, gpus)
    step_ms = priced.step_ms
    bubble: float | None = priced.bubble
    if len(set(gpus)) < len(gpus):
        times = stage_times(table, hardware, work, layout, counts)
        busy_ms = [0.0] * (max(gpus) + 1)
        for gpu, device_ms in zip(gpus, layout.by_device(times.device), strict=True):
            busy_ms[gpu] += device_ms * layout.microbatches * work.accumulate
        step_ms += max(0.0, max(busy_ms) - priced.pipeline_ms)
        bubble = None
    host_bound = priced.binds.startswith("host")
    return Prediction(step_ms, bubble, memory, table.costs_from, host_bound=host_bound)


def _as_measured(
    memory: Sequence[DeviceMemory], hardware: Hardware, gpus: Sequence[int]
) -> tuple[int, ...]:
    """Returns the predicted peak of each device, counted as a run measures it.

    The allocator counts all that is on a GPU, also for several devices of a pipeline.
    """
    if hardware.device == "cpu":
        return tuple(m.kept for m in memory)
    gpus = gpus or range(len(memory))
    once = round(hardware.library_gib * GIB)  # one thread per GPU runs backwards
    totals = dict.fromkeys(gpus, once)
    for gpu, device in zip(gpus, memory, strict=True):
        totals[gpu] += device.total - once
    return tuple(totals[gpu] for gpu in gpus)


def why_not_priced(options: PipelineOptions) -> str | None:
    """Returns which of `options` a price does not cover, as text; None: it covers all."""
    if options.compile:
        return f"{setting('compile', True)} is not priced"
    if options.attention == "math":  # it saves a matrix for each head, which fused kernels do not
        return f"{setting('attention', 'math')} is not priced"
    if options.max_inflight is not None:
        return f"{setting('max_inflight', options.max_inflight)} is not priced"
    return None
