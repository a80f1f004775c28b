"""Cuts a traced graph into segments, each with its own graph.

Consecutive segments pass one value, the main one, as the layers of any chain do. Every other value
that a later segment needs has a name, by which it skips the segments between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec

from hybridtrain.graph.inplace import changes_inputs, node_works_in_place
from hybridtrain.graph.traced_graph import TracedGraph


@dataclass
class SegmentGraph:
    """The operations of a segment in one mode, training or evaluation.

    Attributes:
        module: the nodes as a module; returns the main value and then `outputs`.
        takes_main: whether its first argument is the main value.
        inputs: the names of its other arguments.
        last_uses: those of `inputs` that no later segment uses.
        outputs: the names of the values that it passes on besides the main value.
        attrs: the parameters, buffers and constants that it reads: the name of each in the traced
            module, and in `module`.
        in_place: whether it changes a tensor in place or, for the first segment, passes on an
            input that a later one changes.
        output_spec: the structure of the main value, if `module` returns its leaves alone.
        compiled: the module, compiled.
    """

    module: fx.GraphModule
    takes_main: bool
    inputs: tuple[str, ...]
    last_uses: frozenset[str]
    outputs: tuple[str, ...]
    attrs: Mapping[str, str]
    in_place: bool
    output_spec: TreeSpec | None = None
    compiled: Callable[..., Any] | None = None

    def put_constants_on(self, device: torch.device) -> None:
        """Makes `torch.arange(..., device=...)` and the like create tensors on `device`."""

        def moved(argument: Any) -> Any:
            return device if isinstance(argument, torch.device) else argument

        changed = False
        for node in self.module.graph.nodes:
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
            if (args, kwargs) != (node.args, node.kwargs):
                node.args, node.kwargs, changed = args, kwargs, True
        if changed:
            self.module.recompile()


def assign_segments(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Returns the number of each node's segment; `starts` are the nodes that begin one."""
    segment_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        here = segment_of.get(node.prev, 0)
        segment_of[node] = here + (here + 1 < len(starts) and node is starts[here + 1])
    return segment_of


def cut(traced: TracedGraph, starts: Sequence[fx.Node], names: Sequence[str]) -> list[SegmentGraph]:
    """Cuts `traced` before each of `starts` but the first.

    The values between segments get names that begin with the segments' `names`.
    """
    graph, find = traced.graph, traced.find
    segment_of = assign_segments(graph, starts)
    users = {node: sorted({segment_of[user] for user in node.users}) for node in graph.nodes}
    mains: dict[int, fx.Node] = {}  # by the segment that gets it from the one before
    named: list[dict[fx.Node, str]] = [{} for _ in starts]
    for node in graph.nodes:
        here = segment_of[node]
        later = [segment for segment in users[node] if segment > here]
        if node.op == "get_attr" or not later:
            continue
        skipping: fx.Node | None = node
        if later == [here + 1]:  # the last such value is the main one
            skipping, mains[here + 1] = mains.get(here + 1), node
        if skipping is not None:
            named[here][skipping] = f"{names[here]}/{len(named[here])}"
    name_of = {node: name for nodes in named for node, name in nodes.items()}
    (output,) = (node for node in graph.nodes if node.op == "output")
    input_changes = changes_inputs(traced)
    segments = []
    for here, outputs in enumerate(named):
        is_last = here + 1 == len(named)
        main = [mains[here]] if here in mains else []
        inputs = [node for node in name_of if segment_of[node] < here and here in users[node]]
        arguments = [node for node in graph.nodes if node.op == "placeholder"] if not here else []
        body = [n for n in graph.nodes if segment_of[n] == here and n.op.startswith("call_")]
        returned = output.args[0] if is_last else mains.get(here + 1, ())
        own_names: dict[str, str] = {}
        part = _own_graph([*arguments, *main, *inputs], body, (returned, *outputs), own_names)
        segments.append(
            SegmentGraph(
                fx.GraphModule({own: find(target) for target, own in own_names.items()}, part),
                takes_main=bool(main) or here == 0,
                inputs=tuple(name_of[node] for node in inputs),
                last_uses=frozenset(name_of[node] for node in inputs if users[node][-1] == here),
                outputs=tuple(outputs.values()),
                attrs={t: own for t, own in own_names.items() if isinstance(find(t), Tensor)},
                in_place=any(node_works_in_place(node, find) for node in body)
                or (here == 0 and input_changes),
                output_spec=traced.output_spec if is_last else None,
            )
        )
    return segments


def _own_graph(
    arguments: Sequence[fx.Node], body: Sequence[fx.Node], returned: Any, own_names: dict[str, str]
) -> fx.Graph:
    """Returns a separate graph of `body`, which reads parameters where it needs them.

    Its modules and tensors get names without dots, noted in `own_names`: a dotted one could lead
    through a module of the user's, which `fx.GraphModule` would then write to.
    """
    part = fx.Graph()
    own = {node: part.placeholder(node.name) for node in arguments}

    def own_name(target: Any) -> str:
        return own_names.setdefault(target, f"own{len(own_names)}_{target.replace('.', '_')}")

    def own_node(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in own:
            own[node] = part.get_attr(own_name(node.target))
        return own[node]

    for node in body:
        own[node] = part.node_copy(node, own_node)
        own[node].meta = {}  # of torch.export's, with tensors in it
        if node.op == "call_module":
            own[node].target = own_name(node.target)
    part.output(fx.node.map_arg(returned, own_node))
    return part
