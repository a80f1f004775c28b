"""Turns a model into a chain of layers: its own elements, or segments of its traced forward.

The *units* of a chain depend on the model alone: the elements of an `nn.Sequential`, or the modules
that the model's own forward calls, where containers and modules with a large share of the
parameters are expanded. A unit may be expanded further to balance stages; its layers keep the
unit's number, so that random draws do not depend on how finely the model was split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from hybridtrain._base.skip import popped_by, stashed_by
from hybridtrain._base.torch_private import compiled_module
from hybridtrain.errors import ConfigError, SplitError, phrase, setting
from hybridtrain.graph.call_signature import CallSignature, arguments_of, optional_arguments
from hybridtrain.graph.examples import Examples
from hybridtrain.graph.exporter import as_any_batch, export_tracer
from hybridtrain.graph.mode_graphs import ModeGraphs, TraceGuards, trace_both_modes
from hybridtrain.graph.output_capture import gathers, has_hooks
from hybridtrain.graph.segment import Layer, SingleLayer, is_chain, layers_of
from hybridtrain.graph.traced_graph import ShouldExpand, Tracer, Untraceable, user_line
from hybridtrain.graph.tracer import trace
from hybridtrain.graph.variants import Variants

# A module of a traced model with more than this share of its parameters is expanded.
LARGE_SHARE = 1 / 8
# If torch.fx cannot expand a module with more than this share, torch.export traces the model.
TOO_LARGE_SHARE = 1 / 4
# Of PyTorch's own modules, only these are expanded: nn.Transformer and its parts.
_EXPANDED_OF_TORCH = "torch.nn.modules.transformer"


@dataclass(frozen=True)
class Chain:
    """The layers of a model, in the order in which they run.

    Attributes:
        layers: the layers.
        units: for each layer, the number of its unit, and its number among the unit's layers.
        no_cut_before: the positions (before layer i) at which the model cannot be cut, because a
            module is used on both sides or a tensor is changed in place.
        unexpanded: the modules that could not be expanded, with the reason.
        guards: checks that the model has not changed since it was traced.
        variants: its graphs for inputs of other kinds; None if one graph fits all inputs.
        first_uses: for parameters of an observed model, by name, the index of the layer in whose
            stage they are first used: in the layer, or in the code after it.
        opened: for units of an observed model that are several layers, by their number, the module
            that the unit calls.
    """

    layers: list[Layer]
    units: list[tuple[int, int]]
    no_cut_before: frozenset[int] = frozenset()
    unexpanded: Mapping[str, str] = field(default_factory=dict)
    guards: TraceGuards = field(default_factory=TraceGuards)
    variants: Variants | None = None
    first_uses: Mapping[str, int] = field(default_factory=dict)
    opened: Mapping[int, str] = field(default_factory=dict)


class ChainBuilder:
    """Builds the chains of a model, coarser or finer.

    Modules other than an `nn.Sequential` are traced with `example_inputs`, the inputs of a
    micro-batch. The model runs in the context `precision`.

    Raises:
        ConfigError: `example_inputs` is None but needed to trace the model.
        BatchError: the model's forward cannot be called with `example_inputs`.
    """

    def __init__(
        self,
        net: nn.Module,
        example_inputs: Any = None,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._net = net
        self._precision = precision or nullcontext
        self._device = device or torch.device("cpu")
        self._tracer: Tracer | None = None
        self._exported = False
        self._values: list[Any] | None = None  # the trace may be valid for these only
        self._failures: dict[str, Exception] = {}  # by tracing method
        check_unwrapped(net)
        initialize_lazy(net, example_inputs)
        if is_chain(net):
            return
        if isinstance(net, torch.jit.ScriptModule):
            why = (
                "it is a TorchScript module, and torch.fx and torch.export cannot trace TorchScript"
            )
            self._failures[""] = Untraceable(why)
            return
        if has_hooks(net):
            why = "the model itself has hooks, which would not run around its layers"
            self._failures[""] = Untraceable(why)
            return
        model = type(net).__name__
        if example_inputs is not None:
            self._signature, values = CallSignature.of_inputs(net, example_inputs)
        else:
            self._signature = CallSignature.of_required(net)
            if (optional := optional_arguments(net)) or not self._signature.names:
                arguments_text = (
                    f"optional arguments ({', '.join(optional)})" if optional else "*args"
                )
                raise ConfigError(
                    f"{model}.forward has {arguments_text}, and tracing needs to know which "
                    "arguments a batch passes: pass example_inputs=<the inputs of a batch>"
                )
        if reason := self._try("", partial(trace, self._signature)):
            if example_inputs is None:
                raise ConfigError(
                    f"torch.fx cannot trace {model} ({reason}), and torch.export needs the inputs "
                    "of a batch: pass example_inputs=<the inputs of a batch>"
                )
            if not self._try(
                "with torch.export", export_tracer(self._signature, values, precision)
            ):
                self._exported = True
                self._values = tree_map(as_any_batch, values)
            elif not self._try("on the example inputs", self._example_tracer(values)):
                self._values = values

    def _try(self, how: str, tracer: Tracer) -> str:
        """Returns the reason why `tracer` cannot expand enough of the model; "" if it can.

        Keeps the first tracer that can trace the model's own forward, until one can also expand it.
        """
        try:
            coarse = trace_both_modes(self._net, tracer, _expand_rule(self._net, (), LARGE_SHARE))
        except Exception as error:
            self._failures[how] = error
            return user_line(error)
        parts = dict(self._net.named_modules())
        reason = next(
            (
                reason
                for name, reason in coarse.unexpanded.items()
                # not every name belongs to a module
                if name in parts and _size(parts[name]) > TOO_LARGE_SHARE * _size(self._net)
            ),
            "",
        )
        if not reason or self._tracer is None:
            self._tracer, self._coarse = tracer, coarse
        return reason

    def _example_tracer(
        self,
        values: Sequence[Any],
        precision: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tracer:
        """Returns a torch.fx tracer that knows the example values of the arguments."""

        def make_examples(module: nn.Module) -> tuple[Examples, list[Any]]:
            examples = Examples(module, self._device, precision or self._precision)
            return examples, examples.of_inputs(list(values))

        return partial(trace, self._signature, make_examples=make_examples)

    def chain(self, expand: Collection[str] = ()) -> Chain:
        """Returns the chain with the modules in `expand` expanded if possible.

        Raises:
            SplitError: the model cannot be traced; names the line of code.
        """
        units: list[list[Layer]] = []
        graphs: list[tuple[int, ModeGraphs]] = []  # unit -> position of its first layer
        unexpanded: dict[str, str] = {}
        variants: Variants | None = None
        if is_chain(self._net):
            for layer in layers_of(self._net):
                units.append([layer])
                if (expanded := _expanded(layer, expand, unexpanded)) is not None:
                    graphs.append((sum(map(len, units[:-1])), expanded))
                    units[-1] = expanded.layers()
        elif self._tracer is not None:
            rule = _expand_rule(self._net, expand, LARGE_SHARE)
            finer = self._coarse
            if expand:
                try:
                    finer = trace_both_modes(self._net, self._tracer, rule)
                except Exception as error:  # the model as a whole can be traced without it
                    unexpanded |= dict.fromkeys(expand, user_line(error))
            graphs.append((0, finer))
            if self._values is not None:
                variants = self._variants(finer, rule, self._values)
            begins = {calls[-1] for calls in self._coarse.calls}
            for layer, calls in zip(finer.layers(self._signature), finer.calls, strict=True):
                if not units or not begins.isdisjoint(calls):
                    units.append([])
                units[-1].append(layer)
        else:
            reasons: dict[str, str] = {}
            for how, failure in self._failures.items():
                if (reason := user_line(failure)) not in reasons:
                    reasons[reason] = f"{how}: {reason}" if how else reason
            hint = ""
            if gathers(self._net):
                hint = (
                    "It collects outputs of its layers: omit output_router_logits=, "
                    "output_hidden_states= and output_attentions= if possible. "
                )
            raise SplitError(
                f"{type(self._net).__name__} cannot be traced, so it cannot be split: "
                f"{'; '.join(reasons.values())}. {hint}Move this statement, and everything that "
                "shares state with it, into the forward of a separate nn.Module that the model "
                "calls: it then runs unchanged as one layer. Or pass the model as an "
                "nn.Sequential"
            ) from next(iter(self._failures.values()))
        layers = [layer for unit in units for layer in unit]
        no_cut_before = _between_uses(layers)
        for start, graph in graphs:
            no_cut_before |= {start + position for position in graph.no_cut_before()}
            unexpanded |= graph.unexpanded
        if unexpanded:  # the reason for trying other tracers
            for how, failure in self._failures.items():
                unexpanded[f"the model{f', {how},' if how else ''}"] = user_line(failure)
        return Chain(
            layers,
            [(number, inside) for number, unit in enumerate(units) for inside in range(len(unit))],
            frozenset(no_cut_before),
            unexpanded,
            TraceGuards([graph for _, graph in graphs]),
            variants,
        )

    def _variants(self, first: ModeGraphs, rule: ShouldExpand, values: Sequence[Any]) -> Variants:
        net, signature, exported = self._net, self._signature, self._exported

        def retrace(values: Sequence[Any]) -> ModeGraphs:
            failures: list[Exception] = []
            tracers = [self._example_tracer(values, nullcontext)]
            devices = {tensor.device for tensor in (*net.parameters(), *net.buffers())}
            if exported and len(devices) == 1 and torch.device("meta") not in devices:
                tracers.insert(0, export_tracer(signature, list(values), alike=False))
            for tracer in tracers:
                try:
                    return trace_both_modes(net, tracer, rule)
                except Exception as error:
                    failures.append(error)
            raise failures[0]

        return Variants(net, signature, first, values, retrace, self._device)

    def one_layer(self) -> Chain:
        """Returns the model as a single layer."""
        return Chain([Layer("", SingleLayer(self._net))], [(0, 0)])


def can_expand(module: nn.Module) -> bool:
    """Returns whether `module` may be expanded."""
    if has_hooks(module) or isinstance(module, torch.jit.ScriptModule):
        return False  # its hooks would not run
    if stashed_by(module) or popped_by(module) or not any(True for _ in module.children()):
        return False
    home = type(module).__module__
    return home == _EXPANDED_OF_TORCH or not home.startswith("torch.")


def _expanded(
    layer: Layer, expand: Collection[str], unexpanded: dict[str, str]
) -> ModeGraphs | None:
    """Returns the graphs for expanding a layer, or None."""
    if layer.name not in expand or not can_expand(layer.module):
        return None
    signature = CallSignature.of_required(layer.module)
    if len(signature.names) != 1:
        return None
    prefix = f"{layer.name}."
    rule = _expand_rule(layer.module, expand, float("inf"), prefix)
    try:
        return trace_both_modes(layer.module, partial(trace, signature), rule, prefix)
    except Exception as error:
        unexpanded[layer.name] = user_line(error)
        return None


def _expand_rule(
    root: nn.Module, expand: Collection[str], large: float, prefix: str = ""
) -> ShouldExpand:
    limit = large * _size(root)

    def should_expand(name: str, module: nn.Module) -> bool:
        is_asked_for = prefix + name in expand or _size(module) > limit
        return is_chain(module) or (is_asked_for and can_expand(module))

    return should_expand


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _between_uses(layers: Sequence[Layer]) -> set[int]:
    """Returns the positions between uses of a module with state, which must be in one stage."""
    first: dict[int, int] = {}
    no_cut_before: set[int] = set()
    for index, layer in enumerate(layers):
        for module in layer.module.modules():
            if any(True for _ in (*module.parameters(), *module.buffers())):
                no_cut_before.update(range(first.setdefault(id(module), index) + 1, index + 1))
    return no_cut_before


def check_unwrapped(net: nn.Module) -> None:
    """Checks that `net` is a plain model, not a wrapper that changes how it runs.

    Raises:
        ConfigError: it is a wrapper; says what to pass instead.
    """
    if isinstance(net, DataParallel | DistributedDataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(net).__name__}, but {phrase('HybridModel')} is "
            "already data parallel: pass the wrapped module, net.module"
        )
    if compiled_module(net) is not None:
        raise ConfigError(
            "the model is compiled as a whole and cannot be split: pass the original module, and "
            f"{setting('compile', True)} to compile its stages"
        )


def initialize_lazy(net: nn.Module, example_inputs: Any) -> None:
    """Initializes lazy parameters by a forward in evaluation mode.

    Raises:
        ConfigError: there are lazy parameters but no `example_inputs`, or this forward does not use
            them.
    """
    if not _uninitialized(net):
        return
    if example_inputs is not None:
        args, kwargs = arguments_of(net, example_inputs)
        modes = {part: part.training for part in net.modules()}
        net.eval()
        try:
            with torch.no_grad():
                net(*args, **kwargs)
        finally:
            for part, mode in modes.items():
                part.training = mode
    if names := _uninitialized(net):
        raise ConfigError(
            f"{names[0]} is lazy and has no shape yet: pass example_inputs=<the inputs of a "
            "batch>, or call the model with a batch first"
        )


def _uninitialized(net: nn.Module) -> list[str]:
    tensors = (*net.named_parameters(), *net.named_buffers())
    return [name for name, tensor in tensors if is_lazy(tensor)]
