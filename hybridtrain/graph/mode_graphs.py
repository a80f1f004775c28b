"""A module's forward, traced in training and in evaluation mode, and its cut points.

Only `engine="distributed"` needs this file.

`TraceGuards` detects later changes of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

import torch
from torch import fx, nn

from hybridtrain._base.torch_private import global_hooks, hooks_of
from hybridtrain.errors import ConfigError, SplitError, phrase
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.output_capture import has_hooks
from hybridtrain.graph.reads import Reads
from hybridtrain.graph.segment import (
    Layer,
    Segment,
    SegmentGraph,
    assign_segments,
    cut,
    segments_without_cut,
)
from hybridtrain.graph.traced_graph import (
    Call,
    ShouldExpand,
    TracedGraph,
    Tracer,
    operations,
)


@dataclass(frozen=True)
class ModeGraphs:
    """The forward of a module in both modes, with its possible cut points.

    Attributes:
        prefix: the beginning of the module's names in the user's model.
        training: the graph in training mode.
        evaluation: the graph in evaluation mode; the same object if there is no difference.
        starts: the nodes that begin a segment: in training, in evaluation.
        calls: for each start, the calls that begin with it.
        expanded: the module and its expanded submodules, by name.
        modes: their training flags in training and in evaluation; empty if the graphs are the same.
        grad_matters: whether the training graph requires gradients enabled, or the evaluation graph
            disabled.
    """

    module: nn.Module
    prefix: str
    training: TracedGraph
    evaluation: TracedGraph
    starts: list[tuple[fx.Node, fx.Node]]
    calls: list[list[Call]]
    expanded: Mapping[str, nn.Module]
    modes: list[tuple[bool, ...]]
    grad_matters: bool

    @property
    def unexpanded(self) -> dict[str, str]:
        """The submodules that could not be expanded, with the reason."""
        unexpanded = self.training.unexpanded | self.evaluation.unexpanded
        return {self.prefix + name: reason for name, reason in unexpanded.items()}

    def layers(self, signature: CallSignature | None = None) -> list[Layer]:
        """Returns the segments between the starts, named after the modules that they begin with.

        `signature` maps the inputs of a batch to arguments, if the model begins here.
        """
        names = self.names
        training = cut(self.training, [node for node, _ in self.starts], names)
        evaluation = training
        if self.evaluation is not self.training:
            evaluation = cut(self.evaluation, [node for _, node in self.starts], names)
        layers = []
        for name, first, second in zip(names, training, evaluation, strict=True):
            owners = self._owners(first, second)
            layers.append(Layer(name, Segment(first, second, self.module, owners, signature)))
            signature = None
        return layers

    @property
    def names(self) -> list[str]:
        """The names of the segments: the modules that they begin with."""
        return [self.prefix + (f"{name}@{n + 1}" if n else name) for *_, (name, n) in self.calls]

    def _owners(self, *graphs: SegmentGraph) -> dict[str, tuple[nn.Module, str]]:
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        owners = {}
        for target in {target for graph in graphs for target in graph.attrs} & buffers:
            holder, _, leaf = target.rpartition(".")
            owners[target] = self.module.get_submodule(holder), leaf
        return owners

    def no_cut_before(self) -> set[int]:
        """Returns the indices of segments before which no cut is possible."""
        pairs = zip((self.training, self.evaluation), zip(*self.starts, strict=True), strict=True)
        return {
            position
            for traced, starts in pairs
            for position in segments_without_cut(traced, assign_segments(traced.graph, starts))
        }

    def cut_alike(
        self, other: ModeGraphs
    ) -> tuple[
        list[tuple[SegmentGraph, SegmentGraph]],
        list[dict[str, tuple[nn.Module, str]]],
        set[int],
    ]:
        """Cuts another trace of the module at the segments of this one.

        If the other trace lacks the call that begins a segment, that segment is empty.

        Returns:
            the graphs of each segment in training and in evaluation, the owners of the buffers in
            it, and the segments before which no cut is possible.

        Raises:
            SplitError: the other trace has the calls in a different order.
        """
        modes: list[list[SegmentGraph]] = []
        no_cut_before: set[int] = set()
        for traced in (other.training, other.evaluation):
            node_of_call = {call: node for node, calls in traced.calls.items() for call in calls}
            starts = [node_of_call.get(calls[-1]) for calls in self.calls]
            order = {node: number for number, node in enumerate(traced.graph.nodes)}
            places = [order[node] for node in starts[1:] if node is not None]
            if places != sorted(places):
                raise SplitError("it calls its modules in a different order")
            no_cut_before |= segments_without_cut(traced, assign_segments(traced.graph, starts))
            if modes and other.evaluation is other.training:
                modes.append(modes[0])
            else:
                modes.append(cut(traced, starts, self.names))
        pairs = list(zip(*modes, strict=True))
        return pairs, [self._owners(*pair) for pair in pairs], no_cut_before


def trace_both_modes(
    module: nn.Module, tracer: Tracer, should_expand: ShouldExpand, prefix: str = ""
) -> ModeGraphs:
    """Traces `module` in training and in evaluation mode, and leaves its mode unchanged.

    The names in `module` begin with `prefix` in the user's model.

    Raises:
        Exception: raised by `tracer`.
    """
    graphs: list[TracedGraph] = []
    flags: list[dict[nn.Module, bool]] = []
    former_modes = {part: part.training for part in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            flags.append({part: part.training for part in module.modules()})
            graphs.append(tracer(module, should_expand))
    finally:
        for part, mode in former_modes.items():
            part.training = mode
    first, second = graphs
    grad_matters = first.grad_matters or second.grad_matters
    if operations(first) == operations(second):
        second = first
    starts = _common_starts(first, second)
    calls = [first.calls[node] for node, _ in starts]
    if not starts:  # a forward without submodules
        starts = [(next(iter(first.graph.nodes)), next(iter(second.graph.nodes)))]
        calls = [[(type(module).__name__, 0)]]
    parts = {"": module, **first.expanded, **second.expanded}
    modes = [tuple(flags_of_mode[part] for part in parts.values()) for flags_of_mode in flags]
    return ModeGraphs(
        module,
        prefix,
        training=first,
        evaluation=second,
        starts=starts,
        calls=calls,
        expanded={(prefix + name).rstrip("."): part for name, part in parts.items()},
        modes=[] if second is first else modes,
        grad_matters=grad_matters,
    )


def _common_starts(first: TracedGraph, second: TracedGraph) -> list[tuple[fx.Node, fx.Node]]:
    """Returns the starts that both graphs have, in the same order."""
    keys = [[calls[-1] for calls in traced.calls.values()] for traced in (first, second)]
    nodes = list(first.calls), list(second.calls)
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return [
        (nodes[0][block.a + offset], nodes[1][block.b + offset])
        for block in blocks
        for offset in range(block.size)
    ]


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def looks_only(hook: _Hook) -> _Hook:
    """Marks a global module hook as read-only, so that a graph need not call it.

    This library marks the hooks that it registers for a step.
    """
    hook.__dict__["looks_only"] = True
    return hook


def _bearing(hooks: Mapping[int, Any]) -> int:
    """Returns the number of hooks that may change something."""
    return sum(not getattr(hook, "looks_only", False) for hook in hooks.values())


class TraceGuards:
    """The assumptions of a model's graphs about the traced modules.

    A graph contains the values that the forward read in addition to its inputs, does not run hooks
    of the modules that it replaces, and is valid for one combination of the modules' modes.
    """

    def __init__(self, graphs: Sequence[ModeGraphs] = ()) -> None:
        # not the graphs themselves, which hold tensors
        self._modes = [(graph.expanded, graph.modes) for graph in graphs if graph.modes]
        self._root = graphs[0].module if any(graph.grad_matters for graph in graphs) else None
        traced = [named for graph in graphs for named in graph.expanded.items()]
        self._names = frozenset(name for name, _ in traced)
        hooks: list[tuple[str, nn.Module | None, Mapping[int, Any]]] = [
            (name or "the model", part, table) for name, part in traced for table in hooks_of(part)
        ]
        if traced:
            hooks += [("torch.nn", None, table) for table in global_hooks()]
        self._hooks = [(name, part, table, _bearing(table)) for name, part, table in hooks]
        self._reads = Reads.merged(
            (graph.prefix, traced.reads)
            for graph in graphs
            for traced in (graph.training, graph.evaluation)
            if traced.reads is not None
        )

    @property
    def traced_names(self) -> frozenset[str]:
        """Names of the modules that graphs replace, because they were traced through."""
        return self._names

    def look(self) -> None:
        """Accepts the current buffers as the expected ones, after they were moved."""
        self._reads.look()

    def changes(self) -> str | None:
        """Returns a change that makes the graphs differ from the modules, or None.

        A new trace would follow the change.
        """
        change, _ = self._change()
        return change

    def check(self) -> None:
        """Checks that the graphs still compute the same as the modules.

        Raises:
            ConfigError: a module, or a value that its forward read, has changed; names it.
        """
        if self._root is not None:
            _check_grad_mode(self._root)
        change, remedy = self._change()
        if change is not None:
            raise ConfigError(f"{change}{remedy}")

    def _change(self) -> tuple[str | None, str]:
        """Returns the change, and how to fix it."""
        for name, part, hooks, count in self._hooks:
            # transformers registers hooks that collect outputs when a model is called
            if len(hooks) > count and (
                _bearing(hooks) > count if part is None else has_hooks(part)
            ):
                change = f"{name} had a hook registered after tracing, which would not run"
                return change, f": register hooks before you create the {phrase('HybridModel')}"
        for modules, modes in self._modes:
            current_modes = tuple(module.training for module in modules.values())
            if current_modes not in modes:
                flags = zip(modules, current_modes, modes[0], strict=True)
                name = next(name for name, is_on, was_on in flags if is_on != was_on)
                change = (
                    f"module {name!r} was switched to a different mode than the model around it, "
                    "but its forward depends on the mode"
                )
                return change, ": override its train() so that it keeps this mode during tracing"
        of_reads = self._reads.change()
        if of_reads is None:
            return None, ""
        return of_reads, (
            " since the model was traced: undo the change, or create a new "
            f"{phrase('HybridModel')}; submodules without submodules of their own are called, not "
            "traced, and may change"
        )


def _check_grad_mode(root: nn.Module) -> None:
    if torch.is_grad_enabled() != root.training:
        usual = "training with gradients and evaluation without"
        grad_mode = "without" if root.training else "with"
        raise ConfigError(
            f"{type(root).__name__} calls torch.is_grad_enabled() and was traced for {usual}: it "
            f"cannot run in {'train' if root.training else 'eval'}() mode {grad_mode} gradients"
        )
