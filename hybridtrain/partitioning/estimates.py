"""Estimated costs: FLOPs and bytes, counted on fake tensors, without running a kernel.

Time follows the roofline model (Williams, Waterman and Patterson, CACM 2009): a forward or a
backward takes as long as its arithmetic or its memory traffic, whichever is longer. The traffic is
the sum of each operation's reads and writes, as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.tensors import byte_size
from hybridtrain._base.torch_private import FAKE_TENSOR_LIMITS, FakeTensorMode
from hybridtrain._base.values import structure_copy
from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer
from hybridtrain.partitioning.costs import (
    LayerCost,
    StateOf,
    copy_on_cpu,
    count,
    fake_like,
    layer_sizes,
    let_run_on_cpu,
    tensors_of,
    undisturbed,
)
from hybridtrain.partitioning.layer_watch import LayerWatch, weights_of
from hybridtrain.partitioning.work_counter import LayerWork, Work, counted_work

# Rates of a data-center GPU in training, roughly. Only their ratio affects where a model is cut.
FLOPS_PER_S = 100e12
BYTES_PER_S = 1e12


@dataclass(frozen=True)
class CountedLayer:
    """A layer's cost without times, and the work of its forward and backward.

    Attributes:
        cost: the cost without times.
        forward: the work of the forward.
        backward: the work of the backward.
    """

    cost: LayerCost
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Rates:
    """The rates of a device that training reaches.

    Attributes:
        flops: FLOPs per second of matrix products.
        bandwidth: bytes per second from and to its memory.
        operator_ms: host milliseconds to launch an operator of a forward.
        backward_operator_ms: host milliseconds to launch an operator of a backward.
    """

    flops: float
    bandwidth: float
    operator_ms: float
    backward_operator_ms: float

    @classmethod
    def of(cls, hardware: Hardware, precision: str, tf32: bool) -> Rates:
        """Returns the rates of `hardware` for a precision."""
        name = "tf32" if tf32 and precision == "fp32" else precision
        backward_s = hardware.backward_operator_s
        return cls(
            hardware.sustained_flops(name),
            hardware.sustained_bandwidth,
            hardware.operator_s * 1e3,
            (hardware.operator_s if backward_s is None else backward_s) * 1e3,
        )

    def timed(self, layer: CountedLayer) -> LayerCost:
        """Returns the cost of a layer, with the times of its work."""
        return replace(
            layer.cost,
            forward_ms=self._ms(layer.forward),
            backward_ms=self._ms(layer.backward),
        )

    def host_ms(self, layer: CountedLayer) -> tuple[float, float]:
        """Returns the host milliseconds to launch a forward and a backward."""
        return (
            layer.forward.operators * self.operator_ms,
            layer.backward.operators * self.backward_operator_ms,
        )

    def _ms(self, work: Work) -> float:
        product = max(work.flops / self.flops, work.product_bytes / self.bandwidth)
        return (product + (work.bytes - work.product_bytes) / self.bandwidth) * 1e3


def estimate_costs(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    flops_per_s: float = FLOPS_PER_S,
    bytes_per_s: float = BYTES_PER_S,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
    optimizer_tensors_per_param: float | StateOf = 2,
) -> list[LayerCost]:
    """Returns the estimated cost of each layer; crossing a cut costs no time.

    Args:
        layers: the layers of the chain, also on the meta device.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        flops_per_s: FLOPs per second; a multiplication and an addition are two.
        bytes_per_s: bytes per second from and to the device's memory.
        precision: returns the context of forwards; a CPU autocast, because fake tensors are on the
            CPU.
        optimizer_tensors_per_param: see `costs.count`.

    Raises:
        SplitError: a layer does not run on fake tensors, for example because its control flow
            depends on values; the message names the layer.
    """

    def roofline_ms(work: Work) -> float:
        return max(work.flops / flops_per_s, work.bytes / bytes_per_s) * 1e3

    counted = count_work(
        layers,
        inputs,
        precision=precision,
        optimizer_tensors_per_param=optimizer_tensors_per_param,
    )
    return [
        replace(
            layer.cost,
            forward_ms=roofline_ms(layer.forward),
            backward_ms=roofline_ms(layer.backward),
        )
        for layer in counted
    ]


def count_work(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
    optimizer_tensors_per_param: float | StateOf = 2,
    loss: Layer | None = None,
) -> list[CountedLayer]:
    """Returns the work of each layer, and of the loss, for the micro-batch `inputs`.

    The model runs once on fake tensors. If it depends on values, and has values and a moderate
    size, it runs on a copy of these.

    Args:
        layers: the layers of the model, also on the meta device.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        precision: returns the context of forwards.
        optimizer_tensors_per_param: see `costs.count`.
        loss: a loss that follows as a further layer.

    Raises:
        NotOnFakesError: the model does not run on fake tensors; the message names the layer.
    """
    try:
        work = _run(layers, inputs, precision, loss, fake_like)
    except NotOnFakesError as error:
        if not error.needs_values or not _may_run_on_data(layers, inputs):
            raise
        work = _run(layers, inputs, precision, loss, copy_on_cpu)
    end = [] if loss is None else [loss]
    return [
        CountedLayer(
            counted.of(cost),
            counted.forward,
            counted.backward,
        )
        for cost, counted in zip(
            [*count(layers, optimizer_tensors_per_param), *count(end)], work, strict=True
        )
    ]


def _run(
    layers: Sequence[Layer],
    inputs: Any,
    precision: Callable[[], AbstractContextManager[object]] | None,
    loss: Layer | None,
    replacement: Callable[[Tensor], Tensor],
) -> list[LayerWork]:
    """Counts one run with fake tensors or data, on the CPU."""
    with _watched(layers, loss, replacement) as watch:
        return counted_work(watch, structure_copy(inputs, replacement), precision or nullcontext)


@contextmanager
def _watched(
    layers: Sequence[Layer], loss: Layer | None, replacement: Callable[[Tensor], Tensor]
) -> Iterator[LayerWatch]:
    """Yields a model with fake tensors or data, on the CPU, and names the layer that fails."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if replacement is fake_like else nullcontext()
    with undisturbed(layers, torch.device("cpu")), mode:
        watch = LayerWatch(layers, replacement, loss)
        let_run_on_cpu(watch.parts)
        try:
            yield watch
        except Exception as error:
            raise NotOnFakesError(watch.names[watch.layer], error) from error


# Models with at most this many bytes of parameters and buffers are counted on data if need be.
_MOST_DATA = 2**30


def _may_run_on_data(layers: Sequence[Layer], inputs: Any) -> bool:
    tensors = [*weights_of(layers), *tensors_of(inputs)]
    return not any(t.is_meta for t in tensors) and sum(map(byte_size, tensors)) <= _MOST_DATA


def model_flops(counted: Sequence[CountedLayer], layers: Sequence[Layer]) -> float:
    """Returns the FLOPs of a forward and a backward of the model, without recomputation.

    A backward counts as two forwards (Narayanan et al., arXiv:2104.04473). In a layer with frozen
    weights, it counts at most the FLOPs of its operators, which omit gradients of frozen weights.
    """
    flops = 0.0
    for layer, size in zip(counted, layer_sizes(layers), strict=True):
        backward = 2 * layer.forward.flops
        if size.frozen:
            backward = min(backward, layer.backward.flops)
        flops += layer.forward.flops + backward
    return flops


class NotOnFakesError(SplitError):
    """A layer does not run on fake tensors; `__cause__` is the layer's error.

    Attributes:
        layer: the name of the layer.
        needs_values: True if the layer depends on values; False if it fails for these shapes.
        reason: the error of the layer, in one line.
    """

    def __init__(self, layer: str, error: Exception) -> None:
        self.layer = layer
        self.needs_values = isinstance(error, FAKE_TENSOR_LIMITS)
        self.reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        super().__init__(
            f"costs='estimated': layer {layer!r} does not run on fake tensors ({self.reason}): use "
            "costs='measured', or pass a function that returns the costs"
        )
