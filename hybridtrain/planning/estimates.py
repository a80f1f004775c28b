"""Estimated costs: FLOPs and bytes, counted on fake tensors, without running a kernel.

Time follows the roofline model (Williams, Waterman and Patterson, CACM 2009): a forward or a
backward takes as long as its arithmetic or its memory traffic, whichever is longer. The traffic is
that of every operation by itself, as in eager mode: what it reads and what it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from hybridtrain._torch_private import FakeTensorMode, TorchDispatchMode
from hybridtrain.errors import SplitError
from hybridtrain.graph.layer import Layer
from hybridtrain.memory import count_saved
from hybridtrain.planning.costs import (
    Given,
    LayerCost,
    LayerRun,
    run_chain,
    run_layer,
    tensors_of,
    undisturbed,
)


@dataclass(frozen=True)
class Hardware:
    """The speed of a device, as training reaches it. Only ratios matter for where a model is cut.

    A multiplication and an addition are two floating point operations. `bytes_per_s` are those to
    and from the device's memory; with `link_bytes_per_s` None, crossing a cut is free.
    """

    flops_per_s: float = 100e12
    bytes_per_s: float = 1e12
    link_bytes_per_s: float | None = None


def estimate_costs(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    hardware: Hardware | None = None,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
    optimizer_tensors_per_param: int = 2,
) -> list[LayerCost]:
    """Returns the cost that each layer should have; the layers may be on the meta device.

    Of `inputs`, a micro-batch, only shapes and types are used. Without `hardware` it is about a
    data-center GPU. Forwards run in the context `precision`: an autocast for the CPU, where fake
    tensors are.

    Raises:
        SplitError: a layer does not run on fake tensors, such as one whose control flow depends on
            values; names the layer.
    """
    hardware = hardware or Hardware()

    def run(layer: Layer, given: Given) -> tuple[LayerRun, dict[int, int]]:
        module = layer.module
        state = {name: _fake(p) for name, p in module.named_parameters()}
        state |= {name: _fake(b) for name, b in module.named_buffers()}
        clock = partial(_roofline_ms, hardware)
        try:
            with count_saved(module, list(state.values())) as saved:
                ran = run_layer(module, given, precision or nullcontext, clock, state)
        except Exception as error:
            raise SplitError(
                f"costs='estimated': layer {layer.name!r} does not run on fake tensors "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}): use "
                f"costs='measured', or give a function that returns the costs"
            ) from error
        return ran, saved.storages

    with undisturbed(layers, torch.device("cpu")), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = tree_map_only(Tensor, _fake, inputs)
        costs = run_chain(layers, fakes, run, optimizer_tensors_per_param)
    link = hardware.link_bytes_per_s or math.inf
    return [replace(cost, crossing_ms=cost.crossing_bytes / link * 1e3) for cost in costs]


def _fake(tensor: Tensor) -> Tensor:
    """Returns a fake CPU tensor of the layout and dtype of `tensor`; called in a fake mode."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _roofline_ms(hardware: Hardware, work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `work`, and how many milliseconds it should take."""
    with FlopCounterMode(display=False) as flops, _TrafficCounter() as traffic:
        result = work()
    arithmetic = flops.get_total_flops() / hardware.flops_per_s
    return result, max(arithmetic, traffic.bytes / hardware.bytes_per_s) * 1e3


class _TrafficCounter(TorchDispatchMode):
    """Counts the bytes that operations read and write; views do neither."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = tensors_of(result)  # none: a question, such as for the device
        if written and not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.bytes += sum(t.nbytes for t in [*tensors_of((args, kwargs)), *written])
        return result
