"""The prediction of a run, made before its first step, from what is known without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridtrain.graph.layer import Layer
from hybridtrain.machine import Machine
from hybridtrain.options import CHECKPOINT_MODES, PRECISIONS, PipelineOptions
from hybridtrain.planning.cost_table import (
    CostTable,
    counted_costs_of_one_size,
    given_costs,
    layer_sizes,
)
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.device_memory import device_memory
from hybridtrain.planning.layout import Job, Layout
from hybridtrain.planning.price import price

# A rate for where none counts.
_ANY_RATE = 1e12


@dataclass(frozen=True)
class Prediction:
    """The numbers that a step is predicted to have; None where not known, with the reason.

    Attributes:
        step_ms: an optimizer step, in milliseconds.
        bubble: the share of the devices' time in the pipeline in which they wait.
        memory_bytes: the peak of each device of a replica, in the order of the pipeline.
        costs_from: where the layers' times are from: `measured` or `estimated`.
        reason: why something is None.
    """

    step_ms: float | None = None
    bubble: float | None = None
    memory_bytes: tuple[int, ...] | None = None
    costs_from: str | None = None
    reason: str | None = None


def predict_step(
    stages: Sequence[Sequence[Layer]],
    microbatch: Any,
    machine: Machine,
    job: Job,
    layout: Layout,
    measured: Sequence[LayerCost] | None = None,
    *,
    precision: str = "fp32",
    tf32: bool = False,
) -> Prediction:
    """Predicts a step of a model that is cut already; no layer runs.

    Args:
        stages: the layers of each stage, also on the meta device.
        microbatch: the inputs of the first micro-batch, of which shapes and types count.
        machine: the hardware; without a rate for the precision, the memory alone is predicted,
            unless the costs are measured.
        job: the work of a step.
        layout: how the model is spread.
        measured: the costs of all layers for such a micro-batch. None: they are counted.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.

    Raises:
        SplitError: a layer does not run on fake tensors.
    """
    layers = [layer for stage in stages for layer in stage]
    counts = [len(stage) for stage in stages]
    if measured is not None:
        table = replace(given_costs(lambda _: measured, layer_sizes(layers)), costs_from="measured")
    else:
        known = machine.flops_per_s or dict.fromkeys((*PRECISIONS, "tf32"), _ANY_RATE)
        counted_on = replace(machine, flops_per_s=known)
        table = counted_costs_of_one_size(layers, microbatch, counted_on, precision, tf32)
        if not machine.flops_per_s:
            return _memory_alone(table, job, layout, counts)
    found = price(table, machine, job, layout, counts)
    memory = tuple(each.total for each in found.memory)
    return Prediction(found.step_ms, found.bubble, memory, table.costs_from)


def _memory_alone(table: CostTable, job: Job, layout: Layout, counts: Sequence[int]) -> Prediction:
    memory = tuple(each.total for each in device_memory(table, job, layout, counts))
    return Prediction(
        memory_bytes=memory,
        reason="`hybridtrain measure-machine`, once, or split=time would give the times",
    )


def why_not_priced(options: PipelineOptions) -> str | None:
    """Returns what of `options` the price of a step leaves out; None: nothing."""
    if options.compile:
        return "compile=true is not priced"
    if options.max_inflight is not None:
        return f"max_inflight={options.max_inflight} is not priced"
    if options.checkpoint not in CHECKPOINT_MODES:
        return f"checkpoint={options.checkpoint} is not priced: only whole stages are"
    return None
