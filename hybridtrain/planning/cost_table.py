"""The costs of a chain's layers for any number of samples in a micro-batch.

Two sizes are counted or measured, and everything in between and beyond follows on a straight line:
what a layer does has a part that grows with the samples and a part that does not, such as reading
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch

from hybridtrain.errors import ConfigError
from hybridtrain.graph import Chain, Layer
from hybridtrain.machine import Machine
from hybridtrain.microbatch import batch_size
from hybridtrain.microbatch import split as split_batch
from hybridtrain.planning.costs import LayerCost, LayerProfiler, LayerSize, layer_sizes
from hybridtrain.planning.estimates import CountedLayer, Rates, Work, count_chain
from hybridtrain.precision import autocast

Facts = TypeVar("Facts", LayerCost, Work)


@dataclass(frozen=True)
class CostTable:
    """The costs of all layers of a model.

    Attributes:
        costs_at: returns the costs for a micro-batch of so many samples; `crossing_ms` is not used.
        sizes: what does not depend on the samples.
        host_ms: for each layer the host's time to call the operators of a forward and a backward.
        costs_from: as of a `Plan`.
        no_cut_before: layers that cannot begin a stage, by index.
        model: the class of the model.
        contention_at: returns, for a micro-batch of so many samples, how many times as long a
            device takes while all others of its pipeline compute too.
    """

    costs_at: Callable[[int], Sequence[LayerCost]]
    sizes: Sequence[LayerSize]
    host_ms: Sequence[tuple[float, float]]
    costs_from: str = "given"
    no_cut_before: Collection[int] = ()
    model: str = ""
    contention_at: Callable[[int], float] = lambda samples: 1.0


def given_costs(
    costs_at: Callable[[int], Sequence[LayerCost]], sizes: Sequence[LayerSize] | None = None
) -> CostTable:
    """Returns a table of costs that the caller computes; without `sizes`, weights are 0 bytes."""
    layers = len(costs_at(1))
    return CostTable(
        costs_at=cache(costs_at),
        sizes=sizes or [LayerSize(0, 0)] * layers,
        host_ms=[(0.0, 0.0)] * layers,
    )


def counted_costs(
    chain: Chain, example_inputs: Any, machine: Machine, precision: str, tf32: bool = False
) -> CostTable:
    """Returns the costs by FLOPs and bytes, counted without running a kernel; see `estimates`.

    A product takes as long as its arithmetic or its memory traffic, whichever is longer; all other
    operators take as long as their traffic.

    Args:
        chain: the model, also on the meta device.
        example_inputs: the inputs of one batch, of which shapes and types count.
        machine: the rates.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: fp32 products are in TF32.

    Raises:
        SplitError: a layer does not run on fake tensors; names the layer.
        ConfigError: the machine has no rate for this precision.
    """
    rates = Rates.of(machine, precision, tf32)
    sizes, batches = _two_sizes(example_inputs)
    few, many = (count_layers(chain.layers, batch, precision) for batch in batches)

    @cache
    def costs_at(samples: int) -> Sequence[LayerCost]:
        at = (samples - sizes[0]) / (sizes[1] - sizes[0])
        return [
            rates.timed(
                replace(
                    a,
                    cost=_between(a.cost, b.cost, at),
                    forward=_between(a.forward, b.forward, at),
                    backward=_between(a.backward, b.backward, at),
                )
            )
            for a, b in zip(few, many, strict=True)
        ]

    return CostTable(
        costs_at=costs_at,
        sizes=layer_sizes(chain.layers),
        host_ms=[rates.host_ms(layer) for layer in few],
        costs_from="estimated",
        no_cut_before=chain.no_cut_before,
    )


def counted_costs_of_one_size(
    layers: Sequence[Layer], microbatch: Any, machine: Machine, precision: str, tf32: bool = False
) -> CostTable:
    """Returns the costs for micro-batches like this one alone; otherwise as `counted_costs`."""
    rates = Rates.of(machine, precision, tf32)
    counted = count_layers(layers, microbatch, precision)
    costs = [rates.timed(layer) for layer in counted]
    return CostTable(
        costs_at=lambda _: costs,
        sizes=layer_sizes(layers),
        host_ms=[rates.host_ms(layer) for layer in counted],
        costs_from="estimated",
    )


def count_layers(layers: Sequence[Layer], microbatch: Any, precision: str) -> list[CountedLayer]:
    """Returns what the layers do for a micro-batch, in this precision; see `count_chain`."""
    # an autocast for the CPU, where fake tensors are; it knows fp16 too
    context = partial(autocast, precision, "cpu")
    return count_chain(layers, microbatch, precision=context, optimizer_tensors_per_param=0)


def measured_costs(
    chain: Chain,
    example_inputs: Any,
    device: torch.device,
    precision: str,
    seconds: float = 3.0,
    sharing: int = 1,
) -> CostTable:
    """Returns the costs by times on `device`, for one sample and for the whole batch.

    Args:
        chain: the model; parameters on the meta device get random values while their layer runs.
        example_inputs: the inputs of one batch, as large as a micro-batch may become.
        device: where layers run.
        precision: `fp32`, `bf16` or `fp16`.
        seconds: how long each of the two sizes is timed, about.
        sharing: devices that run at one time, and share this process's intra-op threads, as CPU
            stages do.
    """
    sizes, batches = _two_sizes(example_inputs)
    tables, slower = [], []
    for batch in batches:
        profiler = LayerProfiler(
            chain.layers,
            batch,
            [device] * sharing,
            precision=partial(autocast, precision, device.type),
            optimizer_tensors_per_param=0,
        )
        profiler.repeat(seconds)
        tables.append(profiler.costs())
        slower.append(profiler.contention())

    @cache
    def costs_at(samples: int) -> Sequence[LayerCost]:
        at = (samples - sizes[0]) / (sizes[1] - sizes[0])
        return [_between(few, many, at) for few, many in zip(*tables, strict=True)]

    # what is lost to the other devices is on a straight line too, and not its share
    alone = [sum(c.forward_ms + c.backward_ms for c in costs) for costs in tables]
    lost = [(factor - 1) * ms for factor, ms in zip(slower, alone, strict=True)]

    def contention_at(samples: int) -> float:
        at = (samples - sizes[0]) / (sizes[1] - sizes[0])
        one, other = (max(0.0, a + at * (b - a)) for a, b in (lost, alone))
        return 1.0 + one / other if other else 1.0

    return CostTable(
        costs_at=costs_at,
        sizes=layer_sizes(chain.layers),
        host_ms=[(0.0, 0.0)] * len(chain.layers),  # the times have it already
        costs_from="measured",
        no_cut_before=chain.no_cut_before,
        contention_at=contention_at,
    )


def _two_sizes(example_inputs: Any) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """Returns two numbers of samples, and inputs of so many."""
    samples = batch_size(example_inputs)
    if samples < 2:
        raise ConfigError(
            "example_inputs= must have at least 2 samples to price a plan: what layers cost is "
            "looked at for two sizes of a micro-batch"
        )
    one = split_batch(example_inputs, [1, samples - 1])[0]
    return (1, samples), (one, example_inputs)


def _between(one: Facts, other: Facts, at: float) -> Facts:
    """Returns the numbers at 0 for `one` and 1 for `other`, and nowhere negative."""
    values = {}
    for each in fields(one):
        a, b = getattr(one, each.name), getattr(other, each.name)
        if not isinstance(a, str):
            value = max(0, a + at * (b - a))
            values[each.name] = round(value) if isinstance(a, int) else value
    return replace(one, **values)
