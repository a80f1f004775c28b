"""The costs of a chain's layers for any number of samples in a micro-batch.

Two sizes are counted or measured, and everything in between and beyond follows on a straight line:
what a layer does has a part that grows with the samples and a part that does not, such as reading
the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.microbatch import batch_size
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain._base.precision import autocast
from hybridtrain.errors import ConfigError
from hybridtrain.graph import Chain, Layer
from hybridtrain.partitioning.costs import LayerCost, LayerProfiler, LayerSize, layer_sizes
from hybridtrain.partitioning.estimates import CountedLayer, Rates, Work, count_chain

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
        flops_per_sample: of a forward and a backward, which is taken for two forwards: the products
            of matrices, as Narayanan et al. (arXiv:2104.04473) count them, without what is computed
            again. None: not counted.
        contention_at: returns, for a micro-batch of so many samples, how many times as long a
            device takes while all others of its pipeline compute too.
        recomputed: the layers whose activations the costs have as recomputed, by index.
    """

    costs_at: Callable[[int], Sequence[LayerCost]]
    sizes: Sequence[LayerSize]
    host_ms: Sequence[tuple[float, float]]
    costs_from: str = "given"
    no_cut_before: Collection[int] = ()
    model: str = ""
    flops_per_sample: float | None = None
    contention_at: Callable[[int], float] = lambda samples: 1.0
    recomputed: Set[int] = frozenset()

    def recomputing(self, layers: Set[int]) -> CostTable:
        """Returns the costs of a run that recomputes the activations of these layers in backwards.

        Such a layer keeps its output, the input of the next one. Its backward runs the forward
        again, and then holds its activations for one micro-batch.
        """
        if not layers:
            return self

        def costs_at(samples: int) -> Sequence[LayerCost]:
            return [
                _recomputing(cost) if index in layers else cost
                for index, cost in enumerate(self.costs_at(samples))
            ]

        return replace(
            self,
            costs_at=cache(costs_at),
            host_ms=[(f, b + f * (index in layers)) for index, (f, b) in enumerate(self.host_ms)],
            recomputed=frozenset(layers),
        )


def _recomputing(cost: LayerCost) -> LayerCost:
    kept = min(cost.activation_bytes, cost.crossing_bytes)
    return replace(
        cost,
        backward_ms=cost.backward_ms + cost.forward_ms,
        activation_bytes=kept,
        temporary_bytes=cost.temporary_bytes + cost.activation_bytes - kept,
    )


@dataclass(frozen=True)
class LossOfStep:
    """The loss that ends the last stage.

    Attributes:
        function: of the model's outputs and the targets of a micro-batch.
        targets: of the example's samples.
    """

    function: Callable[[Any, Any], torch.Tensor]
    targets: Any

    def layer(self, samples: int) -> Layer:
        """Returns the loss of the first `samples` as a layer."""
        there = batch_size(self.targets)
        sizes = [samples, there - samples] if samples < there else [there]
        return Layer("loss", _LossLayer(self.function, split_batch(self.targets, sizes)[0]))


class _LossLayer(nn.Module):
    def __init__(self, function: Callable[[Any, Any], torch.Tensor], targets: Any) -> None:
        super().__init__()
        self._function, self._targets = function, targets

    def forward(self, output: Any) -> torch.Tensor:
        return self._function(output, self._targets)


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
    chain: Chain,
    example_inputs: Any,
    hardware: Hardware,
    precision: str,
    tf32: bool = False,
    loss: LossOfStep | None = None,
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
        loss: its time and memory are those of the last layer.

    Raises:
        SplitError: a layer does not run on fake tensors; names the layer.
        ConfigError: the machine has no rate for this precision.
    """
    rates = Rates.of(hardware, precision, tf32)
    sizes, batches = _two_sizes(example_inputs)
    few, many = (count_layers(chain.layers, batch, precision, loss) for batch in batches)

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
        flops_per_sample=3 * sum(layer.forward.flops for layer in many) / sizes[1],
    )


def counted_costs_of_one_size(
    layers: Sequence[Layer],
    microbatch: Any,
    hardware: Hardware,
    precision: str,
    tf32: bool = False,
    loss: LossOfStep | None = None,
) -> CostTable:
    """Returns the costs for micro-batches like this one alone; otherwise as `counted_costs`."""
    rates = Rates.of(hardware, precision, tf32)
    counted = count_layers(layers, microbatch, precision, loss)
    costs = [rates.timed(layer) for layer in counted]
    return CostTable(
        costs_at=lambda _: costs,
        sizes=layer_sizes(layers),
        host_ms=[rates.host_ms(layer) for layer in counted],
        costs_from="estimated",
    )


def count_layers(
    layers: Sequence[Layer], microbatch: Any, precision: str, loss: LossOfStep | None = None
) -> list[CountedLayer]:
    """Returns what the layers do for a micro-batch, in this precision; see `count_chain`.

    With a `loss` the last of them does its work too.
    """
    # an autocast for the CPU, where fake tensors are; it knows fp16 too
    context = partial(autocast, precision, "cpu")
    count = partial(count_chain, precision=context, optimizer_tensors_per_param=0)
    if loss is None:
        return count(layers, microbatch)
    *counted, last, of_loss = count([*layers, loss.layer(batch_size(microbatch))], microbatch)
    forward, backward = last.forward + of_loss.forward, last.backward + of_loss.backward
    return [*counted, CountedLayer(_with_loss(last.cost, of_loss.cost), forward, backward)]


def _with_loss(last: LayerCost, loss: LayerCost) -> LayerCost:
    """Returns the cost of the last layer and the loss together."""
    # while the last layer runs, the loss is not there yet, or has gone already
    held = max(last.temporary_bytes - loss.activation_bytes, loss.temporary_bytes)
    return replace(
        last,
        forward_ms=last.forward_ms + loss.forward_ms,
        backward_ms=last.backward_ms + loss.backward_ms,
        activation_bytes=last.activation_bytes + loss.activation_bytes,
        temporary_bytes=max(0, held),
    )


def measured_costs(
    chain: Chain,
    example_inputs: Any,
    device: torch.device,
    precision: str,
    seconds: float = 3.0,
    sharing: int = 1,
    loss: LossOfStep | None = None,
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
        loss: its time and memory are those of the last layer.
    """
    sizes, batches = _two_sizes(example_inputs)
    tables, slower = [], []
    for batch in batches:
        end = [] if loss is None else [loss.layer(batch_size(batch))]
        profiler = LayerProfiler(
            [*chain.layers, *end],
            batch,
            [device] * sharing,
            precision=partial(autocast, precision, device.type),
            optimizer_tensors_per_param=0,
        )
        profiler.repeat(seconds)
        costs = profiler.costs()
        tables.append([*costs[:-2], _with_loss(*costs[-2:])] if end else costs)
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
    few = min(2, samples - 1)  # a batch norm needs two, where it has one value for each
    return (few, samples), (split_batch(example_inputs, [few, samples - few])[0], example_inputs)


def _between(one: Facts, other: Facts, at: float) -> Facts:
    """Returns the numbers at 0 for `one` and 1 for `other`, and nowhere negative."""
    values = {}
    for each in fields(one):
        a, b = getattr(one, each.name), getattr(other, each.name)
        if not isinstance(a, str):
            value = max(0, a + at * (b - a))
            values[each.name] = round(value) if isinstance(a, int) else value
    return replace(one, **values)
