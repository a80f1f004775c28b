"""The forward of a module as a graph, by torch.export, where torch.fx cannot follow it.

torch.export runs the forward once, on shapes without data, and keeps what PyTorch's operators were
asked for, and for which submodule. So it follows any Python, as long as no data decide; what the
Python would have done for other inputs (of another rank, say) is checked at each call. The number
of rows stays open, other sizes as far as the forward allows it.

`torch.distributed.pipelining.pipeline` builds on the same export. It fixes the number of rows and
the mode, and leaves no cut inside a chosen module, so its graph is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import cache, partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, export
from torch.utils._pytree import tree_map

from hybridtrain.graph.call_signature import Inputs
from hybridtrain.graph.guards import Untraceable, export_guards
from hybridtrain.graph.layer import has_hooks
from hybridtrain.graph.mode_graphs import Call, ShouldExpand, TracedGraph, attribute


class Exporter:
    """Exports a module once in each mode, and records it for any choice of what to look into.

    Args:
        inputs: the arguments of its forward.
        values: an example of each.
        precision: the context that the module runs in.
    """

    def __init__(
        self,
        inputs: Inputs,
        values: list[Any],
        precision: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._inputs = inputs
        self._values = values
        self._precision = precision or nullcontext
        self._exported: dict[bool, fx.GraphModule] = {}

    def record(self, module: nn.Module, should_expand: ShouldExpand) -> TracedGraph:
        """The forward, in the mode that the module is in."""
        if module.training not in self._exported:
            self._exported[module.training] = self._export(module)
        exported = self._exported[module.training]
        codegen: Any = exported.graph._codegen
        return TracedGraph(
            graph=exported.graph,
            entered=_entered(exported.graph, module, should_expand),
            find=partial(attribute, exported),
            expanded={name: part for name, part in module.named_modules() if name},
            output=codegen.pytree_info.out_spec,
        )

    def _export(self, module: nn.Module) -> fx.GraphModule:
        for name, part in module.named_modules():
            if has_hooks(part):
                raise Untraceable(f"torch.export would lose the hooks of module {name!r}")
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        values = [tree_map(lambda leaf: _example(leaf, device), value) for value in self._values]
        shapes = [tree_map(_open_sizes, value) for value in values]
        count = len(self._inputs.positional)
        keywords = self._inputs.keywords
        with self._precision(), torch.random.fork_rng([]), export_guards(module), _quietly():
            program = export(
                module,
                tuple(values[:count]),
                dict(zip(keywords, values[count:], strict=True)),
                dynamic_shapes=dict(zip(self._inputs.names, shapes, strict=True)),
                strict=False,
            )
        exported = program.module()
        for node in list(exported.graph.nodes):
            if node.target == torch.ops.aten._assert_tensor_metadata.default:
                exported.graph.erase_node(node)  # it computes nothing, and autocast may differ
            if "batch_norm" in str(node.target):
                raise Untraceable("torch.export loses which batch norm moves its statistics when")
        return exported


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what an export that fails writes; its exception says what is wrong."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _example(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    if leaf.shape[0] == 1:
        leaf = torch.cat([leaf, leaf])  # torch.export takes one row for a constant
    return leaf.to(device)


def _open_sizes(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    return {0: Dim.DYNAMIC, **dict.fromkeys(range(1, leaf.dim()), Dim.AUTO)}


def _entered(
    graph: fx.Graph, module: nn.Module, should_expand: ShouldExpand
) -> dict[fx.Node, list[Call]]:
    """Where the calls of submodules begin, as deep as `should_expand` allows."""
    should_expand = cache(should_expand)
    entered: dict[fx.Node, list[Call]] = {}
    calls: dict[str, int] = {}
    before: dict[str, Call] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") if node.op == "call_function" else None
        now: dict[str, Call] = {}
        for key, (path, _) in (stack or {}).items():
            path = path.partition("@")[0]
            if not path or path.startswith("_empty_nn_module_stack"):
                continue
            if key in before:
                now[key] = before[key]
            else:
                now[key] = path, calls.get(path, 0)
                calls[path] = calls.get(path, 0) + 1
                entered.setdefault(node, []).append(now[key])
            if not should_expand(path, module.get_submodule(path)):
                break
        if stack:
            before = now
    return entered
