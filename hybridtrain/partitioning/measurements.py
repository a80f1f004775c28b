"""Measured costs: forwards and backwards of a micro-batch, with a stopwatch at each layer's begin.

The model runs as in training, on a copy: what its layers share, and the code between them, takes
its time where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain._base.construction import stand_in
from hybridtrain._base.hardware import host_memory
from hybridtrain._base.intra_op_threads import intra_op_threads, threads_per_lane
from hybridtrain._base.module_call import watch_calls
from hybridtrain._base.skip import pop, popped_by, skip_scope, stashed_by
from hybridtrain._base.tensors import byte_size
from hybridtrain._base.text_table import with_unit
from hybridtrain._base.torch_private import has_hooks
from hybridtrain._base.values import structure_copy
from hybridtrain.errors import ConfigError, argument, setting
from hybridtrain.graph import Layer
from hybridtrain.partitioning.costs import (
    LayerCost,
    StateOf,
    copy_of,
    count,
    tensors_of,
    undisturbed,
)
from hybridtrain.partitioning.layer_watch import LayerWatch, weights_of
from hybridtrain.partitioning.work_counter import counted_work

# The most times that `LayerProfiler.repeat` runs the model.
MAX_REPEATS = 10

# How often a layer runs alone and together with copies, and the most copies.
_CONTENTION_REPEATS = 8
_MOST_TOGETHER = 8


class LayerProfiler:
    """Measures the layers of a model.

    It runs a copy of the model, and does not change the model, the default generators or the
    inputs. Modules keep their modes; if all are in evaluation mode, they run in training mode. The
    constructor counts bytes in a first run, and times a second one.

    Args:
        layers: the layers; parameters on the meta device get random values.
        inputs: the inputs of a micro-batch.
        devices: the devices of the process's stages, which share its intra-op threads. The model
            runs on the first device.
        precision: returns the context of a forward, such as autocast.
        optimizer_tensors_per_param: see `costs.count`.
        loss: a loss that follows as a further layer.

    Raises:
        ConfigError: the device has too little memory for the weights and a micro-batch.
        Exception: whatever a layer raises, with a note that names the layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Any,
        devices: Sequence[torch.device],
        *,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
        optimizer_tensors_per_param: float | StateOf = 2,
        loss: Layer | None = None,
    ) -> None:
        self._layers = layers
        self._inputs = inputs
        self._devices = devices
        self._device = device = devices[0]
        self._precision = precision or nullcontext
        self._stopwatches: list[_Stopwatch] = []
        with self._as_in_a_step():
            weights = sum(map(byte_size, weights_of(layers)))
            if device.type == "cpu" and weights > host_memory():
                raise self._too_large(weights)
            self._watch = LayerWatch(layers, self._copied, loss)
            self._watch.parts.to(device)
            with self._naming_layers():  # this also warms up
                work = counted_work(self._watch, self._own_inputs(), self._precision)
            self._run()
            copy_ms = cache(partial(_copy_ms, device, devices[-1]))
            end = [] if loss is None else [loss]
            self._costs = [
                replace(counted.of(cost), crossing_ms=copy_ms(counted.crossing_bytes))
                for cost, counted in zip(
                    [*count(layers, optimizer_tensors_per_param), *count(end)], work, strict=True
                )
            ]

    def repeat(self, seconds: float) -> None:
        """Times the model again: at least once, and for about `seconds`.

        Each run times all layers once, so that a temporary disturbance affects only a run or two
        of each layer, which the median ignores.
        """
        deadline = perf_counter() + seconds
        with self._as_in_a_step():
            for _ in range(MAX_REPEATS):
                self._run()
                if perf_counter() > deadline:
                    break

    def costs(self) -> list[LayerCost]:
        """Returns the cost of each layer, and of the loss, with the medians of its times."""
        return [
            replace(
                cost,
                forward_ms=median(watch.forward_ms[index] for watch in self._stopwatches),
                backward_ms=median(watch.backward_ms[index] for watch in self._stopwatches),
            )
            for index, cost in enumerate(self._costs)
        ]

    def contention(self) -> float:
        """Returns the slowdown factor of the slowest layer while all devices run a copy of it.

        CPU stages share caches, memory and the interpreter; the factor is 1 for GPUs and for one
        device. Runs alone and together alternate, so that a disturbance affects both.
        """
        other_devices = min(len(self._devices), _MOST_TOGETHER) - 1
        if self._device.type != "cpu" or other_devices < 1:
            return 1.0
        costs = self.costs()[: len(self._layers)]
        slowest = max(range(len(costs)), key=lambda i: costs[i].forward_ms + costs[i].backward_ms)
        alone: list[float] = []
        together: list[float] = []
        with self._as_in_a_step(), self._naming_layers():
            layer = Layer(costs[slowest].name, self._watch.modules[slowest])
            call = self._call_of(layer.module)
            if call is None:  # a forward that depends on values has left it out
                return 1.0
            modules = [copy_of(layer, self._copied) for _ in range(1 + other_devices)]
            run = partial(_timed_call, self._precision, call)
            with ThreadPoolExecutor(len(modules)) as threads:
                for _ in range(_CONTENTION_REPEATS):
                    alone.append(threads.submit(run, modules[0]).result())
                    together += threads.map(run, modules)
        return max(1.0, median(together) / median(alone))

    def _call_of(self, module: nn.Module) -> _Call | None:
        """Returns the first call of a module, in a run."""
        calls: list[_Call] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not calls:
                popped = {name: pop(name) for name in popped_by(module)}
                calls.append(_Call(*structure_copy((args, kwargs, popped), _detached)))

        end = watch_calls(module, note, lambda *_: None)
        try:
            stopwatch = _Stopwatch(self._device, len(self._watch.names))
            self._watch.run(self._own_inputs(), self._precision, stopwatch)
        finally:
            end()
        return calls[0] if calls else None

    def _run(self) -> None:
        stopwatch = _Stopwatch(self._device, len(self._watch.names))
        inputs = self._own_inputs()
        with self._naming_layers():
            self._watch.run(inputs, self._precision, stopwatch)
        stopwatch.stop()
        self._stopwatches.append(stopwatch)

    def _own_inputs(self) -> Any:
        """Returns a copy, because a micro-batch is a view of the batch, and may be changed."""
        return structure_copy(
            self._inputs, lambda tensor: tensor.detach().to(self._device, copy=True)
        )

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return stand_in(tensor, self._device)
        return tensor.detach().to(self._device, copy=True)

    @contextmanager
    def _naming_layers(self) -> Iterator[None]:
        """Adds the layer's name to the errors of a run."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            weights = sum(map(byte_size, weights_of(self._layers)))
            raise self._too_large(weights) from error
        except Exception as error:
            layer = self._watch.layer
            error.add_note(f"in layer {self._watch.names[layer]!r}, while measuring its cost")
            if any(has_hooks(m) for module in self._layers for m in module.module.modules()):
                error.add_note("module hooks do not run while costs are measured")
            raise

    def _too_large(self, weights: int) -> ConfigError:
        return ConfigError(
            f"{self._device} has too little memory to measure costs, which takes the weights of "
            f"the whole model ({with_unit(weights)}) and the activations of a micro-batch: use "
            f"estimated costs ({argument('costs')}, hardware.costs=estimated), a split without "
            f"measurements such as {setting('split', 'size')}, or more micro-batches"
        )

    @contextmanager
    def _as_in_a_step(self) -> Iterator[None]:
        """Sets the intra-op threads and the gradient mode of a step in the block."""
        threads = threads_per_lane(len(self._devices))
        with intra_op_threads(threads), undisturbed(self._layers, self._device):
            yield


class _Stopwatch:
    """The milliseconds of each layer in a run, with the device's work done at each border."""

    def __init__(self, device: torch.device, layers: int) -> None:
        self._device = device
        self.forward_ms = [0.0] * layers
        self.backward_ms = [0.0] * layers
        self._times: list[float] | None = None
        self._layer = 0
        self._since = 0.0

    def forward_begins(self, layer: int) -> None:
        """Ends the time of the layer before."""
        self._switch(self.forward_ms, layer)

    def forward_ends(self, output: Any) -> None:
        """Does nothing: the time until the backward is the last layer's."""

    def backward_begins(self, layer: int) -> None:
        """Ends the time of the layer before."""
        self._switch(self.backward_ms, layer)

    def stop(self) -> None:
        """Ends the time of the last layer."""
        self._switch(None, 0)

    def _switch(self, times: list[float] | None, layer: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = perf_counter()
        if self._times:
            self._times[self._layer] += (now - self._since) * 1e3
        self._times, self._layer, self._since = times, layer, now


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of `work`, and the milliseconds until `device` is done with it."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = perf_counter()
    result = work()
    wait()
    return result, (perf_counter() - start) * 1e3


class _Call(NamedTuple):
    """The arguments of a call of a module, and the skip values that it pops."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    popped: dict[str, Any]


def _timed_call(
    precision: Callable[[], AbstractContextManager[object]], call: _Call, module: nn.Module
) -> float:
    """Returns the milliseconds of a forward and a backward of a module, on a CPU."""
    args, kwargs, popped = structure_copy(tuple(call), _detached)

    def work() -> None:
        with torch.enable_grad():  # the mode is per thread
            with precision(), skip_scope(popped) as values:
                output = module(*args, **kwargs)
            stashed = [values[name] for name in stashed_by(module)]
            roots = [tensor for tensor in tensors_of((output, stashed)) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    milliseconds = timed(torch.device("cpu"), work)[1]
    for parameter in module.parameters():
        parameter.grad = None
    return milliseconds


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_ms(source: torch.device, target: torch.device, nbytes: int) -> float:
    """Returns the milliseconds to copy `nbytes` from device to device."""
    if source == target:
        return 0.0
    block = torch.empty(nbytes, dtype=torch.uint8, device=source)
    # a copy to a CPU waits for the GPU
    device = target if target.type == "cuda" else source
    return median(timed(device, lambda: block.to(target))[1] for _ in range(6))
