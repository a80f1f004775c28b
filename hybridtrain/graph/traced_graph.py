"""A module's forward as a graph, as the tracers return it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.utils._pytree import TreeSpec

# A submodule's name and the number of its call: where a segment may begin.
Call = tuple[str, int]

# Whether to look inside a submodule, given with its name.
ShouldExpand = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class TracedGraph:
    """A forward as a graph, in one mode.

    Attributes:
        graph: the operations.
        calls: for each node with which calls of submodules begin, these calls, the outermost
            first; in the order of the nodes.
        find: returns the module, parameter or tensor that a target of the graph names.
        expanded: the submodules whose own operations are in the graph.
        unexpanded: the submodules that should be expanded but cannot be traced, with the reason.
        output_spec: the structure of the output, if the graph returns its leaves alone.
    """

    graph: fx.Graph
    calls: dict[fx.Node, list[Call]]
    find: Callable[[str], Any]
    expanded: dict[str, nn.Module] = field(default_factory=dict)
    unexpanded: dict[str, str] = field(default_factory=dict)
    output_spec: TreeSpec | None = None


# Traces a module in the mode that it is in; raises any exception if it cannot.
Tracer = Callable[[nn.Module, ShouldExpand], TracedGraph]
