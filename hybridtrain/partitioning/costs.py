"""The costs of a model's layers for one micro-batch: time, memory, and bytes that cross a cut.

The bytes of weights are counted (`count`). The other costs need a run of the chain, layer by layer
on copies (`run_chain`): timed on the device (`LayerProfiler`), or on fake tensors with counters
(`estimates`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.construction import default_generators, rewind, stand_in
from hybridtrain._base.skip import popped_by, skip_scope, stashed_by
from hybridtrain._base.tensors import byte_size, count_saved, storage_id
from hybridtrain._base.torch_private import has_hooks, hooks_of
from hybridtrain.errors import ConfigError, setting
from hybridtrain.graph import Layer, Segment, works_in_place


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, for one micro-batch; times are in milliseconds.

    Attributes:
        parameters: the number of elements of its parameters.
        weight_bytes: its parameters and buffers, and the gradients and optimizer state of its
            trained parameters.
        activation_bytes: the tensors it makes that autograd saves for its backward or a later
            layer's; for the first layer also the model's inputs.
        temporary_bytes: the peak of further memory during its forward or backward: intermediate
            values, gradients, and an input that no backward needs; 0 if unknown.
        crossing_bytes: the values that cross a cut right after it: its output, and values of
            earlier layers that later layers need.
        crossing_ms: the time to send these values to another device; 0 on the same device.
    """

    name: str
    parameters: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    temporary_bytes: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0


@dataclass(frozen=True)
class LayerSize:
    """The bytes of a layer's parameters and buffers, and of the parameters that are trained.

    Attributes:
        weights: bytes of all parameters and buffers.
        trained: bytes of the trained parameters.
        parameters: the number of elements of the parameters.
        frozen: bytes of the parameters that are not trained.
    """

    weights: int
    trained: int
    parameters: int = 0
    frozen: int = 0


def layer_sizes(layers: Sequence[Layer]) -> list[LayerSize]:
    """Returns the size of each layer; a shared parameter counts in the first layer that has it."""
    counted: set[int] = set()
    sizes = []
    for layer in layers:
        parameters = [p for p in layer.module.parameters() if id(p) not in counted]
        buffers = [b for b in layer.module.buffers() if id(b) not in counted]
        counted.update(map(id, [*parameters, *buffers]))
        weights = sum(map(byte_size, [*parameters, *buffers]))
        trained = sum(byte_size(p) for p in parameters if p.requires_grad)
        frozen = sum(map(byte_size, parameters)) - trained
        sizes.append(LayerSize(weights, trained, sum(p.numel() for p in parameters), frozen))
    return sizes


def count(layers: Sequence[Layer], optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
    """Returns the costs that need no run: the parameters and bytes of the weights.

    Args:
        layers: the layers of the chain, on any device.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it;
            AdamW keeps 2.
    """
    return [
        LayerCost(
            layer.name,
            parameters=size.parameters,
            weight_bytes=size.weights + size.trained * (1 + optimizer_tensors_per_param),
        )
        for layer, size in zip(layers, layer_sizes(layers), strict=True)
    ]


# Runs a function and returns its result and how long it took, in milliseconds.
Clock = Callable[[Callable[[], Any]], tuple[Any, float]]

# The input of a layer in the chain: the value before it, and the skip values that it pops.
LayerInput = tuple[Any, dict[str, Any]]


class LayerRun(NamedTuple):
    """The results of one forward and backward of a layer.

    Attributes:
        handed_on: the output, and the skip values that the layer stashes, without their graph.
        gradients: the gradients of its inputs and trained parameters.
        forward_ms: milliseconds of the forward.
        backward_ms: milliseconds of the backward; 0 without a backward.
    """

    handed_on: tuple[Any, dict[str, Any]]
    gradients: Sequence[Tensor | None]
    forward_ms: float
    backward_ms: float


def run_layer(
    module: nn.Module,
    layer_input: LayerInput,
    precision: Callable[[], AbstractContextManager[object]],
    clock: Clock,
) -> LayerRun:
    """Runs a layer's copy alone, like a stage of one layer: its inputs are leaves of a new graph.

    It runs a backward if gradients are enabled and an output requires them, and leaves no
    gradients.

    Args:
        module: the copy of the layer's module.
        layer_input: the input of the layer.
        precision: returns the context for the forward.
        clock: runs a function and measures it.
    """
    leaves: list[Tensor] = [tensor for tensor in module.parameters() if tensor.requires_grad]
    copy = works_in_place(module)

    def enter(tensor: Tensor) -> Tensor:
        leaf = _detached(tensor)
        if leaf.requires_grad:
            leaves.append(leaf)
        return leaf.clone() if copy else leaf

    value, popped = tree_map_only(Tensor, enter, layer_input)

    def forward() -> tuple[Any, dict[str, Any]]:
        with precision(), skip_scope(popped) as values:
            return module(value), values

    (output, values), forward_ms = clock(forward)
    handed_on = output, {name: values[name] for name in stashed_by(module)}
    roots = [tensor for tensor in tensors_of(handed_on) if tensor.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    backward_ms = 0.0
    if torch.is_grad_enabled() and roots:
        ones = [torch.ones_like(root) for root in roots]
        # not autograd.grad, in which a reentrant checkpoint in the layer could not run
        _, backward_ms = clock(lambda: torch.autograd.backward(roots, ones))
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
    return LayerRun(tree_map_only(Tensor, _detached, handed_on), gradients, forward_ms, backward_ms)


# Runs a layer; also returns the bytes of each storage that autograd saves for its backward, by id.
RunLayer = Callable[[Layer, LayerInput], tuple[LayerRun, Mapping[int, int]]]


def run_chain(
    layers: Sequence[Layer], inputs: Any, run: RunLayer, optimizer_tensors_per_param: int = 2
) -> list[LayerCost]:
    """Runs a micro-batch through the chain, and returns the costs of this one run."""
    maker = {storage_id(tensor): 0 for tensor in tensors_of(inputs)}  # the layer that made it
    counted = set[int]()
    stashes: dict[str, Any] = {}
    last_pop = {name: i for i, layer in enumerate(layers) for name in popped_by(layer.module)}
    costs = count(layers, optimizer_tensors_per_param)
    activations = [0] * len(layers)
    layer_inputs: list[LayerInput] = []  # kept alive, so that no storage id is reused
    value = inputs
    for index, layer in enumerate(layers):
        popped = {name: stashes[name] for name in popped_by(layer.module) if name in stashes}
        layer_inputs.append((value, popped))
        ran, saved = run(layer, layer_inputs[-1])
        value, stashed = ran.handed_on
        stashes = {k: v for k, v in (stashes | stashed).items() if last_pop.get(k, 0) > index}
        for storage, nbytes in saved.items():
            activations[maker.get(storage, index)] += nbytes * (storage not in counted)
        counted.update(maker.keys() & saved)
        crossing = tensors_of((value, stashes))
        for tensor in crossing:
            if storage_id(tensor) not in maker:
                maker[storage_id(tensor)] = index
                counted |= {storage_id(tensor)} & saved.keys()
        costs[index] = replace(
            costs[index],
            forward_ms=ran.forward_ms,
            backward_ms=ran.backward_ms,
            crossing_bytes=sum(map(byte_size, crossing)),
        )
    pairs = zip(costs, activations, strict=True)
    return [replace(cost, activation_bytes=nbytes) for cost, nbytes in pairs]


def copy_of(layer: Layer, replacement: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a layer's module that can run without side effects on the model.

    Hooks do not run in the copy, and synchronised batch norms normalise locally, because other
    processes do not take part.

    Args:
        layer: the layer.
        replacement: returns the copy's tensor for a parameter, a buffer or another tensor.

    Raises:
        ConfigError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for part in layer.module.modules():
        if isinstance(part, Segment):
            memo |= part.surroundings()
        for leaf in tree_leaves(dict(vars(part))):  # includes its parameters and buffers
            if isinstance(leaf, torch.Generator):
                memo[id(leaf)] = leaf.clone_state()
            elif isinstance(leaf, Tensor) and id(leaf) not in memo:
                value = replacement(leaf).requires_grad_(leaf.requires_grad)
                is_parameter = isinstance(leaf, nn.Parameter)
                memo[id(leaf)] = nn.Parameter(value, value.requires_grad) if is_parameter else value
    try:
        module = deepcopy(layer.module, memo)
    except Exception as error:
        raise ConfigError(
            f"layer {layer.name!r} cannot be copied to measure its cost ({error}): choose a "
            f"split without measurements, such as {setting('split', 'uniform')} or "
            f"{setting('split', 'size')}"
        ) from error
    for part in module.modules():
        for hooks in hooks_of(part):
            hooks.clear()
        if isinstance(part, nn.SyncBatchNorm):
            part.forward = MethodType(_BatchNorm.forward, part)  # type: ignore[method-assign]
    return module


@contextmanager
def undisturbed(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
    """Enables gradients in the block, and restores the default generators after it.

    If the whole model is in evaluation mode, as `from_pretrained` returns it, it is in training
    mode in the block, because it will be trained. Otherwise modules keep their modes.

    Args:
        layers: all layers of the model.
        device: the device that they run on.
    """
    # for a traced model the original modules, because the graph's modules have no mode
    roots = [m.root if isinstance(m := layer.module, Segment) else m for layer in layers]
    modes = {part: part.training for root in dict.fromkeys(roots) for part in root.modules()}
    gpus = [device] if device.type == "cuda" else []
    generator_states = default_generators()
    try:
        if not any(modes.values()):
            for part in modes:
                part.training = True
        with torch.random.fork_rng(gpus), torch.enable_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
        rewind(generator_states)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in a pytree."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(tensor: Tensor) -> Tensor:
    """Returns a detached tensor with the same `requires_grad`."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


# The most times that `LayerProfiler.repeat` times each layer.
MAX_REPEATS = 10

# After this many seconds of the first pass, layers whose warm-up took longer than SLOW_MS are not
# timed in it.
FIRST_PASS_BUDGET_S = 3.0
SLOW_MS = 50.0

# The number of runs whose results are kept alive on a CPU, as in a step. If they were freed at
# once, the C library would return the memory, and the next layer's time would include page faults.
RECENT = 8
# The same for a model without values, which is used where memory is short.
RECENT_WITHOUT_VALUES = 2


# How often a layer runs alone and together with copies, and the most copies.
_CONTENTION_REPEATS = 8
_MOST_TOGETHER = 8


class _Timing(NamedTuple):
    """A layer, its input in the chain, and the times of its runs in milliseconds."""

    layer: Layer
    layer_input: LayerInput
    forward_ms: list[float]
    backward_ms: list[float]


class LayerProfiler:
    """Measures the layers of a chain.

    It runs copies of the layers, one at a time, and does not change the model, the default
    generators or the inputs. Layers keep their modes; if all are in evaluation mode, they run in
    training mode. The constructor warms every layer up and times it once, or only warms it up if
    this takes long.

    Args:
        layers: the chain; parameters on the meta device get random values.
        inputs: the inputs of a micro-batch.
        devices: the devices of the process's stages, which share its intra-op threads. Layers run
            on the first device.
        precision: returns the context of a forward, such as autocast.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it.

    Raises:
        Exception: whatever a layer raises, with a note that names the layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Any,
        devices: Sequence[torch.device],
        *,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
        optimizer_tensors_per_param: int = 2,
    ) -> None:
        self._layers = layers
        self._devices = devices
        self._device = device = devices[0]
        self._precision = precision or nullcontext
        self._timings: list[_Timing] = []
        # fewer for few layers, or most runs would get new memory
        recent_runs = min(RECENT, 2 * len(layers)) if device.type == "cpu" else 0
        if any(p.is_meta for layer in layers for p in layer.module.parameters()):
            recent_runs = min(recent_runs, RECENT_WITHOUT_VALUES)
        self._recent: deque[LayerRun] = deque(maxlen=recent_runs)
        self._patient_until = perf_counter() + FIRST_PASS_BUDGET_S
        with self._as_in_a_step():
            # copied, because a micro-batch is a view of the whole batch's memory
            copies = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), inputs)
            costs = run_chain(layers, copies, self._first_run, optimizer_tensors_per_param)
            copy_ms = cache(partial(_copy_ms, device, devices[-1]))
            self._costs = [replace(c, crossing_ms=copy_ms(c.crossing_bytes)) for c in costs]

    def repeat(self, seconds: float) -> None:
        """Times the layers again: at least once, and for about `seconds`.

        Each round times all layers once, so that a temporary disturbance affects only a run or two
        of each layer, which the median ignores.
        """
        deadline = perf_counter() + seconds
        with self._as_in_a_step():
            for _ in range(MAX_REPEATS):
                for timing in self._timings:
                    with self._copied(timing.layer) as (module,):
                        self._run(timing, module)
                if perf_counter() > deadline:
                    break

    def costs(self) -> list[LayerCost]:
        """Returns the cost of each layer, with the medians of its times."""
        medians = [map(_median_warm, (t.forward_ms, t.backward_ms)) for t in self._timings]
        return [
            replace(cost, forward_ms=forward, backward_ms=backward)
            for cost, (forward, backward) in zip(self._costs, medians, strict=True)
        ]

    def contention(self) -> float:
        """Returns the slowdown factor of the slowest layer while all devices run a copy of it.

        CPU stages share caches, memory and the interpreter; the factor is 1 for GPUs and for one
        device. Runs alone and together alternate, so that a disturbance affects both.
        """
        other_devices = min(len(self._devices), _MOST_TOGETHER) - 1
        if self._device.type != "cpu" or other_devices < 1:
            return 1.0
        timing = max(self._timings, key=lambda t: median(t.forward_ms) + median(t.backward_ms))
        alone: list[float] = []
        together: list[float] = []
        with (
            self._as_in_a_step(),
            self._copied(timing.layer, 1 + other_devices) as modules,
        ):

            def run(module: nn.Module) -> float:
                with torch.enable_grad():  # the mode is per thread
                    clock = partial(timed, self._device)
                    ran = run_layer(module, timing.layer_input, self._precision, clock)
                return ran.forward_ms + ran.backward_ms

            with ThreadPoolExecutor(len(modules)) as threads:
                for _ in range(_CONTENTION_REPEATS):
                    alone.append(threads.submit(run, modules[0]).result())
                    together += threads.map(run, modules)
        return max(1.0, median(together) / median(alone))

    def _first_run(
        self, layer: Layer, layer_input: LayerInput
    ) -> tuple[LayerRun, Mapping[int, int]]:
        timing = _Timing(layer, layer_input, [], [])
        self._timings.append(timing)
        with self._copied(layer) as (module,):
            with count_saved(module) as saved:
                ran = self._run(timing, module)
            slow = ran.forward_ms + ran.backward_ms > SLOW_MS
            if not slow or perf_counter() < self._patient_until:
                self._run(timing, module)
        return ran, saved.storages

    def _run(self, timing: _Timing, module: nn.Module) -> LayerRun:
        clock = partial(timed, self._device)
        ran = run_layer(module, timing.layer_input, self._precision, clock)
        timing.forward_ms.append(ran.forward_ms)
        timing.backward_ms.append(ran.backward_ms)
        self._recent.append(ran)
        return ran

    @contextmanager
    def _copied(self, layer: Layer, number: int = 1) -> Iterator[list[nn.Module]]:
        """Yields copies of a layer on the device, and adds the layer's name to their errors."""

        def on_device(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return stand_in(tensor, self._device)
            return tensor.detach().to(self._device, copy=True)

        modules = [copy_of(layer, on_device).to(self._device) for _ in range(number)]
        try:
            yield modules
        except Exception as error:
            error.add_note(f"in layer {layer.name!r}, while measuring its cost")
            if any(map(has_hooks, layer.module.modules())):
                error.add_note("module hooks do not run while costs are measured")
            raise

    @contextmanager
    def _as_in_a_step(self) -> Iterator[None]:
        """Sets the intra-op threads and the gradient mode of a step in the block."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // len(self._devices)))
        try:
            with undisturbed(self._layers, self._device):
                yield
        finally:
            torch.set_num_threads(threads)


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `work`, and the milliseconds until `device` is done with it."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = perf_counter()
    result = work()
    wait()
    return result, (perf_counter() - start) * 1e3


def _copy_ms(source: torch.device, target: torch.device, nbytes: int) -> float:
    """Returns the milliseconds to copy `nbytes` from device to device."""
    if source == target:
        return 0.0
    block = torch.empty(nbytes, dtype=torch.uint8, device=source)
    # a copy to a CPU waits for the GPU
    device = target if target.type == "cuda" else source
    return _median_warm([timed(device, lambda: block.to(target))[1] for _ in range(6)])


def _median_warm(times: Sequence[float]) -> float:
    """Returns the median without the first time, which is a warm-up, if there are others."""
    return median(times[1:] or times)
