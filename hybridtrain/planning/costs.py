"""What the layers of a model cost: in time, in memory, and in bytes that cross a cut."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain.graph.layer import Layer
from hybridtrain.memory import address, count_saved
from hybridtrain.pipeline.activation_checkpoint import works_in_place
from hybridtrain.skip import popped_by, skip_scope, stashed_by

# How often `LayerProfiler.repeat` times each layer, at most.
REPEATS = 10

# A first look at a chain that has taken this many seconds already goes on with less care: a layer
# whose warm-up took longer than so many milliseconds is not timed as well.
FIRST_PASS_BUDGET_S = 3.0
SLOW_MS = 50.0

# How many runs' results are kept on a CPU. A step keeps what it makes for a while; if each layer's
# results were dropped at once, the C library would give the memory back to the system, and the next
# layer's time would be that of getting it again, page by page.
RECENT = 8


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs, for one micro-batch.

    TraceGuards:
        name: the layer's.
        parameters: elements of its parameters.
        forward_ms: milliseconds of its forward.
        backward_ms: milliseconds of its backward.
        weight_bytes: its parameters and buffers, and the gradients and the optimizer's state of
            those parameters that are trained.
        activation_bytes: what it makes that autograd keeps for a backward, its own or a later
            layer's. The first layer has the model's inputs too.
        crossing_bytes: what would cross a cut right after it: its own output, and every value of
            an earlier layer that a later one needs.
        crossing_ms: milliseconds to bring that to another device; 0 where it stays.
    """

    name: str
    parameters: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    weight_bytes: int = 0
    activation_bytes: int = 0
    crossing_bytes: int = 0
    crossing_ms: float = 0.0


def count(layers: Sequence[Layer], *, optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
    """The costs that need no run: parameters and the bytes of the weights, on any device.

    Args:
        layers: the chain. What several layers share counts in the first of them.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps of it; AdamW
            keeps 2.
    """
    seen: set[int] = set()
    costs = []
    for layer in layers:
        parameters = [p for p in layer.module.parameters() if id(p) not in seen]
        buffers = [b for b in layer.module.buffers() if id(b) not in seen]
        seen.update(map(id, [*parameters, *buffers]))
        copies = [1 + (1 + optimizer_tensors_per_param) * p.requires_grad for p in parameters]
        weight_bytes = sum(p.nbytes * n for p, n in zip(parameters, copies, strict=True))
        costs.append(
            LayerCost(
                layer.name,
                parameters=sum(p.numel() for p in parameters),
                weight_bytes=weight_bytes + sum(b.nbytes for b in buffers),
            )
        )
    return costs


class LayerProfiler:
    """The layers of a chain, each run by itself on one micro-batch, and what that has cost.

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
        visit: a context for every time that a layer's turn comes, such as one in which its weights
            are there.

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
        visit: Callable[[Layer], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._layers = layers
        self._device = device
        self._visit = visit or (lambda _: nullcontext())
        self._activation_bytes = [0] * len(layers)
        self._runs: list[_Run] = []
        self._recent: deque[Any] = deque(maxlen=RECENT if device.type == "cpu" else 0)
        with self._undisturbed():
            self._first_pass(inputs, precision or nullcontext)
            self._crossing_ms = {
                nbytes: _copy_ms(nbytes, device, crossing_device or device)
                for nbytes in {run.crossing_bytes for run in self._runs}
            }

    def repeat(self, seconds: float) -> None:
        """Times the layers again, once and, for about `seconds`, more often.

        A round goes over all layers, one after the other: what disturbs the machine for a while
        disturbs a run or two of each, which the median leaves out.
        """
        deadline = time.perf_counter() + seconds
        with self._undisturbed():
            for _ in range(REPEATS):
                for run in self._runs:
                    with self._visit(run.layer):
                        run.timed()
                if time.perf_counter() > deadline:
                    break

    def costs(self, *, optimizer_tensors_per_param: int = 2) -> list[LayerCost]:
        """What each layer costs, by the median of its times; the argument is that of `count`."""
        return [
            replace(
                weights,
                forward_ms=_median_warm(run.forward_ms),
                backward_ms=_median_warm(run.backward_ms),
                activation_bytes=kept,
                crossing_bytes=run.crossing_bytes,
                crossing_ms=self._crossing_ms[run.crossing_bytes],
            )
            for weights, run, kept in zip(
                count(self._layers, optimizer_tensors_per_param=optimizer_tensors_per_param),
                self._runs,
                self._activation_bytes,
                strict=True,
            )
        ]

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        trains = any(part.training for layer in self._layers for part in layer.module.modules())
        gpus = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(gpus), torch.set_grad_enabled(trains):
            yield

    def _first_pass(
        self, inputs: Any, precision: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Runs the chain, which shows what each layer is given, keeps and hands on."""
        patient_until = time.perf_counter() + FIRST_PASS_BUDGET_S
        # copied, as rows of a batch are views of all of its memory
        value = tree_map_only(Tensor, lambda tensor: tensor.to(self._device, copy=True), inputs)
        makers = {address(tensor): 0 for tensor in _tensors(value)}  # of what is handed on
        counted = set[int]()
        held: dict[str, Any] = {}
        last_pop = {
            name: index
            for index, layer in enumerate(self._layers)
            for name in popped_by(layer.module)
        }
        for index, layer in enumerate(self._layers):
            popped = {name: held[name] for name in popped_by(layer.module) if name in held}
            run = _Run(layer, self._device, precision, value, popped, self._recent)
            with self._visit(layer):
                value, stashed = run.warm_up()
                slow = run.forward_ms[0] + run.backward_ms[0] > SLOW_MS
                if not slow or time.perf_counter() < patient_until:
                    run.timed()
            held = {k: v for k, v in (held | stashed).items() if last_pop.get(k, 0) > index}
            for where, nbytes in run.saved.items():
                self._activation_bytes[makers.get(where, index)] += nbytes * (where not in counted)
            counted.update(makers.keys() & run.saved)
            crossing = _tensors((value, held))
            for tensor in crossing:
                if address(tensor) not in makers:
                    makers[address(tensor)] = index
                    counted |= {address(tensor)} & run.saved.keys()
            run.crossing_bytes = sum(tensor.nbytes for tensor in crossing)
            self._runs.append(run)


@dataclass
class _Run:
    """A layer, what it is given in the chain, and what its runs have cost."""

    layer: Layer
    device: torch.device
    precision: Callable[[], AbstractContextManager[object]]
    value: Any
    popped: dict[str, Any]
    recent: deque[Any]
    saved: dict[int, int] = field(default_factory=dict)
    crossing_bytes: int = 0
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    def warm_up(self) -> tuple[Any, dict[str, Any]]:
        """Brings the layer to the device; returns its output and what it stashes, detached."""
        with self._annotate_error():
            self.layer.module.to(self.device)
            with count_saved(self.layer.module) as saved:
                output, stashed = self._once()
            self.saved = saved.storages
        return tree_map_only(Tensor, _detached, (output, stashed))  # type: ignore[no-any-return]

    def timed(self) -> None:
        """Runs the layer once more and notes how long it took."""
        with self._annotate_error():
            self.layer.module.to(self.device)
            self._once()

    @contextmanager
    def _annotate_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in layer {self.layer.name!r}, while its cost was measured")
            raise

    def _once(self) -> tuple[Any, dict[str, Any]]:
        """Its output and what it stashes; notes how long that took."""
        module = self.layer.module
        leaves: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        copy = works_in_place(module)

        def enter(tensor: Tensor) -> Tensor:
            leaf = _detached(tensor)
            if leaf.requires_grad:
                leaves.append(leaf)
            return leaf.clone() if copy else leaf

        value, popped = tree_map_only(Tensor, enter, (self.value, self.popped))

        def forward() -> tuple[Any, dict[str, Any]]:
            with self.precision(), skip_scope(popped) as values:
                return module(value), values

        with _preserve_buffers(module):
            (output, values), forward_ms = _timed(forward, self.device)
            stashed = {name: values[name] for name in stashed_by(module)}
            roots = [tensor for tensor in _tensors((output, stashed)) if tensor.requires_grad]
            backward_ms, gradients = 0.0, ()
            if torch.is_grad_enabled() and roots:
                ones = [torch.ones_like(root) for root in roots]
                gradients, backward_ms = _timed(
                    lambda: torch.autograd.grad(roots, leaves, ones, allow_unused=True), self.device
                )
        self.forward_ms.append(forward_ms)
        self.backward_ms.append(backward_ms)
        self.recent.append((output, gradients))
        return output, stashed


@contextmanager
def _preserve_buffers(module: nn.Module) -> Iterator[None]:
    """What runs inside may change copies of the buffers in `module`, not the buffers."""
    kept = [(part, part._buffers) for part in module.modules()]
    for part, buffers in kept:
        part._buffers = {k: b if b is None else b.clone() for k, b in buffers.items()}
    try:
        yield
    finally:
        for part, buffers in kept:
            part._buffers = buffers


def _timed(work: Callable[[], Any], *devices: torch.device) -> tuple[Any, float]:
    """What `work` returns, and the milliseconds until `devices` are done with it."""
    _wait(devices)
    start = time.perf_counter()
    result = work()
    _wait(devices)
    return result, (time.perf_counter() - start) * 1e3


def _wait(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _copy_ms(nbytes: int, source: torch.device, target: torch.device) -> float:
    """Milliseconds to copy `nbytes` from device to device."""
    if source == target:
        return 0.0
    block = torch.empty(nbytes, dtype=torch.uint8, device=source)
    times = [_timed(lambda: block.to(target), source, target)[1] for _ in range(6)]
    return _median_warm(times)


def _median_warm(times: Sequence[float]) -> float:
    """The median of `times`, without the first one, which warms up, if there are more."""
    return median(times[1:] or times)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _detached(tensor: Tensor) -> Tensor:
    """The same values, with `requires_grad` as in training but no graph behind them."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
