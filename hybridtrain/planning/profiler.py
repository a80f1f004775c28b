"""Measured costs: each layer of a chain is run by itself on one micro-batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hybridtrain.graph.layer import Layer
from hybridtrain.memory import count_saved
from hybridtrain.planning.costs import (
    LayerCost,
    LayerInput,
    LayerRun,
    count,
    detached,
    preserve_buffers,
    run_chain,
    run_layer,
    undisturbed,
)

# How often `LayerProfiler.repeat` times each layer, at most.
MAX_REPEATS = 10

# A first pass that has taken this many seconds already goes on with less care: a layer whose
# warm-up took longer than so many milliseconds is not timed as well.
FIRST_PASS_BUDGET_S = 3.0
SLOW_MS = 50.0

# How many runs' results are kept on a CPU. A step keeps what it makes for a while; if each layer's
# results were dropped at once, the C library would give the memory back to the system, and the next
# layer's time would be that of getting it again, page by page.
RECENT = 8


class LayerProfiler:
    """Measures the layers of a chain.

    It leaves no gradient and changes no buffer, no default generator and none of the inputs. The
    modules stay on `device`. Layers run in the mode they are in; if all are in evaluation mode
    there is no backward. At first every layer is warmed up and timed once, or only the former if
    all takes long: enough to see which ones are large. `repeat` makes the times better.

    Args:
        layers: the chain.
        inputs: a micro-batch, as the first layer takes it.
        device: where all layers run.
        crossing_device: where the next stage may be; None if on the same device.
        precision: the context that a forward runs in, such as autocast.
        on_device: a context for each run of a layer, in which its weights are on `device`.

    Raises:
        Exception: whatever a layer raises, with a note that names the layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        inputs: Any,
        device: torch.device,
        *,
        crossing_device: torch.device | None = None,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
        on_device: Callable[[Layer], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._layers = layers
        self._device = device
        self._precision = precision or nullcontext
        self._on_device = on_device or (lambda _: nullcontext())
        self._timers: list[_LayerTimer] = []
        self._recent: deque[Any] = deque(maxlen=RECENT if device.type == "cpu" else 0)
        self._patient_until = perf_counter() + FIRST_PASS_BUDGET_S
        with undisturbed(layers, device):
            # copied, as micro-batches are views of all of a batch's memory
            copies = tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), inputs)
            self._bytes = run_chain(layers, copies, self._first_run)
            self._crossing_ms = {
                nbytes: _copy_ms(nbytes, device, crossing_device or device)
                for nbytes in {crossing for _, crossing in self._bytes}
            }

    def repeat(self, seconds: float) -> None:
        """Times the layers again, once and, for about `seconds`, more often.

        A round goes over all layers, one after the other: what disturbs the machine for a while
        disturbs a run or two of each, which the median leaves out.
        """
        deadline = perf_counter() + seconds
        with undisturbed(self._layers, self._device):
            for _ in range(MAX_REPEATS):
                for timer in self._timers:
                    with self._on_device(timer.layer):
                        timer.run()
                if perf_counter() > deadline:
                    break

    def costs(self, *, optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
        """Returns what each layer costs, by the median of its times; argument as for `count`."""
        weights = count(self._layers, optimizer_tensors_per_param=optimizer_tensors_per_param)
        return [
            replace(
                cost,
                forward_ms=_median_warm(timer.forward_ms),
                backward_ms=_median_warm(timer.backward_ms),
                activation_bytes=activations,
                crossing_bytes=crossing,
                crossing_ms=self._crossing_ms[crossing],
            )
            for cost, timer, (activations, crossing) in zip(
                weights, self._timers, self._bytes, strict=True
            )
        ]

    def _first_run(
        self, layer: Layer, given: LayerInput
    ) -> tuple[Any, dict[str, Any], dict[int, int]]:
        timer = _LayerTimer(layer, given, self._device, self._precision, self._recent)
        with self._on_device(layer):
            output, stashed, saved = timer.warm_up()
            slow = timer.forward_ms[0] + timer.backward_ms[0] > SLOW_MS
            if not slow or perf_counter() < self._patient_until:
                timer.run()
        self._timers.append(timer)
        return output, stashed, saved


@dataclass
class _LayerTimer:
    """A layer, what it is given in the chain, and how long its runs have taken."""

    layer: Layer
    given: LayerInput
    device: torch.device
    precision: Callable[[], AbstractContextManager[object]]
    recent: deque[Any]
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    def warm_up(self) -> tuple[Any, dict[str, Any], dict[int, int]]:
        """Runs the layer and counts what it keeps; see `RunLayer`."""
        # inside, where the buffers are copies
        with self._prepared() as module, count_saved(module) as saved:
            ran = self._run(module)
        return *tree_map_only(Tensor, detached, (ran.output, ran.stashed)), saved.storages

    def run(self) -> None:
        """Runs the layer and notes how long it took."""
        with self._prepared() as module:
            self._run(module)

    @contextmanager
    def _prepared(self) -> Iterator[nn.Module]:
        module = self.layer.module
        try:
            module.to(self.device)
            with preserve_buffers(module):
                yield module
        except Exception as error:
            error.add_note(f"in layer {self.layer.name!r}, while its cost was measured")
            raise

    def _run(self, module: nn.Module) -> LayerRun:
        ran = run_layer(module, self.given, self.precision, lambda work: _timed(work, self.device))
        self.forward_ms.append(ran.forward_ms)
        self.backward_ms.append(ran.backward_ms)
        self.recent.append((ran.output, ran.gradients))
        return ran


@contextmanager
def intra_op_threads(stages: int) -> Iterator[None]:
    """Sets as many intra-op threads as each of the `stages` of a process will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // stages))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(work: Callable[[], Any], *devices: torch.device) -> tuple[Any, float]:
    """Returns the result of `work`, and the milliseconds until `devices` are done with it."""
    _wait(devices)
    start = perf_counter()
    result = work()
    _wait(devices)
    return result, (perf_counter() - start) * 1e3


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _copy_ms(nbytes: int, source: torch.device, target: torch.device) -> float:
    """Returns the milliseconds to copy `nbytes` from device to device."""
    if source == target:
        return 0.0
    block = torch.empty(nbytes, dtype=torch.uint8, device=source)
    times = [_timed(lambda: block.to(target), source, target)[1] for _ in range(6)]
    return _median_warm(times)


def _median_warm(times: Sequence[float]) -> float:
    """Returns the median without the first time, which warms up, if there are more."""
    return median(times[1:] or times)
