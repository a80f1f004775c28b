"""Estimated costs that one measurement corrects: that of the layer which the model repeats most.

The layers of a transformer are copies of each other. How far a device is from the rates that it
was described with is much the same for all of them, so that one, measured, tells it of the rest.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybridtrain.graph.layer import Layer
from hybridtrain.machine import Machine
from hybridtrain.planning.cost_table import count_layers
from hybridtrain.planning.estimates import CountedLayer
from hybridtrain.planning.profiler import LayerProfiler
from hybridtrain.planning.rates import Calibration, Rates
from hybridtrain.precision import autocast

log = logging.getLogger("hybridtrain")


def calibrate(
    layers: Sequence[Layer],
    microbatch: Any,
    machine: Machine,
    device: torch.device,
    precision: str,
    tf32: bool = False,
    *,
    sharing: int = 1,
    seconds: float = 1.0,
) -> Calibration:
    """Times the layer that the model repeats most, against its estimate.

    That is, of the groups of equal layers, the first layer of the one that should take longest as a
    whole. It runs alone, on random values in the shapes that it has in the model.

    Args:
        layers: the chain; parameters may be on the meta device.
        microbatch: the inputs of the first layer.
        machine: the rates of the estimate.
        device: where the layer runs.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.
        sharing: devices that run at one time, and share this process's intra-op threads, as CPU
            stages do.
        seconds: how long it is timed, about.

    Raises:
        SplitError: a layer does not run on fake tensors.
        ConfigError: the machine has no rate for this precision.
    """
    rates = Rates.of(machine, precision, tf32)
    counted = count_layers(layers, microbatch, precision)
    index, equal = _most_repeated(counted, rates)
    layer = counted[index]
    profiler = LayerProfiler(
        [layers[index]],
        tree_map_only(Tensor, partial(_values_like, device=device), layer.given[0]),
        [device] * sharing,
        precision=partial(autocast, precision, device.type),
        optimizer_tensors_per_param=0,
    )
    profiler.repeat(seconds)
    (measured,), estimated = profiler.costs(), rates.timed(layer)
    host = rates.host_ms(layer)
    pairs = (
        (measured.forward_ms, max(estimated.forward_ms, host[0])),
        (measured.backward_ms, max(estimated.backward_ms, host[1])),
    )
    forward, backward = (one / other if one and other else 1.0 for one, other in pairs)
    log.info(
        "calibrated by layer %s, one of %d equal ones: a forward takes %.2f times its estimate, "
        "a backward %.2f times",
        layers[index].name,
        equal,
        forward,
        backward,
    )
    return Calibration(forward, backward, profiler.contention())


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
