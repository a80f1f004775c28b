"""Measured costs: each layer of a chain is run by itself on one micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain._torch_private import has_hooks
from hybridtrain.construction import stand_in
from hybridtrain.graph import Layer
from hybridtrain.memory import count_saved
from hybridtrain.planning.costs import (
    Given,
    LayerCost,
    LayerRun,
    copy_of,
    run_chain,
    run_layer,
    undisturbed,
)

# How often `LayerProfiler.repeat` times each layer, at most.
MAX_REPEATS = 10

# After so many seconds of the first pass, a layer whose warm-up took longer than so many
# milliseconds is not timed as well.
FIRST_PASS_BUDGET_S = 3.0
SLOW_MS = 50.0

# How many runs' results are kept on a CPU, as a step does. If they were dropped at once, the C
# library would give the memory back, and the next layer would be timed getting it, page by page.
RECENT = 8
# The same where the model has no values: to have room for it all is what that is for.
RECENT_WITHOUT_VALUES = 2


# How often a layer is run alone and together with others like it, of which there are no more.
_CONTENTION_REPEATS = 8
_MOST_TOGETHER = 8


class _Timing(NamedTuple):
    """A layer, its input in the chain, and the times of its runs."""

    layer: Layer
    given: Given
    forward_ms: list[float]
    backward_ms: list[float]


class LayerProfiler:
    """Measures the layers of a chain.

    Copies of the layers run, one at a time, so that none leaves a trace in the model. The default
    generators and the inputs stay as they were. Layers run in the mode they are in; if all are in
    evaluation mode there is no backward. At first every layer is warmed up and timed once, or only
    warmed up if this takes long.

    Args:
        layers: the chain; for parameters on the meta device there are random values.
        inputs: a micro-batch, as the first layer takes it.
        devices: those of the process's stages, which share its intra-op threads. Layers run on the
            first.
        precision: the context that a forward runs in, such as autocast.
        optimizer_tensors_per_param: as for `count`.

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
        self._devices = devices
        self._device = device = devices[0]
        self._precision = precision or nullcontext
        self._timings: list[_Timing] = []
        # of few layers fewer, or most runs would get new memory
        kept = min(RECENT, 2 * len(layers)) if device.type == "cpu" else 0
        if any(p.is_meta for layer in layers for p in layer.module.parameters()):
            kept = min(kept, RECENT_WITHOUT_VALUES)
        self._recent: deque[LayerRun] = deque(maxlen=kept)
        self._patient_until = perf_counter() + FIRST_PASS_BUDGET_S
        with self._as_in_a_step(layers):
            # copied, as micro-batches are views of all of a batch's memory
            copies = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), inputs)
            costs = run_chain(layers, copies, self._first_run, optimizer_tensors_per_param)
            copy_ms = cache(partial(_copy_ms, device, devices[-1]))
            self._costs = [replace(c, crossing_ms=copy_ms(c.crossing_bytes)) for c in costs]

    def repeat(self, seconds: float) -> None:
        """Times the layers again: at least once, and for about `seconds`.

        A round goes over all layers, one after the other: what disturbs the machine for a while
        disturbs a run or two of each, which the median leaves out.
        """
        deadline = perf_counter() + seconds
        with self._as_in_a_step([timing.layer for timing in self._timings]):
            for _ in range(MAX_REPEATS):
                for timing in self._timings:
                    with self._copied(timing.layer) as (module,):
                        self._run(timing, module)
                if perf_counter() > deadline:
                    break

    def costs(self) -> list[LayerCost]:
        """Returns what each layer costs, by the median of its times."""
        medians = [map(_median_warm, (t.forward_ms, t.backward_ms)) for t in self._timings]
        return [
            replace(cost, forward_ms=forward, backward_ms=backward)
            for cost, (forward, backward) in zip(self._costs, medians, strict=True)
        ]

    def contention(self) -> float:
        """Returns how much longer the longest layer takes while all devices run one like it.

        CPU stages share caches, memory and the interpreter: 1 for GPUs, and for one device. Alone
        and together take turns, so that what disturbs the machine disturbs both.
        """
        others = min(len(self._devices), _MOST_TOGETHER) - 1
        if self._device.type != "cpu" or others < 1:
            return 1.0
        timing = max(self._timings, key=lambda t: median(t.forward_ms) + median(t.backward_ms))
        alone: list[float] = []
        together: list[float] = []
        with (
            self._as_in_a_step([timing.layer]),
            self._copied(timing.layer, 1 + others) as modules,
        ):
            gradients = torch.is_grad_enabled()

            def run(module: nn.Module) -> float:
                with torch.set_grad_enabled(gradients):  # of each thread its own
                    clock = partial(_timed, self._device)
                    ran = run_layer(module, timing.given, self._precision, clock)
                return ran.forward_ms + ran.backward_ms

            with ThreadPoolExecutor(len(modules)) as threads:
                for _ in range(_CONTENTION_REPEATS):
                    alone.append(threads.submit(run, modules[0]).result())
                    together += threads.map(run, modules)
        return max(1.0, median(together) / median(alone))

    def _first_run(self, layer: Layer, given: Given) -> tuple[LayerRun, Mapping[int, int]]:
        timing = _Timing(layer, given, [], [])
        self._timings.append(timing)
        with self._copied(layer) as (module,):
            with count_saved(module) as saved:
                ran = self._run(timing, module)
            slow = ran.forward_ms + ran.backward_ms > SLOW_MS
            if not slow or perf_counter() < self._patient_until:
                self._run(timing, module)
        return ran, saved.storages

    def _run(self, timing: _Timing, module: nn.Module) -> LayerRun:
        clock = partial(_timed, self._device)
        ran = run_layer(module, timing.given, self._precision, clock)
        timing.forward_ms.append(ran.forward_ms)
        timing.backward_ms.append(ran.backward_ms)
        self._recent.append(ran)
        return ran

    @contextmanager
    def _copied(self, layer: Layer, number: int = 1) -> Iterator[list[nn.Module]]:
        """Yields copies of a layer on the device, and names the layer in what they raise."""

        def own(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return stand_in(tensor, self._device)
            return tensor.detach().to(self._device, copy=True)

        modules = [copy_of(layer, own).to(self._device) for _ in range(number)]
        try:
            yield modules
        except Exception as error:
            error.add_note(f"in layer {layer.name!r}, while its cost was measured")
            if any(map(has_hooks, layer.module.modules())):
                error.add_note("hooks of modules do not run while costs are measured")
            raise

    @contextmanager
    def _as_in_a_step(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Gives layers the intra-op threads and the gradient mode that they have in a step."""
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, threads // len(self._devices)))
        try:
            with undisturbed(layers, self._device):
                yield
        finally:
            torch.set_num_threads(threads)


def _timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
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
    return _median_warm([_timed(device, lambda: block.to(target))[1] for _ in range(6)])


def _median_warm(times: Sequence[float]) -> float:
    """Returns the median without the first time, which warms up, if there are more."""
    return median(times[1:] or times)
