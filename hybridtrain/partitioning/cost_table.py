"""The costs of a chain's layers as a function of the samples in a micro-batch.

Costs are counted or measured for two sizes, and interpolated or extrapolated linearly for others:
a layer's work has a part that grows with the samples, and a fixed part such as reading the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.microbatch import batch_size
from hybridtrain._base.microbatch import split as split_batch
from hybridtrain._base.precision import autocast
from hybridtrain.errors import ConfigError
from hybridtrain.graph import Chain, Layer
from hybridtrain.head import head_of
from hybridtrain.partitioning.costs import LayerCost, LayerSize, layer_sizes, most_temporary
from hybridtrain.partitioning.estimates import (
    CountedLayer,
    Rates,
    count_work,
    model_flops,
)
from hybridtrain.partitioning.layer_watch import model_of
from hybridtrain.partitioning.measurements import LayerProfiler
from hybridtrain.partitioning.work_counter import Work

Facts = TypeVar("Facts", LayerCost, Work)


class StageSums(NamedTuple):
    """The costs of consecutive layers that make a stage, for one micro-batch.

    Attributes:
        forward_ms: the forwards of its layers.
        backward_ms: their backwards.
        recomputed_ms: the part of `backward_ms` that recomputes single layers.
        forward_calls_ms: host time to launch its forwards.
        backward_calls_ms: host time to launch its backwards.
        input_bytes: the values that cross the cut before it; 0 for the first stage.
        activation_bytes: the activations of its layers.
        restart_bytes: the part of them that the recomputations of single layers start from.
        temporary_bytes: see `most_temporary`.
        kept_bytes: the activations that are kept if all its layers are recomputed.
        kept_inputs_bytes: the part of them that recomputations start from.
        again_bytes: see `most_temporary`, if all its layers are recomputed.
        restarts_from_input: whether its first layer is recomputed.
        weight_bytes: its parameters and buffers.
        trained_bytes: its trained parameters.
        frozen_bytes: its other parameters.
        state_bytes: the optimizer's state; None: unknown.
    """

    forward_ms: float
    backward_ms: float
    recomputed_ms: float
    forward_calls_ms: float
    backward_calls_ms: float
    input_bytes: int
    activation_bytes: int
    restart_bytes: int
    temporary_bytes: int
    kept_bytes: int
    kept_inputs_bytes: int
    again_bytes: int
    restarts_from_input: bool
    weight_bytes: int
    trained_bytes: int
    frozen_bytes: int
    state_bytes: int | None = None


@dataclass(frozen=True)
class CostTable:
    """The costs of all layers of a model.

    Attributes:
        costs_at: `costs_at(samples)` returns the costs of all layers for a micro-batch of that many
            samples; `crossing_ms` is not used.
        sizes: the bytes of each layer's weights.
        host_ms: for each layer, host milliseconds to launch a forward and a backward.
        costs_from: the source of the costs, as in `Plan`.
        no_cut_before: the indices of layers that cannot begin a stage.
        model: the class name of the model.
        flops_per_sample: FLOPs of the matrix products of a forward and a backward, where a backward
            counts as two forwards, without recomputation, see `estimates.model_flops`; None: not
            counted.
        contention_at: `contention_at(samples)` returns the slowdown factor of a device while all
            other devices of its pipeline compute.
        recomputed: the indices of the layers whose activations are recomputed in these costs.
        stored: the costs of the same layers if none is recomputed; None: these costs.
    """

    costs_at: Callable[[int], Sequence[LayerCost]]
    sizes: Sequence[LayerSize]
    host_ms: Sequence[tuple[float, float]]
    costs_from: str = "given"
    no_cut_before: Collection[int] = ()
    model: str = ""
    flops_per_sample: float | None = None
    contention_at: Callable[[int], float] = lambda samples: 1.0
    recomputed: frozenset[int] = frozenset()
    stored: CostTable | None = None

    def recomputing(self, layers: Set[int]) -> CostTable:
        """Returns the costs of a run that recomputes the activations of these layers.

        Such a layer stores only its input, which is the output of the layer before it. Its backward
        runs the forward again and then holds the activations of one micro-batch.
        """
        if not layers:
            return self

        def costs_at(samples: int) -> Sequence[LayerCost]:
            both = zip(self.costs_at(samples), self._recomputed_at(samples), strict=True)
            return [again if i in layers else cost for i, (cost, again) in enumerate(both)]

        return replace(
            self,
            costs_at=cache(costs_at),
            host_ms=[(f, b + f * (index in layers)) for index, (f, b) in enumerate(self.host_ms)],
            recomputed=frozenset(layers),
            stored=self,
        )

    def stages_at(self, samples: int, counts: Sequence[int]) -> list[StageSums]:
        """Returns the costs of stages of `counts` layers, for a micro-batch of `samples`."""
        stage_at = (self.stored or self)._stage_at
        return [
            stage_at(samples, start, end, self.recomputed.intersection(range(start, end)))
            for start, end in pairwise(accumulate(counts, initial=0))
        ]

    @cached_property
    def _stage_at(self) -> Callable[[int, int, int, frozenset[int]], StageSums]:
        """The costs of a stage, by samples, first layer, end and recomputed layers.

        A search asks for most stages many times, since a cut that moves changes two of them. Sums
        are cached, and not differences of prefix sums, which round: equal stages would differ.
        """

        def stage_at(samples: int, start: int, end: int, single: frozenset[int]) -> StageSums:
            all_costs, sizes = self.costs_at(samples), self.sizes[start:end]
            again = self._recomputed_at(samples)[start:end]
            costs = [
                again[index - start] if index in single else all_costs[index]
                for index in range(start, end)
            ]
            is_last = end == len(all_costs)
            return StageSums(
                forward_ms=sum([cost.forward_ms for cost in costs]),
                backward_ms=sum([cost.backward_ms for cost in costs]),
                recomputed_ms=sum([all_costs[index].forward_ms for index in single]),
                forward_calls_ms=sum([ms for ms, _ in self.host_ms[start:end]]),
                backward_calls_ms=sum([ms for _, ms in self.host_ms[start:end]])
                + sum([self.host_ms[index][0] for index in single]),
                input_bytes=all_costs[start - 1].crossing_bytes if start else 0,
                activation_bytes=_held_by(costs, is_last),
                restart_bytes=sum(
                    [again[index - start - 1].later_bytes for index in single if index > start]
                ),
                temporary_bytes=most_temporary(costs),
                kept_bytes=_held_by(again, is_last),
                kept_inputs_bytes=sum([cost.later_bytes for cost in again[:-1]]),
                again_bytes=most_temporary(again),
                restarts_from_input=start in single,
                weight_bytes=sum([size.weights for size in sizes]),
                trained_bytes=sum([size.trained for size in sizes]),
                frozen_bytes=sum([size.frozen for size in sizes]),
                state_bytes=sum_of_state(sizes),
            )

        return cache(stage_at)

    @cached_property
    def _recomputed_at(self) -> Callable[[int], Sequence[LayerCost]]:
        """`costs_at` with all layers recomputed, once for all choices of some of them."""
        return cache(lambda samples: [cost.recomputed() for cost in self.costs_at(samples)])


def _held_by(costs: Sequence[LayerCost], is_last: bool) -> int:
    """Returns the activations of consecutive layers that their stage holds.

    Args:
        costs: the costs of the layers.
        is_last: whether the last of them is the last one of the model.
    """
    of_next_stage = 0 if is_last else costs[-1].later_bytes
    return sum([cost.activation_bytes for cost in costs]) - of_next_stage


def sum_of_state(sizes: Sequence[LayerSize]) -> int | None:
    """Returns the bytes of optimizer state of layers; None: unknown."""
    states = [size.state for size in sizes]
    return None if None in states else sum(state or 0 for state in states)


@dataclass(frozen=True)
class LossOfStep:
    """The loss that ends the last stage.

    Attributes:
        function: `function(output, targets)` for one micro-batch.
        targets: the targets of the example inputs.
        head: how the head and the loss are computed, as in `PipelineOptions`.
    """

    function: Callable[[Any, Any], torch.Tensor]
    targets: Any
    head: str = "auto"

    def layer(self, samples: int) -> Layer:
        """Returns the loss of the first `samples` samples as a layer."""
        total = batch_size(self.targets)
        sizes = [samples, total - samples] if samples < total else [total]
        part = split_batch(self.targets, sizes)[0]
        return Layer("loss", _LossLayer(self.function, part, self.head))


class _LossLayer(nn.Module):
    def __init__(
        self, function: Callable[[Any, Any], torch.Tensor], targets: Any, head: str
    ) -> None:
        super().__init__()
        self._function, self._targets, self.head = function, targets, head
        self._arguments, self._settings = (), {}
        if isinstance(function, partial):  # its tensors, such as class weights, are copied as ours
            self._function, self._arguments = function.func, function.args
            self._settings = function.keywords

    def forward(self, output: Any) -> torch.Tensor:
        return self._function(*self._arguments, output, self._targets, **self._settings)


def given_costs(
    costs_at: Callable[[int], Sequence[LayerCost]], sizes: Sequence[LayerSize] | None = None
) -> CostTable:
    """Returns a table of costs from a caller's function; without `sizes`, nothing has bytes."""
    layers = len(costs_at(1))
    return CostTable(
        costs_at=cache(costs_at),
        sizes=sizes or [LayerSize(0, 0, state=0)] * layers,
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
    """Returns costs from FLOPs and bytes, which are counted without running a kernel.

    A matrix product takes as long as its arithmetic or its memory traffic, whichever is longer; all
    other operators take as long as their memory traffic.

    Args:
        chain: the model, also on the meta device.
        example_inputs: the inputs of one batch; only shapes and types matter.
        hardware: the rates of a device.
        precision: `fp32`, `bf16` or `fp16`.
        tf32: whether fp32 matrix products run in TF32.
        loss: a loss whose time and memory are added to the last layer's.

    Raises:
        SplitError: a layer does not run on fake tensors; the message names the layer.
        ConfigError: the hardware has no rate for this precision.
    """
    rates = Rates.of(hardware, precision, tf32)
    sizes, batches = _two_sizes(example_inputs)
    small, large = (count_layers(chain.layers, batch, precision, loss) for batch in batches)
    if loss is None or not head_of(model_of(chain.layers), loss.head).names:
        flops = model_flops(large, chain.layers)
    else:  # which computes some products twice
        flops = model_flops(count_layers(chain.layers, batches[1], precision), chain.layers)

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
            for a, b in zip(small, large, strict=True)
        ]

    return CostTable(
        costs_at=costs_at,
        sizes=layer_sizes(chain.layers),
        host_ms=[rates.host_ms(layer) for layer in small],
        costs_from="estimated",
        no_cut_before=chain.no_cut_before,
        flops_per_sample=flops / sizes[1],
    )


def counted_costs_of_one_size(
    layers: Sequence[Layer],
    microbatch: Any,
    hardware: Hardware,
    precision: str,
    tf32: bool = False,
    loss: LossOfStep | None = None,
) -> CostTable:
    """Returns costs like `counted_costs`, but only valid for micro-batches of this size."""
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
    """Returns the work of each layer for a micro-batch; a `loss` is added to the last layer."""
    # CPU autocast, because fake tensors are on the CPU; it supports fp16 too
    context = partial(autocast, precision, "cpu")
    count = partial(count_work, precision=context, optimizer_tensors_per_param=0)
    if loss is None:
        return count(layers, microbatch)
    *counted, last, of_loss = count(layers, microbatch, loss=loss.layer(batch_size(microbatch)))
    forward, backward = last.forward + of_loss.forward, last.backward + of_loss.backward
    return [*counted, CountedLayer(_with_loss(last.cost, of_loss.cost), forward, backward)]


def _with_loss(last: LayerCost, loss: LayerCost) -> LayerCost:
    """Returns the cost of the last layer and the loss together."""
    # while the last layer runs, the loss's activations do not exist yet or are already freed
    held = max(last.temporary_bytes - loss.activation_bytes, loss.temporary_bytes)
    return replace(
        last,
        forward_ms=last.forward_ms + loss.forward_ms,
        backward_ms=last.backward_ms + loss.backward_ms,
        activation_bytes=last.activation_bytes + loss.activation_bytes,
        temporary_bytes=max(0, held),
        later_bytes=0,
        kept_bytes=last.kept_bytes + loss.kept_bytes,
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
    """Returns costs measured on `device`, for a few samples and for the whole batch.

    Args:
        chain: the model; parameters on the meta device get random values.
        example_inputs: the inputs of one batch, as large as a micro-batch may become.
        device: the device to run layers on.
        precision: `fp32`, `bf16` or `fp16`.
        seconds: roughly how long to time each of the two sizes.
        sharing: the number of devices that run at the same time and share this process's intra-op
            threads, as CPU stages do.
        loss: a loss whose time and memory are added to the last layer's.
    """
    sizes, batches = _two_sizes(example_inputs)
    tables, slower = [], []
    for batch in batches:
        end = None if loss is None else loss.layer(batch_size(batch))
        profiler = LayerProfiler(
            chain.layers,
            batch,
            [device] * sharing,
            precision=partial(autocast, precision, device.type),
            optimizer_tensors_per_param=0,
            loss=end,
        )
        profiler.repeat(seconds)
        costs = profiler.costs()
        tables.append([*costs[:-2], _with_loss(*costs[-2:])] if end else costs)
        slower.append(profiler.contention())

    @cache
    def costs_at(samples: int) -> Sequence[LayerCost]:
        at = (samples - sizes[0]) / (sizes[1] - sizes[0])
        return [_between(small, large, at) for small, large in zip(*tables, strict=True)]

    # the time lost to other devices is linear in the samples; its share is not
    alone = [sum(c.forward_ms + c.backward_ms for c in costs) for costs in tables]
    lost = [(factor - 1) * ms for factor, ms in zip(slower, alone, strict=True)]

    def contention_at(samples: int) -> float:
        at = (samples - sizes[0]) / (sizes[1] - sizes[0])
        slowdown, alone_ms = (max(0.0, a + at * (b - a)) for a, b in (lost, alone))
        return 1.0 + slowdown / alone_ms if alone_ms else 1.0

    return CostTable(
        costs_at=costs_at,
        sizes=layer_sizes(chain.layers),
        host_ms=[(0.0, 0.0)] * len(chain.layers),  # included in the measured times
        costs_from="measured",
        no_cut_before=chain.no_cut_before,
        contention_at=contention_at,
    )


def _two_sizes(example_inputs: Any) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """Returns two numbers of samples, and inputs with these numbers of samples."""
    samples = batch_size(example_inputs)
    if samples < 2:
        raise ConfigError(
            "example_inputs= must have at least 2 samples to price a plan, which needs layer costs "
            "for two micro-batch sizes"
        )
    fewer = min(2, samples - 1)  # a batch norm needs two samples if each has a single value
    return (fewer, samples), (
        split_batch(example_inputs, [fewer, samples - fewer])[0],
        example_inputs,
    )


def _between(first: Facts, second: Facts, at: float) -> Facts:
    """Returns the linear interpolation from `first` at 0 to `second` at 1, at least 0."""
    values = {}
    for cost_field in fields(first):
        a, b = getattr(first, cost_field.name), getattr(second, cost_field.name)
        if not isinstance(a, str):
            value = max(0, a + at * (b - a))
            values[cost_field.name] = round(value) if isinstance(a, int) else value
    return replace(first, **values)
