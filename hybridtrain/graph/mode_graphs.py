"""A module's forward, traced in training and in evaluation mode, and where it can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher

from torch import fx, nn

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.layer import Layer
from hybridtrain.graph.segment import Segment
from hybridtrain.graph.segment_graph import assign_segments, cut, segments_without_cut
from hybridtrain.graph.traced_graph import (
    Call,
    ShouldExpand,
    TracedGraph,
    Tracer,
    operations,
)


@dataclass(frozen=True)
class ModeGraphs:
    """The forward of a module in both modes, with the places where it can be cut.

    Attributes:
        prefix: the beginning of the module's names in the user's model.
        training: the graph in training mode.
        evaluation: the graph in evaluation mode; the same object if there is no difference.
        starts: the nodes that begin a segment: in training, in evaluation.
        calls: for each start, the calls that begin with it.
        expanded: the module and its expanded submodules, by name.
        modes: their training flags in training and in evaluation; empty if the graphs are the same.
        grad_matters: whether the training graph needs gradients switched on, or the other one off.
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
        found = self.training.unexpanded | self.evaluation.unexpanded
        return {self.prefix + name: reason for name, reason in found.items()}

    def layers(self, signature: CallSignature | None = None) -> list[Layer]:
        """Returns the segments between the starts, named after the modules that they begin with.

        `signature` says which arguments the inputs of a batch are, if the model begins here.
        """
        names = [self.prefix + (f"{name}@{n + 1}" if n else name) for *_, (name, n) in self.calls]
        training = cut(self.training, [node for node, _ in self.starts], names)
        evaluation = training
        if self.evaluation is not self.training:
            evaluation = cut(self.evaluation, [node for _, node in self.starts], names)
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        layers = []
        for name, first, second in zip(names, training, evaluation, strict=True):
            owners = {}
            for target in {*first.attrs, *second.attrs} & buffers:
                holder, _, leaf = target.rpartition(".")
                owners[target] = self.module.get_submodule(holder), leaf
            layers.append(Layer(name, Segment(first, second, self.module, owners, signature)))
            signature = None
        return layers

    def no_cut_before(self) -> set[int]:
        """Returns the numbers of the segments before which there may be no cut."""
        pairs = zip((self.training, self.evaluation), zip(*self.starts, strict=True), strict=True)
        return {
            position
            for traced, starts in pairs
            for position in segments_without_cut(traced, assign_segments(traced.graph, starts))
        }


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
    before = {part: part.training for part in module.modules()}
    try:
        for training in (True, False):
            module.train(training)
            flags.append({part: part.training for part in module.modules()})
            graphs.append(tracer(module, should_expand))
    finally:
        for part, mode in before.items():
            part.training = mode
    first, second = graphs
    grad_matters = first.grad_matters or second.grad_matters
    if operations(first) == operations(second):
        second = first
    starts = _common_starts(first, second)
    calls = [first.calls[node] for node, _ in starts]
    if not starts:  # a forward without any submodule
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
