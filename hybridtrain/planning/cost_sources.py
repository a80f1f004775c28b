"""The sources of costs: measured on a device, estimated, or given by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from hybridtrain.cluster import Cluster
from hybridtrain.errors import ConfigError, did_you_mean
from hybridtrain.graph.layer import Layer
from hybridtrain.options import PipelineOptions
from hybridtrain.planning.costs import LayerCost
from hybridtrain.planning.estimates import estimate_costs
from hybridtrain.planning.objective import Objective
from hybridtrain.planning.profiler import LayerProfiler
from hybridtrain.precision import autocast

# A stage this much above the mean is uneven: the noise of careful times, and of a single look.
# Counts and estimates have none, and are held to the same.
COUNT_NOISE = 0.05
FIRST_PASS_NOISE = 0.15
# How long the layers of a chain that looks even enough are timed, in seconds.
CAREFUL_SECONDS = 3.0


class Costs(NamedTuple):
    """The costs of a chain's layers, and the share of the mean that may be noise in a stage."""

    layers: Sequence[LayerCost]
    noise: float = COUNT_NOISE


# Yields the costs of a chain for a micro-batch, each time more exact than before. The planner asks
# for better ones only while they may change the cut.
YieldCosts = Callable[[Sequence[Layer], Any, PipelineOptions, Cluster], Iterator[Costs]]

# Costs that a caller computes: `costs(layers, inputs)` for a chain and a micro-batch.
GivenCosts = Callable[[Sequence[Layer], Any], Sequence[LayerCost]]


def cost_source(costs: str | GivenCosts) -> tuple[str, YieldCosts]:
    """Returns a source of costs with its name in a plan, `given` for a function.

    Raises:
        ConfigError: `costs` is neither a function nor the name of a source.
    """
    if not isinstance(costs, str):
        return "given", partial(_given, costs)
    if costs not in COST_SOURCES:
        raise ConfigError(
            f"costs={costs!r} is neither a function of the layers and a micro-batch nor a known "
            f"source; {did_you_mean(costs, COST_SOURCES, 'sources')}"
        )
    return costs, COST_SOURCES[costs]


def measured(
    layers: Sequence[Layer], inputs: Any, options: PipelineOptions, cluster: Cluster
) -> Iterator[Costs]:
    """Yields the times of a quick pass over the layers, then careful ones."""
    devices = [torch.device(cluster.device_of(stage)) for stage in cluster.stages_of(0)]
    profiler = LayerProfiler(
        layers,
        inputs,
        devices,
        precision=partial(autocast, options.precision, devices[0].type),
        optimizer_tensors_per_param=options.optimizer_tensors_per_param,
    )
    if Objective.of(options).memory_weight == 1:  # times do not matter
        yield Costs(profiler.costs())
        return
    yield Costs(profiler.costs(), FIRST_PASS_NOISE)
    profiler.repeat(CAREFUL_SECONDS)
    yield Costs(profiler.costs())


def estimated(
    layers: Sequence[Layer], inputs: Any, options: PipelineOptions, cluster: Cluster
) -> Iterator[Costs]:
    """Yields one estimate for the default `Hardware`, whatever the devices of the cluster are.

    For another: `costs=partial(estimate_costs, hardware=Hardware(...))`.
    """
    estimate = partial(estimate_costs, precision=partial(autocast, options.precision, "cpu"))
    tensors = options.optimizer_tensors_per_param
    yield Costs(estimate(layers, inputs, optimizer_tensors_per_param=tensors))


def _given(function: GivenCosts, layers: Sequence[Layer], inputs: Any, *_: Any) -> Iterator[Costs]:
    costs = list(function(layers, inputs))
    if [cost.name for cost in costs] != [layer.name for layer in layers]:
        raise ConfigError(
            f"costs= must return a LayerCost for each of the {len(layers)} layers, in order and "
            f"by their names, not {[cost.name for cost in costs]}"
        )
    yield Costs(costs)


COST_SOURCES: dict[str, YieldCosts] = {"measured": measured, "estimated": estimated}
