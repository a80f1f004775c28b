"""Estimated costs that one measurement corrects: that of the layer which the model repeats most.

The layers of a transformer are copies of each other. How far a device is from the rates that it
was described with is much the same for all of them, so that one, measured, tells it of the rest.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain.graph.chain import Chain
from hybridtrain.machine import Machine
from hybridtrain.planning.cost_table import CostTable, costs_of_two_sizes, count_layers, two_sizes
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.estimates import CountedLayer, Rates
from hybridtrain.planning.profiler import LayerProfiler
from hybridtrain.precision import autocast

log = logging.getLogger("hybridtrain")


@dataclass(frozen=True)
class Calibration:
    """The times that a device takes, as multiples of those that are estimated for it.

    Attributes:
        forward: of a forward.
        backward: of a backward.
        contention: see `CostTable.contention_at`.
    """

    forward: float
    backward: float
    contention: float = 1.0


def calibrated_costs(
    chain: Chain,
    example_inputs: Any,
    machine: Machine,
    device: torch.device,
    precision: str,
    tf32: bool = False,
    *,
    sharing: int = 1,
    seconds: float = 1.0,
) -> CostTable:
    """Returns the counted costs, corrected by the times of the layer that is repeated most.

    That is, of the groups of equal layers, the first layer of the one that should take longest as a
    whole. It runs alone, on random values in the shapes that it has in the model.

    Args:
        chain: the model; parameters may be on the meta device.
        example_inputs: the inputs of one batch, as large as a micro-batch may become.
        machine: the rates of the estimate.
        device: where the layer runs.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.
        sharing: devices that run at one time, and share this process's intra-op threads, as CPU
            stages do.
        seconds: how long it is timed for each of two sizes of a micro-batch, about.

    Raises:
        SplitError: a layer does not run on fake tensors.
        ConfigError: the machine has no rate for this precision.
    """
    rates = Rates.of(machine, precision, tf32)
    sizes, batches = two_sizes(example_inputs)
    tables, slower = [], []
    for batch in batches:
        counted = count_layers(chain.layers, batch, precision)
        index, equal = _most_repeated(counted, rates)
        estimates = [_with_host(layer, rates) for layer in counted]
        profiler = LayerProfiler(
            [chain.layers[index]],
            tree_map_only(Tensor, partial(_values_like, device=device), counted[index].given[0]),
            [device] * sharing,
            precision=partial(autocast, precision, device.type),
            optimizer_tensors_per_param=0,
        )
        profiler.repeat(seconds)
        (measured,) = profiler.costs()
        found = _calibration(measured, estimates[index], profiler.contention())
        tables.append([_corrected(cost, found) for cost in estimates])
        slower.append(found.contention)
    log.info(
        "calibrated by layer %s, one of %d equal ones: a forward takes %.2f times its estimate, "
        "a backward %.2f times",
        chain.layers[index].name,
        equal,
        found.forward,
        found.backward,
    )
    return costs_of_two_sizes(chain, sizes, tables, slower, "calibrated")


def _with_host(layer: CountedLayer, rates: Rates) -> LayerCost:
    """Returns the estimate for a layer, which is never faster than its host calls the operators."""
    cost, host = rates.timed(layer), rates.host_ms(layer)
    return replace(
        cost,
        forward_ms=max(cost.forward_ms, host[0]),
        backward_ms=max(cost.backward_ms, host[1]),
    )


def _calibration(measured: LayerCost, estimate: LayerCost, contention: float) -> Calibration:
    pairs = (
        (measured.forward_ms, estimate.forward_ms),
        (measured.backward_ms, estimate.backward_ms),
    )
    forward, backward = (one / other if one and other else 1.0 for one, other in pairs)
    return Calibration(forward, backward, contention)


def _corrected(cost: LayerCost, by: Calibration) -> LayerCost:
    return replace(
        cost, forward_ms=by.forward * cost.forward_ms, backward_ms=by.backward * cost.backward_ms
    )


def _most_repeated(counted: Sequence[CountedLayer], rates: Rates) -> tuple[int, int]:
    """Returns the index of a layer that stands for the model, and how many are equal to it.

    A layer that also takes values from before the one above it cannot run alone.
    """
    whole: dict[int, float] = defaultdict(float)
    for layer in counted:
        cost = rates.timed(layer)
        whole[layer.first] += cost.forward_ms + cost.backward_ms
    alone = [first for first in whole if not counted[first].given[1]] or [0]
    index = max(alone, key=whole.__getitem__)
    return index, sum(layer.first == index for layer in counted)


def _values_like(meta: Tensor, device: torch.device) -> Tensor:
    """Returns random values for a meta tensor; whole numbers are 0, as any vocabulary has it."""
    values = torch.zeros(meta.shape, dtype=meta.dtype, device=device)
    if meta.is_floating_point():
        values.normal_()
    return values.requires_grad_(meta.requires_grad)
