"""Layers under torch.compile.

A layer that draws random numbers in training runs plainly there: its draws are seeded by a dispatch
mode, which torch.compile cannot see into. Dynamo gives up a frame that it meets there, up to
PyTorch 2.13 for good. So a compiled layer is never called inside that mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hybridtrain._torch_private import allow_recompilations, call_uncompiled
from hybridtrain.graph.segment import Segment


def compile_layers(modules: Sequence[nn.Module], recomputes: bool) -> None:
    """Compiles each of `modules`, in its first forward.

    Args:
        modules: the layers.
        recomputes: whether backwards run layers again. The second run must use the same code as the
            first; with dynamic shapes another variant may fit by then.
    """
    # all layers share the code of nn.Module's call, and each may be compiled for its own reasons
    allow_recompilations(len(modules))
    for module in modules:
        module.compile(dynamic=False if recomputes else None)


def run_plainly(module: nn.Module, value: Any) -> Any:
    """Returns the output of a layer without its compiled code; hooks run as ever."""
    if not isinstance(module, Segment):
        return call_uncompiled(module, value)
    module.uses_compiled = False
    try:
        return module(value)
    finally:
        module.uses_compiled = True
