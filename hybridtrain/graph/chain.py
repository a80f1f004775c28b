"""A model as a chain of layers: as it is, if it is one, else as it is traced.

The *units* of a chain depend on the model alone: the elements of an `nn.Sequential`, or what the
model's own forward calls, where containers and modules with a large share of the parameters are
looked into. A unit may be expanded further where balance asks for it; its pieces keep the unit's
number, so that random draws do not depend on how finely the model was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridtrain.errors import SplitError
from hybridtrain.graph.call_signature import bind, has_optional, required
from hybridtrain.graph.exporter import Exporter
from hybridtrain.graph.guards import Untraceable, where
from hybridtrain.graph.layer import Layer, has_hooks, is_chain, layers_of
from hybridtrain.graph.mode_graphs import ModeGraphs, ShouldExpand, record
from hybridtrain.graph.segment import Binding, Flags, SingleLayer
from hybridtrain.graph.tracer import trace
from hybridtrain.skip import popped_by, stashed_by

# A module of a traced model that holds more of its parameters than this is looked into.
LARGE_SHARE = 1 / 8

# If torch.fx cannot look into one that holds more than this, torch.export has to.
TOO_LARGE_SHARE = 1 / 4

# The modules of torch.nn whose forward is looked into; its others stay whole.
_CONTAINERS = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class Chain:
    """The layers of a model, in the order in which they run.

    TraceGuards:
        layers: what can be cut between.
        units: for each layer, the number of its unit, and its number among the unit's pieces.
        no_cut_before: the positions (before layer i) where no cut may be, since a module is used on both
            sides.
        unexpanded: the modules that tracing could not look into, with the reason.
        expanded: those that it has looked into.
        flags: their modes as traced, where the graphs of the two modes differ.
    """

    layers: list[Layer]
    units: list[tuple[int, int]]
    no_cut_before: frozenset[int] = frozenset()
    unexpanded: Mapping[str, str] = field(default_factory=dict)
    expanded: Mapping[str, nn.Module] = field(default_factory=dict)
    flags: Sequence[Flags] = ()


class ExampleInputsNeeded(Exception):
    """The model can be traced only when the inputs of a batch are known."""


class ChainBuilder:
    """The chains of a model, coarser or finer.

    Args:
        net: any module.
        example_inputs: the inputs of a micro-batch; None if they are not known yet.
        precision: the context that the model runs in.

    Raises:
        ExampleInputsNeeded: `example_inputs` is None, and needed to trace the model.
    """

    def __init__(
        self,
        net: nn.Module,
        example_inputs: Any = None,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._net = net
        self._record: Callable[[ShouldExpand], ModeGraphs] | None = None
        self._coarse: ModeGraphs | None = None
        self._failures: list[Exception] = []
        if is_chain(net):
            return
        if has_hooks(net):
            hooks = "the model itself has hooks, which would not run when its layers do one by one"
            self._failures.append(Untraceable(hooks))
            return
        if example_inputs is None and has_optional(net):
            raise ExampleInputsNeeded  # a batch tells which of its arguments are given
        inputs, values = (
            (required(net), None) if example_inputs is None else bind(net, example_inputs)
        )
        if inputs is None:
            raise ExampleInputsNeeded
        self._binding = Binding(net, inputs)
        if self._follows(lambda should_expand: record(net, partial(trace, inputs, should_expand))):
            return
        if values is None:
            raise ExampleInputsNeeded
        exporter = Exporter(inputs, values, precision)
        if self._follows(
            lambda should_expand: record(net, partial(exporter.record, should_expand=should_expand))
        ):
            self._binding = Binding(net, inputs, flat=True)

    def _follows(self, recorder: Callable[[ShouldExpand], ModeGraphs]) -> bool:
        """Whether `recorder` follows the model far enough; it is kept if it follows it at all."""
        try:
            coarse = recorder(_expand_rule(self._net, (), LARGE_SHARE))
        except Exception as error:
            self._failures.append(error)
            return False
        self._record, self._coarse = recorder, coarse
        sizes = [_size(self._net.get_submodule(name)) for name in coarse.unexpanded]
        return max(sizes, default=0) <= TOO_LARGE_SHARE * _size(self._net)

    def chain(self, expand: Collection[str] = ()) -> Chain:
        """The chain in which the modules in `expand` are looked into; what cannot be stays whole.

        Raises:
            SplitError: the model cannot be traced; names the line.
        """
        if is_chain(self._net):
            found = _expanded_layers(layers_of(self._net), expand)
        elif self._record is None or self._coarse is None:
            raise SplitError(
                f"{type(self._net).__name__} cannot be traced, so that it cannot be cut: "
                f"{'; by torch.export: '.join(dict.fromkeys(map(where, self._failures)))}. Move "
                f"what stands there "
                f"into a submodule of its own, which stays whole, or give the model as an "
                f"nn.Sequential"
            ) from self._failures[0]
        else:
            found = self._units(self._coarse, self._record, expand)
        layers = [layer for unit in found.layers for layer in unit]
        units = [
            (unit, piece) for unit, own in enumerate(found.layers) for piece in range(len(own))
        ]
        no_cut_before = frozenset(found.no_cut_before | _joined(layers))
        whole = found.unexpanded
        if whole and self._failures:  # torch.export was asked because of them
            whole = {**whole, "the model, by torch.export,": where(self._failures[-1])}
        return Chain(layers, units, no_cut_before, whole, found.expanded, found.flags)

    def _units(
        self,
        coarse: ModeGraphs,
        recorder: Callable[[ShouldExpand], ModeGraphs],
        expand: Collection[str],
    ) -> _Pieces:
        units = {calls[-1] for calls in coarse.calls}
        recordings = recorder(_expand_rule(self._net, expand, LARGE_SHARE)) if expand else coarse
        pieces: list[list[Layer]] = []
        layers = recordings.layers("", self._binding)
        for layer, calls in zip(layers, recordings.calls, strict=True):
            if not pieces or units.intersection(calls):
                pieces.append([])
            pieces[-1].append(layer)
        return _Pieces(
            pieces,
            recordings.no_cut_before(),
            recordings.unexpanded,
            recordings.flags.modules,
            recordings.differing,
        )

    def one_layer(self) -> Chain:
        """The model as a single layer."""
        return Chain([Layer("", SingleLayer(self._net))], [(0, 0)])


def can_expand(module: nn.Module) -> bool:
    """Whether tracing may look into `module`."""
    if has_hooks(module) or isinstance(module, torch.jit.ScriptModule):
        return False  # a hook of its own would not run
    if stashed_by(module) or popped_by(module) or not any(True for _ in module.children()):
        return False
    return isinstance(module, _CONTAINERS) or not type(module).__module__.startswith("torch.")


class _Pieces(NamedTuple):
    """The layers of each unit, and the rest as in `Chain`."""

    layers: list[list[Layer]]
    no_cut_before: set[int]
    unexpanded: dict[str, str]
    expanded: Mapping[str, nn.Module]
    flags: list[Flags]


def _expanded_layers(layers: Sequence[Layer], expand: Collection[str]) -> _Pieces:
    pieces: list[list[Layer]] = []
    no_cut_before: set[int] = set()
    unexpanded: dict[str, str] = {}
    expanded: dict[str, nn.Module] = {}
    flags: list[Flags] = []
    for layer in layers:
        pieces.append([layer])
        inputs = required(layer.module) if layer.name in expand else None
        if inputs is None or len(inputs.names) != 1 or not can_expand(layer.module):
            continue
        should_expand = _expand_rule(layer.module, expand, prefix=f"{layer.name}.")
        try:
            recordings = record(layer.module, partial(trace, inputs, should_expand))
        except Exception as error:
            unexpanded[layer.name] = where(error)
        else:
            before = sum(map(len, pieces[:-1]))
            no_cut_before |= {before + position for position in recordings.no_cut_before()}
            pieces[-1] = recordings.layers(f"{layer.name}.")
            inside = recordings.flags.modules.items()
            expanded |= {f"{layer.name}.{name}".rstrip("."): part for name, part in inside}
            flags += recordings.differing
            unexpanded |= {f"{layer.name}.{name}": why for name, why in recordings.unexpanded.items()}
    return _Pieces(pieces, no_cut_before, unexpanded, expanded, flags)


def _expand_rule(
    root: nn.Module, expand: Collection[str], large: float = float("inf"), prefix: str = ""
) -> ShouldExpand:
    total = _size(root)

    def should_expand(name: str, module: nn.Module) -> bool:
        if is_chain(module):
            return True
        if not can_expand(module):
            return False
        return prefix + name in expand or _size(module) > large * total

    return should_expand


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _joined(layers: Sequence[Layer]) -> set[int]:
    """The positions between the uses of a module that has state, which is in one place only."""
    first: dict[int, int] = {}
    no_cut_before: set[int] = set()
    for index, layer in enumerate(layers):
        for module in layer.module.modules():
            if any(True for _ in (*module.parameters(), *module.buffers())):
                no_cut_before.update(range(first.setdefault(id(module), index) + 1, index + 1))
    return no_cut_before
