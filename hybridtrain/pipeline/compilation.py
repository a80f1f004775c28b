"""Layers under torch.compile.

A layer that draws random numbers in training runs plainly there, since compiled code draws others
(Inductor makes its own kernels): the masks would be those of a run with `compile=False` no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hybridtrain._torch_private import allow_recompilations, call_uncompiled, compile_module
from hybridtrain.graph import Segment


def compile_layers(modules: Sequence[nn.Module], recomputes: bool) -> None:
    """Compiles each of `modules`, in its first forward.

    Args:
        modules: the layers.
        recomputes: whether backwards run layers again. The second run must use the same code as the
            first; with dynamic shapes another variant may fit by then.
    """
    # all layers share the code of a call, and each may be compiled for its own reasons
    allow_recompilations(len(modules))
    dynamic = False if recomputes else None
    for module in modules:
        if isinstance(module, Segment):
            module.compile(dynamic=dynamic)
        else:
            compile_module(module, dynamic=dynamic)


class LayerSettings:
    """Notices layers that were set otherwise, by the numbers and flags of their modules.

    Whether a layer draws depends on them: the rate of a dropout, the mode of one module. What it
    reads elsewhere, in a global or inside an object that is an attribute, is seen once it draws.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._places = [_settings_of(layer) for layer in layers]
        self._values = [_read(places) for places in self._places]

    def changed(self) -> list[int]:
        """Returns the numbers of the layers that were set otherwise since the last call."""
        values = [_read(places) for places in self._places]
        numbers = [n for n, own in enumerate(values) if own != self._values[n]]
        self._values = values
        return numbers


def _settings_of(layer: nn.Module) -> list[tuple[dict[str, Any], str]]:
    tables = [vars(module) for module in layer.modules()]
    return [(table, key) for table in tables for key in table if type(table[key]) in (bool, float)]


def _read(places: Sequence[tuple[dict[str, Any], str]]) -> list[Any]:
    return [table.get(key) for table, key in places]


def run_plainly(module: nn.Module, value: Any) -> Any:
    """Returns the output of a layer without its compiled code; hooks run as ever."""
    if not isinstance(module, Segment):
        return call_uncompiled(module, value)
    module.uses_compiled = False
    try:
        return module(value)
    finally:
        module.uses_compiled = True
