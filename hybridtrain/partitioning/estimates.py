"""Estimated costs: FLOPs and bytes, counted on fake tensors, without running a kernel.

Time follows the roofline model (Williams, Waterman and Patterson, CACM 2009): a forward or a
backward takes as long as its arithmetic or its memory traffic, whichever is longer. The traffic is
the sum of each operation's reads and writes, as in eager mode.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hybridtrain._base.hardware import Hardware
from hybridtrain._base.tensors import byte_size, count_saved, storage_id
from hybridtrain._base.torch_private import (
    FAKE_TENSOR_LIMITS,
    FakeTensorMode,
    TorchDispatchMode,
    adds_up_gradients,
)
from hybridtrain.errors import SplitError
from hybridtrain.graph import Layer, Segment
from hybridtrain.partitioning.costs import (
    Clock,
    LayerCost,
    LayerInput,
    LayerRun,
    RunLayer,
    copy_of,
    layer_sizes,
    run_chain,
    run_layer,
    tensors_of,
    undisturbed,
)

# Rates of a data-center GPU in training, roughly. Only their ratio affects where a model is cut.
FLOPS_PER_S = 100e12
BYTES_PER_S = 1e12


# PyTorch's FLOP counter may have formulas for attention on GPUs only, but fake tensors are on the
# CPU. The counter wraps the formulas that it receives, so these are unwrapped.
_aten = torch.ops.aten
_ATTENTION_ON_CPU = {
    on_cpu: inspect.unwrap(flop_registry[on_gpu])
    for on_cpu, on_gpu in [
        (
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
        ),
        (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
        ),
    ]
}


@dataclass(frozen=True)
class Work:
    """The work of a forward or a backward.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention.
        bytes: the sum of the bytes that each operator reads and writes.
        product_bytes: the part of `bytes` of the operators that `flops` counts.
        operators: the number of operator calls, including views.
        peak_bytes: the peak memory of new tensors.
    """

    flops: float = 0
    bytes: float = 0
    product_bytes: float = 0
    operators: float = 0
    peak_bytes: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            *(a + b for a, b in zip(astuple(self), astuple(other), strict=True)),
        )


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
    optimizer_tensors_per_param: int = 2,
) -> list[LayerCost]:
    """Returns the estimated cost of each layer; crossing a cut costs no time.

    Args:
        layers: the layers of the chain, also on the meta device.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        flops_per_s: FLOPs per second; a multiplication and an addition are two.
        bytes_per_s: bytes per second from and to the device's memory.
        precision: returns the context of forwards; a CPU autocast, because fake tensors are on the
            CPU.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it.

    Raises:
        SplitError: a layer does not run on fake tensors, for example because its control flow
            depends on values; the message names the layer.
    """

    def roofline_ms(work: Work) -> float:
        return max(work.flops / flops_per_s, work.bytes / bytes_per_s) * 1e3

    counted = count_chain(
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


def count_chain(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
    optimizer_tensors_per_param: int = 2,
) -> list[CountedLayer]:
    """Returns the work of each layer for the micro-batch `inputs`.

    Args:
        layers: the layers of the chain, also on the meta device.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        precision: returns the context of forwards.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it.

    Raises:
        SplitError: a layer does not run on fake tensors; the message names the layer.
    """
    work: list[list[Work]] = []

    def clock(function: Callable[[], Any]) -> tuple[Any, float]:
        result, work_done = _counted(function)
        work[-1].append(work_done)
        return result, 0.0

    def run(layer: Layer, layer_input: LayerInput) -> tuple[LayerRun, Mapping[int, int]]:
        work.append([])
        return _run_on_fakes(layer, layer_input, precision, clock)

    with undisturbed(layers, torch.device("cpu")), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = tree_map_only(Tensor, _fake, inputs)
        run_once = _RunOnce(run)
        costs = run_chain(layers, fakes, run_once, optimizer_tensors_per_param)
    work_of = dict(zip(dict.fromkeys(run_once.first), work, strict=True))
    counted = []
    received = 0
    for layer, cost, first in zip(layers, costs, run_once.first, strict=True):
        forward, *backward = work_of[first]
        counted.append(CountedLayer(cost, forward, *(backward or [Work()])))
        held = _temporary_bytes(counted[-1], layer, received)
        counted[-1] = replace(counted[-1], cost=replace(cost, temporary_bytes=held))
        received = cost.crossing_bytes
    return counted


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


def _run_on_fakes(
    layer: Layer,
    layer_input: LayerInput,
    precision: Callable[[], AbstractContextManager[object]] | None,
    clock: Clock,
) -> tuple[LayerRun, Mapping[int, int]]:
    """Runs a copy of a layer on fake tensors; also returns what autograd saves, see `RunLayer`.

    Raises:
        NotOnFakesError: the layer fails.
    """
    try:
        module = copy_of(layer, _fake)
        for part in module.modules():
            if isinstance(part, Segment):  # the model may be on the meta device
                part.put_constants_on(torch.device("cpu"))
        with count_saved(module) as saved:
            ran = run_layer(module, layer_input, precision or nullcontext, clock)
    except Exception as error:
        raise NotOnFakesError(layer.name, error) from error
    return ran, saved.storages


def chain_inputs(
    layers: Sequence[Layer],
    inputs: Any,
    *,
    precision: Callable[[], AbstractContextManager[object]] | None = None,
) -> list[LayerInput]:
    """Returns the fake input of each layer, from a forward and backward on fake tensors.

    Args:
        layers: the layers of the chain, also on the meta device.
        inputs: the inputs of a micro-batch; only shapes and types matter.
        precision: returns the context of forwards.

    Raises:
        NotOnFakesError: a layer does not run on fake tensors.
    """
    received: list[LayerInput] = []
    run_once = _RunOnce(partial(_run_on_fakes, precision=precision, clock=lambda run: (run(), 0.0)))

    def run(layer: Layer, layer_input: LayerInput) -> tuple[LayerRun, Mapping[int, int]]:
        received.append(layer_input)
        return run_once(layer, layer_input)

    with undisturbed(layers, torch.device("cpu")), FakeTensorMode(allow_non_fake_inputs=True):
        run_chain(layers, tree_map_only(Tensor, _fake, inputs), run)
    return received


def _temporary_bytes(counted: CountedLayer, layer: Layer, received: int) -> int:
    """Returns the peak bytes of a layer in addition to activations and gradients of weights.

    Args:
        counted: the layer's work.
        layer: the layer.
        received: the bytes of its input, which count even if a backward needs them too.
    """
    cost = counted.cost
    grads = [byte_size(p) for p in layer.module.parameters() if p.requires_grad]
    forward = max(0.0, counted.forward.peak_bytes - cost.activation_bytes)
    # the counted run keeps the gradients of all weights; a real run adds each to its bucket and
    # frees it
    backward = max(0.0, counted.backward.peak_bytes - sum(grads)) + max(grads, default=0)
    gradient = cost.crossing_bytes * bool(counted.backward.operators)
    return round(max(forward + received, backward + gradient))


def _fake(tensor: Tensor) -> Tensor:
    """Returns a fake CPU tensor with the layout and dtype of `tensor`; call it in a fake mode."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad)


def _counted(function: Callable[[], Any]) -> tuple[Any, Work]:
    """Returns the result of `function` and its work."""
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU)
    with counter as flops, _TrafficCounter(flops) as traffic:
        result = function()
    return result, Work(
        flops.get_total_flops(),
        traffic.bytes,
        traffic.product_bytes,
        traffic.operators,
        traffic.peak_bytes,
    )


class _TrafficCounter(TorchDispatchMode):
    """Counts the bytes that operations read, write and keep alive; views do neither."""

    def __init__(self, flops: FlopCounterMode) -> None:
        super().__init__()
        self.bytes = self.product_bytes = self.operators = 0
        self.peak_bytes = self._alive = 0
        self._products = flops.flop_registry
        self._known: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if adds_up_gradients():  # fake tensors need copies for it, real tensors do not
            return result
        outputs = tensors_of(result)  # empty for a query, such as the device
        self.operators += bool(outputs)
        if outputs and not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            read = tensors_of((args, kwargs))
            nbytes = sum(map(byte_size, [*read, *outputs]))
            self.bytes += nbytes
            self.product_bytes += nbytes * (func.overloadpacket in self._products)
            self._follow(outputs, {storage_id(tensor) for tensor in read})
        return result

    def _follow(self, outputs: Sequence[Tensor], inputs: Collection[int]) -> None:
        """Counts new storages until they are freed."""
        for tensor in outputs:
            storage, number = tensor.untyped_storage(), storage_id(tensor)
            counted = self._known.get(number)
            if number in inputs or (counted is not None and counted() is storage):
                continue  # in place, or counted already
            self._alive += storage.nbytes()
            self._known[number] = weakref.ref(storage, partial(self._free, storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self._alive)

    def _free(self, nbytes: int, _: object) -> None:
        self._alive -= nbytes


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# Attributes of every module, which do not affect its forward.
_OF_MODULE = frozenset(vars(nn.Module()))


class _First(NamedTuple):
    """The run of the first of several equal layers."""

    input_tensors: list[Tensor]
    ran: LayerRun
    saved: Mapping[int, int]


class _RunOnce:
    """Runs only the first of several equal layers, and reuses its run for the others.

    The layers of a transformer are copies of each other with outputs of equal shape, so the counts
    of the first are valid for all.

    Attributes:
        first: for each layer, the index of the layer whose run it uses.
    """

    def __init__(self, run: RunLayer) -> None:
        self.first: list[int] = []
        self._run = run
        self._known: dict[Hashable, tuple[int, _First]] = {}
        self._numbers = count(-1, -1)  # ids for internal storages; real ids are not negative

    def __call__(self, layer: Layer, layer_input: LayerInput) -> tuple[LayerRun, Mapping[int, int]]:
        """Returns what `run` returns."""
        tensors = tensors_of(layer_input)
        key = _structure(layer.module), _form(layer_input)
        if None not in key and key in self._known:
            number, first = self._known[key]
            self.first.append(number)
            return self._repeated(first, tensors)
        ran, saved = self._run(layer, layer_input)
        self._known[key] = len(self.first), _First(tensors, ran, saved)
        self.first.append(len(self.first))
        return ran, saved

    def _repeated(
        self, first: _First, input_tensors: list[Tensor]
    ) -> tuple[LayerRun, Mapping[int, int]]:
        storages = {
            storage_id(a): storage_id(b)
            for a, b in zip(first.input_tensors, input_tensors, strict=True)
        }

        def renewed(tensor: Tensor) -> Tensor:
            for first_input, same_input in zip(first.input_tensors, input_tensors, strict=True):
                if storage_id(first_input) == storage_id(tensor):  # the layer returns its input
                    is_unchanged = first_input.shape == tensor.shape
                    return same_input if is_unchanged else same_input.detach().view(tensor.shape)
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).requires_grad_(tensor.requires_grad)

        handed_on = tree_map_only(Tensor, renewed, first.ran.handed_on)
        outputs = zip(tensors_of(first.ran.handed_on), tensors_of(handed_on), strict=True)
        storages |= {
            storage_id(first_tensor): storage_id(tensor) for first_tensor, tensor in outputs
        }
        saved = {
            storages[first_tensor] if first_tensor in storages else next(self._numbers): nbytes
            for first_tensor, nbytes in first.saved.items()
        }
        return first.ran._replace(handed_on=handed_on), saved


def _structure(module: nn.Module) -> Hashable:
    """Returns a key that is equal for modules with the same computation; None if unknown.

    The keys of modules are equal if their types, parameter shapes and plain attributes are equal,
    and all other attributes are identical objects.
    """
    described: list[Hashable] = []
    for name, part in module.named_modules():
        hooks = [key for key, value in vars(part).items() if key.endswith("_hooks") and value]
        plain = {key: value for key, value in vars(part).items() if key not in _OF_MODULE}
        comparable = tuple(sorted((key, _value(value)) for key, value in plain.items()))
        if hooks or any(value is None for _, value in comparable):
            return None
        described.append((name, type(part), part.training, comparable))
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            described.append((name, tensor.shape, tensor.stride(), tensor.dtype))
            described.append(tensor.requires_grad)
    return tuple(described)


def _value(value: Any) -> str | None:
    """Returns an attribute as text, for sorting; None if it cannot be compared."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list) and all(isinstance(item, _PLAIN) for item in value):
        return repr(value)
    if callable(value) and not isinstance(value, nn.Module):
        return f"object {id(value)}"
    return None


def _form(layer_input: LayerInput) -> Hashable:
    leaves, tree = tree_flatten(layer_input)
    ids = [storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        str(tree),
        tuple(ids.index(number) for number in ids),
        tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else repr(leaf)
            for leaf in leaves
        ),
    )
