"""A model as a chain of layers: as it is, if it is one, else as it is traced.

The *units* of a chain depend on the model alone: the elements of an `nn.Sequential`, or what the
model's own forward calls, where containers and modules with a large share of the parameters are
looked into. A unit may be opened further where balance asks for it; its pieces keep the unit's
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
from hybridtrain.layers.exporter import Exporter
from hybridtrain.layers.faithful import Untraceable, where
from hybridtrain.layers.inputs import bind, has_optional, required
from hybridtrain.layers.layer import Layer, has_hooks, is_chain, layers_of
from hybridtrain.layers.recording import Opens, Recordings, record
from hybridtrain.layers.segment import Binding, Flags, Whole
from hybridtrain.layers.tracer import trace
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

    Attributes:
        layers: what can be cut between.
        units: for each layer, the number of its unit, and its number among the unit's pieces.
        joined: the positions (before layer i) where no cut may be, since a module is used on both
            sides.
        whole: the modules that tracing could not look into, with the reason.
        opened: those that it has looked into.
        flags: their modes as traced, where the graphs of the two modes differ.
    """

    layers: list[Layer]
    units: list[tuple[int, int]]
    joined: frozenset[int] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)
    opened: Mapping[str, nn.Module] = field(default_factory=dict)
    flags: Sequence[Flags] = ()


class SampleNeeded(Exception):
    """The model can be traced only when the inputs of a batch are known."""


class Chains:
    """The chains of a model, coarser or finer.

    Args:
        net: any module.
        sample: the inputs of a micro-batch; None if they are not known yet.
        precision: the context that the model runs in.

    Raises:
        SampleNeeded: `sample` is None, and needed to trace the model.
    """

    def __init__(
        self,
        net: nn.Module,
        sample: Any = None,
        precision: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._net = net
        self._record: Callable[[Opens], Recordings] | None = None
        self._coarse: Recordings | None = None
        self._failures: list[Exception] = []
        if is_chain(net):
            return
        if has_hooks(net):
            hooks = "the model itself has hooks, which would not run when its layers do one by one"
            self._failures.append(Untraceable(hooks))
            return
        if sample is None and has_optional(net):
            raise SampleNeeded  # a batch tells which of its arguments are given
        inputs, values = (required(net), None) if sample is None else bind(net, sample)
        if inputs is None:
            raise SampleNeeded
        self._binding = Binding(net, inputs)
        if self._follows(lambda opens: record(net, partial(trace, inputs, opens))):
            return
        if values is None:
            raise SampleNeeded
        exporter = Exporter(inputs, values, precision)
        if self._follows(lambda opens: record(net, partial(exporter.record, opens=opens))):
            self._binding = Binding(net, inputs, flat=True)

    def _follows(self, recorder: Callable[[Opens], Recordings]) -> bool:
        """Whether `recorder` follows the model far enough; it is kept if it follows it at all."""
        try:
            coarse = recorder(_opener(self._net, (), LARGE_SHARE))
        except Exception as error:
            self._failures.append(error)
            return False
        self._record, self._coarse = recorder, coarse
        sizes = [_size(self._net.get_submodule(name)) for name in coarse.whole]
        return max(sizes, default=0) <= TOO_LARGE_SHARE * _size(self._net)

    def chain(self, deeper: Collection[str] = ()) -> Chain:
        """The chain in which the modules in `deeper` are looked into; what cannot be stays whole.

        Raises:
            SplitError: the model cannot be traced; names the line.
        """
        if is_chain(self._net):
            found = _opened_layers(layers_of(self._net), deeper)
        elif self._record is None or self._coarse is None:
            raise SplitError(
                f"{type(self._net).__name__} cannot be traced, so that it cannot be cut: "
                f"{'; by torch.export: '.join(dict.fromkeys(map(where, self._failures)))}. Move "
                f"what stands there "
                f"into a submodule of its own, which stays whole, or give the model as an "
                f"nn.Sequential"
            ) from self._failures[0]
        else:
            found = self._units(self._coarse, self._record, deeper)
        layers = [layer for unit in found.layers for layer in unit]
        units = [
            (unit, piece) for unit, own in enumerate(found.layers) for piece in range(len(own))
        ]
        joined = frozenset(found.joined | _joined(layers))
        whole = found.whole
        if whole and self._failures:  # torch.export was asked because of them
            whole = {**whole, "the model, by torch.export,": where(self._failures[-1])}
        return Chain(layers, units, joined, whole, found.opened, found.flags)

    def _units(
        self,
        coarse: Recordings,
        recorder: Callable[[Opens], Recordings],
        deeper: Collection[str],
    ) -> _Pieces:
        units = {calls[-1] for calls in coarse.calls}
        recordings = recorder(_opener(self._net, deeper, LARGE_SHARE)) if deeper else coarse
        pieces: list[list[Layer]] = []
        layers = recordings.layers("", self._binding)
        for layer, calls in zip(layers, recordings.calls, strict=True):
            if not pieces or units.intersection(calls):
                pieces.append([])
            pieces[-1].append(layer)
        return _Pieces(
            pieces,
            recordings.joined(),
            recordings.whole,
            recordings.flags.modules,
            recordings.differing,
        )

    def one_layer(self) -> Chain:
        """The model as a single layer."""
        return Chain([Layer("", Whole(self._net))], [(0, 0)])


def can_open(module: nn.Module) -> bool:
    """Whether tracing may look into `module`."""
    if has_hooks(module) or isinstance(module, torch.jit.ScriptModule):
        return False  # a hook of its own would not run
    if stashed_by(module) or popped_by(module) or not any(True for _ in module.children()):
        return False
    return isinstance(module, _CONTAINERS) or not type(module).__module__.startswith("torch.")


class _Pieces(NamedTuple):
    """The layers of each unit, and the rest as in `Chain`."""

    layers: list[list[Layer]]
    joined: set[int]
    whole: dict[str, str]
    opened: Mapping[str, nn.Module]
    flags: list[Flags]


def _opened_layers(layers: Sequence[Layer], deeper: Collection[str]) -> _Pieces:
    pieces: list[list[Layer]] = []
    joined: set[int] = set()
    whole: dict[str, str] = {}
    opened: dict[str, nn.Module] = {}
    flags: list[Flags] = []
    for layer in layers:
        pieces.append([layer])
        inputs = required(layer.module) if layer.name in deeper else None
        if inputs is None or len(inputs.names) != 1 or not can_open(layer.module):
            continue
        opens = _opener(layer.module, deeper, prefix=f"{layer.name}.")
        try:
            recordings = record(layer.module, partial(trace, inputs, opens))
        except Exception as error:
            whole[layer.name] = where(error)
        else:
            before = sum(map(len, pieces[:-1]))
            joined |= {before + position for position in recordings.joined()}
            pieces[-1] = recordings.layers(f"{layer.name}.")
            inside = recordings.flags.modules.items()
            opened |= {f"{layer.name}.{name}".rstrip("."): part for name, part in inside}
            flags += recordings.differing
            whole |= {f"{layer.name}.{name}": why for name, why in recordings.whole.items()}
    return _Pieces(pieces, joined, whole, opened, flags)


def _opener(
    root: nn.Module, deeper: Collection[str], large: float = float("inf"), prefix: str = ""
) -> Opens:
    total = _size(root)

    def opens(name: str, module: nn.Module) -> bool:
        if is_chain(module):
            return True
        if not can_open(module):
            return False
        return prefix + name in deeper or _size(module) > large * total

    return opens


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _joined(layers: Sequence[Layer]) -> set[int]:
    """The positions between the uses of a module that has state, which is in one place only."""
    first: dict[int, int] = {}
    joined: set[int] = set()
    for index, layer in enumerate(layers):
        for module in layer.module.modules():
            if any(True for _ in (*module.parameters(), *module.buffers())):
                joined.update(range(first.setdefault(id(module), index) + 1, index + 1))
    return joined
