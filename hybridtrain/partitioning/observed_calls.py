"""Where a model may be cut, found by watching a run of its forward: the order of its calls.

    forward ─┬─ embed                     one run records the tree of calls of submodules
             ├─ blocks.0 ─┬─ attention
             │            └─ mlp
             └─ head

The layers of a chain are calls from this tree. Its *units* depend on the model alone: the calls
that the model's own forward makes, where containers and modules with a large share of the
parameters are opened. Any layer may be opened further to balance stages; its parts keep the unit's
number, so that random draws do not depend on how finely the model was split.

The run is on a copy, with data if the model is small and on fake tensors otherwise, and leaves the
model and the generators as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.skip import popped_by, skip_scope, stashed_by
from hybridtrain._base.tensors import Saved, byte_size, count_saved, storage_id
from hybridtrain._base.torch_private import FakeTensorMode
from hybridtrain._base.values import structure_copy
from hybridtrain.errors import ConfigError, SplitError, setting
from hybridtrain.graph import (
    LARGE_SHARE,
    CallSignature,
    Chain,
    Layer,
    check_unwrapped,
    initialize_lazy,
    is_chain,
    layers_of,
)
from hybridtrain.partitioning.costs import (
    MAX_REPEATS,
    LayerCost,
    copy_of,
    count,
    run_layer,
    timed,
    undisturbed,
)

# Models with at most this many bytes of parameters and buffers are run with data.
SMALL_BYTES = 2**26

# Of PyTorch's own modules, only these are opened: nn.Transformer and its parts.
_OPENED_OF_TORCH = "torch.nn.modules.transformer"


@dataclass(eq=False)
class Call:
    """A call of a module in a forward.

    Attributes:
        name: the name of the module in the model.
        begin: the number of events before it; an event is a call, or a use of a parameter.
        parts: the calls inside it.
        args: its positional arguments, if the run keeps values.
        kwargs: its keyword arguments, if the run keeps values.
    """

    name: str
    begin: int
    parts: list[Call] = field(default_factory=list)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class ObservedRun(NamedTuple):
    """A run of a forward.

    Attributes:
        root: the call of the model.
        parameter_uses: for each parameter, by name, the event of its first use.
        values: for each storage that a torch function returned, the events of its first and its
            last use, and its bytes.
    """

    root: Call
    parameter_uses: dict[str, int]
    values: list[tuple[int, int, int]]


class ObservedChains:
    """Builds the chains of a model, coarser or finer, from one observed forward.

    Args:
        net: any module.
        inputs: the inputs of a micro-batch; None is possible for an `nn.Sequential` that is cut
            between its elements.
        precision: returns the context of the forward.

    Raises:
        ConfigError: `inputs` is None, but needed.
        SplitError: the forward fails; the cause is the model's own error.
    """

    def __init__(
        self,
        net: nn.Module,
        inputs: Any,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        check_unwrapped(net)
        initialize_lazy(net, inputs)
        self._net = net
        self._inputs = inputs
        self.precision = precision or nullcontext
        self._has_arguments = False
        self._modules = dict(net.named_modules(remove_duplicate=False))
        self._sizes = {name: _size(module) for name, module in self._modules.items()}
        self._run: ObservedRun | None = None
        if inputs is None and not is_chain(net):
            raise ConfigError(
                f"where {type(net).__name__} may be cut is found in a run of its forward: pass "
                "example_inputs=<the inputs of a batch>"
            )

    @property
    def run(self) -> ObservedRun:
        """The observed run; the first access makes it."""
        if self._run is None:
            self._run = observe(self._net, self._inputs, self.precision)
        return self._run

    def chain(self, expand: Collection[str] = ()) -> Chain:
        """Returns the chain with the modules in `expand` opened, if they call submodules.

        Raises:
            SplitError: the forward fails on the example inputs.
        """
        if is_chain(self._net) and (self._inputs is None or not expand):
            elements = layers_of(self._net)
            units = [(unit, 0) for unit in range(len(elements))]
            first_uses: dict[str, int] = {}
            if self._inputs is not None:
                first_uses = self._first_uses([call.begin for call in self.calls_of(elements)])
            return Chain(elements, units, self._together(elements), first_uses=first_uses)
        unit_calls = self._unit_calls(self.run.root)
        if not unit_calls:
            return self.one_layer()
        layers: list[Layer] = []
        units = []
        begins: list[int] = []
        opened: dict[int, str] = {}
        seen: dict[str, int] = {}
        for unit, unit_call in enumerate(unit_calls):
            calls = [unit_call]
            if self._opens(unit_call, expand):
                calls = self._front(unit_call, expand)
                opened[unit] = unit_call.name
            for piece, call in enumerate(calls):
                number = seen[call.name] = seen.get(call.name, 0) + 1
                name = call.name if number == 1 else f"{call.name}@{number}"
                layers.append(Layer(name, self._modules[call.name]))
                units.append((unit, piece))
                begins.append(call.begin)
        return Chain(
            layers,
            units,
            self._together(layers),
            first_uses=self._first_uses(begins),
            opened=opened,
        )

    def one_layer(self) -> Chain:
        """Returns the model as a single layer."""
        return Chain([Layer("", self._net)], [(0, 0)])

    def calls_of(self, layers: Sequence[Layer]) -> list[Call]:
        """Returns the call of each layer of a chain."""
        by_name: dict[str, list[Call]] = {}

        def collect(call: Call) -> None:
            for part in call.parts:
                by_name.setdefault(part.name, []).append(part)
                collect(part)

        collect(self.run.root)
        calls = []
        for layer in layers:
            name, _, number = layer.name.partition("@")
            calls.append(by_name[name][int(number or 1) - 1])
        return calls

    def arguments_of(self, layers: Sequence[Layer], device: torch.device) -> list[Any]:
        """Returns the arguments of each layer's call, with data, on a device."""
        if not self._has_arguments:
            self._run = observe(self._net, self._inputs, self.precision, keeps_values=True)
            self._has_arguments = True
        calls = self.calls_of(layers)
        values = [(call.args, dict(call.kwargs)) for call in calls]
        return [structure_copy(value, partial(_on, device)) for value in values]

    def _unit_calls(self, call: Call) -> list[Call]:
        """Returns the calls of the units: the same ones however finely the model is split."""
        if not is_chain(self._net):
            return self._front(call, ())
        calls: list[Call] = []
        for part in call.parts:  # the elements, as without `expand`
            calls += self._unit_calls(part) if is_chain(self._modules[part.name]) else [part]
        return calls

    def _front(self, call: Call, expand: Collection[str]) -> list[Call]:
        """Returns the calls inside a call, with those to open replaced by their own."""
        front: list[Call] = []
        for part in call.parts:
            front += self._front(part, expand) if self._opens(part, expand) else [part]
        return front

    def _opens(self, call: Call, expand: Collection[str]) -> bool:
        module = self._modules[call.name]
        if not call.parts or stashed_by(module) or popped_by(module):
            return False
        if is_chain(module):
            return True
        home = type(module).__module__
        if home.startswith("torch.") and home != _OPENED_OF_TORCH:
            return False
        large = self._sizes[call.name] > LARGE_SHARE * self._sizes[""]
        return large or call.name in expand or any(n.startswith(f"{call.name}.") for n in expand)

    def _together(self, layers: Sequence[Layer]) -> frozenset[int]:
        """Returns the positions between calls of one module, which belong to one stage."""
        first: dict[int, int] = {}
        positions: set[int] = set()
        for index, layer in enumerate(layers):
            start = first.setdefault(id(layer.module), index)
            if any(True for _ in (*layer.module.parameters(), *layer.module.buffers())):
                positions.update(range(start + 1, index + 1))
        return frozenset(positions)

    def _first_uses(self, begins: Sequence[int]) -> dict[str, int]:
        """Returns the layer in whose stage each parameter is first used, by name.

        Args:
            begins: the event at which each layer begins.
        """
        return {
            name: max(sum(begin <= use for begin in begins) - 1, 0)
            for name, use in self.run.parameter_uses.items()
        }


class CallCosts:
    """Costs of layers, from running each of their calls alone with the arguments that it got.

    With data on `device`, times are measured; on fake tensors they follow from counted work.

    Args:
        chains: the observed model.
        layers: the layers of one of its chains.
        device: the device to measure on.
        optimizer_tensors_per_param: tensors of a parameter's size that the optimizer keeps for it.
    """

    def __init__(
        self,
        chains: ObservedChains,
        layers: Sequence[Layer],
        device: torch.device,
        optimizer_tensors_per_param: int,
    ) -> None:
        self._calls = [_CalledLayer(layer.module) for layer in layers]
        self._layers = layers
        self._device = device
        self._tensors = optimizer_tensors_per_param
        self._chains = chains

    def measured(self, seconds: float) -> list[LayerCost]:
        """Returns the costs with measured times; medians of runs over about `seconds`.

        Raises:
            SplitError: the forward depends on values, but the model has none.
        """
        times: list[list[tuple[float, float]]] = [[] for _ in self._layers]
        saved_bytes = [0] * len(self._layers)
        deadline = time.perf_counter() + seconds
        with undisturbed(self._layers, self._device):
            clock = partial(timed, self._device)
            for number in range(MAX_REPEATS):
                # again, because a layer may change objects that it gets
                arguments = self._chains.arguments_of(self._layers, self._device)
                for index, (call, value) in enumerate(zip(self._calls, arguments, strict=True)):
                    layer = Layer(self._layers[index].name, call)
                    copy = copy_of(layer, partial(_on, self._device)).to(self._device)
                    with count_saved(copy) if not number else nullcontext(Saved()) as saved:
                        ran = run_layer(copy, (value, {}), self._chains.precision, clock)
                    if number:
                        times[index].append((ran.forward_ms, ran.backward_ms))
                    else:  # the first run warms up
                        saved_bytes[index] = saved.bytes
                if number and time.perf_counter() > deadline:
                    break
        forward, backward = (
            [median(runs[kind] for runs in of_layer) for of_layer in times] for kind in (0, 1)
        )
        return self._costs(forward, backward, saved_bytes)

    def _costs(
        self, forward: Sequence[float], backward: Sequence[float], saved: Sequence[int]
    ) -> list[LayerCost]:
        begins = [call.begin for call in self._chains.calls_of(self._layers)]
        return [
            replace(
                cost,
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                activation_bytes=saved_bytes,
                crossing_bytes=crossing,
            )
            for cost, forward_ms, backward_ms, saved_bytes, crossing in zip(
                count(self._layers, self._tensors),
                forward,
                backward,
                saved,
                crossing_bytes(self._chains.run, begins),
                strict=True,
            )
        ]


class _CalledLayer(nn.Module):
    """A layer that takes the arguments of a call as one value."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: tuple[Any, Any]) -> Any:
        args, kwargs = value
        return self.module(*args, **kwargs)


def crossing_bytes(run: ObservedRun, begins: Sequence[int]) -> list[int]:
    """Returns the bytes that cross a cut right before each layer but the first, and 0 at the end.

    Args:
        run: the observed run.
        begins: the event at which each layer begins.
    """
    return [
        sum(size for first, last, size in run.values if first < begin <= last)
        for begin in begins[1:]
    ] + [0]


def observe(
    net: nn.Module,
    inputs: Any,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    keeps_values: bool = False,
) -> ObservedRun:
    """Returns the calls of a forward on `inputs`, run on a copy of `net` in training mode.

    Args:
        net: the module.
        inputs: the inputs of a micro-batch.
        precision: returns the context of the forward.
        keeps_values: whether the calls keep their arguments, detached; needs a run with data.

    Raises:
        SplitError: the forward fails.
    """
    size = sum(map(byte_size, (*net.parameters(), *net.buffers())))
    has_values = not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    with_data = has_values and (size <= SMALL_BYTES or keeps_values)
    attempts: list[bool] = [True] if with_data else [False]
    if has_values and not attempts[0]:
        attempts.append(True)  # a forward that depends on values does not run on fake tensors
    failure: Exception | None = None
    with undisturbed([Layer("", net)], torch.device("cpu")):
        for with_data in attempts:
            try:
                return _observed(net, inputs, precision, with_data, keeps_values)
            except ConfigError as error:  # it cannot be copied
                raise SplitError(
                    f"the calls of {type(net).__name__} cannot be observed, because it cannot be "
                    f"copied ({error.__cause__}): give the object that refuses it a __deepcopy__, "
                    f"or set {setting('engine', 'local')}"
                ) from error
            except Exception as error:
                failure = failure or error
    assert failure is not None
    raise SplitError(
        f"the forward of {type(net).__name__} fails on a micro-batch of the example inputs: "
        f"{type(failure).__name__}: {failure}"
    ) from failure


def _observed(
    net: nn.Module,
    inputs: Any,
    precision: Callable[[], AbstractContextManager[object]],
    with_data: bool,
    keeps_values: bool,
) -> ObservedRun:
    def real(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)

    def fake(tensor: Tensor) -> Tensor:
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return like.requires_grad_(tensor.requires_grad)

    replacement = real if with_data else fake
    mode = nullcontext() if with_data else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        copy = copy_of(Layer("", net), replacement)
        args, kwargs = CallSignature.of_inputs(copy, inputs)[0].split(
            CallSignature.of_inputs(copy, tree_map_only(Tensor, replacement, inputs))[1]
        )
        recorder = _Recorder(copy, keeps_values)
        with recorder.recording(), precision(), skip_scope({}):
            copy(*args, **kwargs)
    return ObservedRun(recorder.root, recorder.parameter_uses, list(recorder.values.values()))


class _Recorder(TorchFunctionMode):
    """Records the calls of submodules, and the uses of parameters and values."""

    def __init__(self, net: nn.Module, keeps_values: bool) -> None:
        super().__init__()
        self.root = Call("", 0)
        self.parameter_uses: dict[str, int] = {}
        self.values: dict[int, tuple[int, int, int]] = {}
        self._net = net
        self._keeps_values = keeps_values
        self._names = {id(parameter): name for name, parameter in net.named_parameters()}
        self._kept: list[Any] = []  # so that no id is reused
        self._events = 0
        self._stack = [self.root]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._events += 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                name = self._names.get(id(leaf))
                if name is not None:
                    self.parameter_uses.setdefault(name, self._events)
            elif isinstance(leaf, Tensor):
                self._note(leaf)
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        key = storage_id(tensor)
        first, _, size = self.values.get(key, (self._events, 0, 0))
        if key not in self.values:
            self._kept.append(tensor.detach())
        self.values[key] = first, self._events, max(size, byte_size(tensor))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the run in the block."""
        handles = []
        for name, module in self._net.named_modules():
            if module is self._net or isinstance(module, torch.jit.ScriptModule):
                continue
            begin = module.register_forward_pre_hook(
                self._begin(name), prepend=True, with_kwargs=True
            )
            handles += [begin, module.register_forward_hook(self._end(name), always_call=True)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._functorch.maybe_current_level() is not None:
                return  # no stage can begin inside of vmap or grad
            self._events += 1
            call = Call(name, self._events)
            if self._keeps_values:
                with torch._C.DisableTorchFunction():
                    call.args, call.kwargs = structure_copy((args, kwargs), _kept)
            self._stack[-1].parts.append(call)
            self._stack.append(call)

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._functorch.maybe_current_level() is not None:
                return
            if any(call.name == name for call in self._stack):
                while self._stack[-1].name != name:  # calls that an exception has left
                    self._stack.pop()
                self._stack.pop()

        return hook


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
