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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.module_call import watch_calls
from hybridtrain._base.skip import popped_by, skip_scope, stashed_by
from hybridtrain._base.tensors import byte_size, bytes_of_module
from hybridtrain._base.torch_private import FakeTensorMode
from hybridtrain.errors import ConfigError, SplitError
from hybridtrain.graph import (
    LARGE_SHARE,
    Chain,
    Layer,
    arguments_of,
    check_unwrapped,
    initialize_lazy,
    is_chain,
    layers_of,
)
from hybridtrain.partitioning.costs import (
    CalledLayers,
    copy_of,
    copy_on_cpu,
    fake_like,
    let_run_on_cpu,
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
    """

    name: str
    begin: int
    parts: list[Call] = field(default_factory=list)


class ObservedRun(NamedTuple):
    """A run of a forward.

    Attributes:
        root: the call of the model.
        parameter_uses: for each parameter, by name, the event of its first use.
    """

    root: Call
    parameter_uses: dict[str, int]


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
        self._modules = dict(net.named_modules(remove_duplicate=False))
        self._sizes = {name: _size(module) for name, module in self._modules.items()}
        self._run: ObservedRun | None = None
        if inputs is None and not is_chain(net):
            raise self._needs_inputs(type(net).__name__)

    @staticmethod
    def _needs_inputs(what: str) -> ConfigError:
        return ConfigError(
            f"finding where {what} can be cut takes a run of its forward: pass "
            "example_inputs=<the inputs of a batch>"
        )

    @property
    def run(self) -> ObservedRun:
        """The observed run; the first access makes it."""
        if self._run is None:
            self._run, _ = observe(self._net, self._inputs, self.precision)
        return self._run

    def chain(self, expand: Collection[str] = ()) -> Chain:
        """Returns the chain with the modules in `expand` opened, if they call submodules.

        Raises:
            SplitError: the forward fails on the example inputs.
            ConfigError: a module is to be opened, but there are no inputs.
        """
        if is_chain(self._net) and (self._inputs is None or not expand):
            elements = layers_of(self._net)
            for element in elements:
                if element.name in expand and any(True for _ in element.module.children()):
                    raise self._needs_inputs(f"layer {element.name!r}")
            units = [(unit, 0) for unit in range(len(elements))]
            first_uses: dict[str, int] = {}
            if self._inputs is not None:
                with suppress(Exception):  # the step raises it too, and says more
                    first_uses = self._first_uses(self._begins_of(elements))
            return self._chain(elements, units, first_uses)
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
        return self._chain(layers, units, self._first_uses(begins), opened)

    def one_layer(self) -> Chain:
        """Returns the model as a single layer."""
        return self._chain([Layer("", self._net)], [(0, 0)], {})

    def _chain(
        self,
        layers: Sequence[Layer],
        units: list[tuple[int, int]],
        first_uses: Mapping[str, int],
        opened: Mapping[int, str] | None = None,
    ) -> Chain:
        called = CalledLayers(layers, self._net, first_uses)
        together = self._together(layers)
        return Chain(called, units, together, first_uses=first_uses, opened=opened or {})

    def _begins_of(self, elements: Sequence[Layer]) -> list[int]:
        """Returns the event at which each element of a chain begins."""
        begins: dict[str, list[int]] = {}

        def collect(call: Call) -> None:
            for part in call.parts:
                begins.setdefault(part.name, []).append(part.begin)
                collect(part)

        collect(self.run.root)
        names = {id(module): name for name, module in self._net.named_modules()}
        return [begins[names[id(element.module)]].pop(0) for element in elements]

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
        if call.name in expand or any(name.startswith(f"{call.name}.") for name in expand):
            return True
        inside = sum(self._sizes[name] for name in {part.name for part in call.parts})
        # not if its own code has most of its parameters, as in a layer of experts
        is_large = self._sizes[call.name] > LARGE_SHARE * self._sizes[""]
        return is_large and self._sizes[call.name] <= 2 * inside

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


def observe(
    net: nn.Module,
    inputs: Any,
    precision: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[ObservedRun, nn.Module]:
    """Returns the calls of a forward on `inputs`, and the copy of `net` that it ran on.

    Args:
        net: the module.
        inputs: the inputs of a micro-batch.
        precision: returns the context of the forward.

    Raises:
        SplitError: the model cannot be copied, or fails without values.
        Exception: the model's own error.
    """
    size = bytes_of_module(net)
    has_values = not any(t.is_meta for t in (*net.parameters(), *net.buffers()))
    # Without data if possible, because it is fast. A forward may depend on values, and in training
    # mode on more than one sample.
    attempts = [(True, False), (True, True)] if has_values else []
    if not has_values or size > SMALL_BYTES:
        attempts.insert(0, (False, False))
    failure: Exception | None = None
    with undisturbed([Layer("", net)], torch.device("cpu")):
        for with_data, evaluates in attempts:
            try:
                return _observed(net, inputs, precision, with_data, evaluates)
            except ConfigError as error:  # it cannot be copied
                raise SplitError(
                    f"the calls of {type(net).__name__} cannot be observed, because it cannot be "
                    f"copied ({error.__cause__}): define __deepcopy__ for the object that refuses"
                ) from error
            except Exception as error:
                if failure is None or (with_data and not evaluates):
                    failure = error
    assert failure is not None
    text = f"forward of {type(net).__name__} fails on a micro-batch of the example inputs"
    if not has_values:
        raise SplitError(f"the {text}: {type(failure).__name__}: {failure}") from failure
    failure.add_note(f"the {text}, which shows where it may be cut")
    raise failure


def _observed(
    net: nn.Module,
    inputs: Any,
    precision: Callable[[], AbstractContextManager[object]],
    with_data: bool,
    evaluates: bool,
) -> tuple[ObservedRun, nn.Module]:
    replacement = copy_on_cpu if with_data else fake_like
    mode = nullcontext() if with_data else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        copy = copy_of(Layer("", net), replacement)
        let_run_on_cpu(copy)
        args, kwargs = arguments_of(copy, tree_map_only(Tensor, replacement, inputs))
        if evaluates:
            copy.eval()
        recorder = _Recorder(copy)
        with recorder.recording(), precision(), skip_scope({}):
            copy(*args, **kwargs)
    return ObservedRun(recorder.root, recorder.parameter_uses), copy


def observed_chain(net: nn.Module, inputs: Any) -> Chain:
    """Returns the layers of a model.

    Args:
        net: any module, also on the meta device.
        inputs: the inputs of a micro-batch.

    Raises:
        SplitError: the forward fails; the cause is the model's own error.
    """
    return ObservedChains(net, inputs).chain()


class _Recorder(TorchFunctionMode):
    """Records the calls of submodules, and the uses of parameters."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.root = Call("", 0)
        self.parameter_uses: dict[str, int] = {}
        self._net = net
        self._names = {id(parameter): name for name, parameter in net.named_parameters()}
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
        return func(*args, **kwargs or {})

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the run in the block."""
        with ExitStack() as ends, self:
            for name, module in self._net.named_modules():
                if module is not self._net:
                    ends.callback(watch_calls(module, self._begin(name), self._end(name)))
            yield

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch._C._functorch.maybe_current_level() is not None:
                return  # no stage can begin inside vmap or grad
            self._events += 1
            call = Call(name, self._events)
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


def _size(module: nn.Module) -> int:
    return sum(byte_size(parameter) for parameter in module.parameters())
