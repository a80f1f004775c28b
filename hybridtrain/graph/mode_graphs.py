"""A module's forward, recorded in training and in evaluation mode, and where it can be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from torch import fx, nn
from torch.utils._pytree import TreeSpec

from hybridtrain.errors import ConfigError
from hybridtrain.graph.inplace import segments_without_cut
from hybridtrain.graph.layer import Layer, has_hooks
from hybridtrain.graph.segment import (
    Binding,
    Flags,
    Segment,
    SegmentGraph,
    segment_graphs,
    segments_of,
)

# (name of a submodule, number of its call): where a segment may begin.
Call = tuple[str, int]

# Whether to look into a submodule, by its name.
ShouldExpand = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class TracedGraph:
    """A forward as a graph, in one mode.

    TraceGuards:
        graph: what it does.
        entered: for each node with which calls of submodules begin, these calls, the outermost
            first; in the order of the nodes.
        find: the module, parameter or tensor that a target of the graph means.
        expanded: the submodules that were looked into.
        unexpanded: those that could not be, with the reason.
        output: the structure of the output, if the graph returns its leaves alone.
    """

    graph: fx.Graph
    entered: dict[fx.Node, list[Call]]
    find: Callable[[str], Any]
    expanded: dict[str, nn.Module] = field(default_factory=dict)
    unexpanded: dict[str, str] = field(default_factory=dict)
    output: TreeSpec | None = None


class TraceGuards:
    """The numbers, flags and texts that a forward may have read from modules while recorded.

    That there are no hooks on them was seen then too, and which are in training mode, of which
    `flags` are given where the graphs of the two modes differ.
    """

    def __init__(self, modules: Mapping[str, nn.Module], flags: Sequence[Flags]) -> None:
        self._modules = modules
        self._flags = flags
        simple = (bool, int, float, str, type(None))
        self._seen = [
            (name, vars(module), key, value)
            for name, module in modules.items()
            for key, value in vars(module).items()
            if key != "training" and not key.startswith("_") and type(value) in simple
        ]

    def check(self) -> None:
        """Makes sure that they are what they were.

        Raises:
            ConfigError: one has changed, which the graphs would not know.
        """
        for name, module in self._modules.items():
            if has_hooks(module):
                raise ConfigError(
                    f"{name or 'the model'} has got a hook since it was traced, which would not "
                    f"run: register hooks before HybridModel is made"
                )
        for flags in self._flags:
            flags.check()
        for name, attributes, key, value in self._seen:
            if attributes[key] != value:
                raise ConfigError(
                    f"{name or 'the model'}.{key} has changed from {value!r} to "
                    f"{attributes[key]!r} since the model was traced: make a new HybridModel, or "
                    f"use it in a submodule without submodules, which is called as it is"
                )


@dataclass(frozen=True)
class ModeGraphs:
    """The forward of a module in both modes, with the places where it can be cut.

    TraceGuards:
        module: whose forward it is.
        training: it in training mode.
        evaluation: it in evaluation mode; the same object if there is no difference.
        starts: the nodes that begin a segment: in training, in evaluation.
        calls: for each start, the calls that begin with it.
        flags: the modes of the modules that were looked into.
    """

    module: nn.Module
    training: TracedGraph
    evaluation: TracedGraph
    starts: list[tuple[fx.Node, fx.Node]]
    calls: list[list[Call]]
    flags: Flags

    @property
    def differing(self) -> list[Flags]:
        """The flags, if it makes a difference in which mode the modules are."""
        return [] if self.evaluation is self.training else [self.flags]

    @property
    def unexpanded(self) -> dict[str, str]:
        """The submodules that could not be looked into, with the reason."""
        return self.training.unexpanded | self.evaluation.unexpanded

    def layers(self, prefix: str, binding: Binding | None = None) -> list[Layer]:
        """The segments between the starts, under the names of the modules that they begin with."""
        names = [prefix + _named(*calls[-1]) for calls in self.calls]
        training = self._programs(self.training, [node for node, _ in self.starts], names)
        evaluation = training
        if self.evaluation is not self.training:
            evaluation = self._programs(self.evaluation, [node for _, node in self.starts], names)
        buffers = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        layers = []
        for index, name in enumerate(names):
            pair = training[index], evaluation[index]
            owners = {}
            for target in {*pair[0].reads, *pair[1].reads} & buffers:
                holder, _, leaf = target.rpartition(".")
                owners[target] = self.module.get_submodule(holder), leaf
            segment = Segment(*pair, self.module, owners, binding if index == 0 else None)
            layers.append(Layer(name, segment))
        return layers

    def no_cut_before(self) -> set[int]:
        """The segments, by number, before which there may be no cut."""
        return {
            position
            for recording, starts in zip(
                (self.training, self.evaluation), zip(*self.starts, strict=True), strict=True
            )
            for position in segments_without_cut(
                recording.graph, segments_of(recording.graph, starts), recording.find
            )
        }

    def _programs(
        self, recording: TracedGraph, starts: Sequence[fx.Node], names: Sequence[str]
    ) -> list[SegmentGraph]:
        programs = segment_graphs(recording.find, recording.graph, starts, names)
        programs[-1].output = recording.output
        return programs


def attribute(module: nn.Module, path: str) -> Any:
    """What stands at the dotted `path` in `module`: a module, a parameter, a tensor."""
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def record(module: nn.Module, recorder: Callable[[nn.Module], TracedGraph]) -> ModeGraphs:
    """What `recorder` gives of `module` in both modes; the module's own mode stays what it was."""
    recordings: list[TracedGraph] = []
    modes: list[dict[nn.Module, bool]] = []
    for training in (True, False):
        with _mode(module, training):
            recordings.append(recorder(module))
            modes.append({part: part.training for part in module.modules()})
    first, second = recordings
    if _signature(first) == _signature(second):
        starts = [(node, node) for node in first.entered]
        second = first
    else:
        starts = _common(first, second)
    calls = [first.entered[node] for node, _ in starts]
    if not starts:  # a forward without any submodule
        starts = [(next(iter(first.graph.nodes)), next(iter(second.graph.nodes)))]
        calls = [[(type(module).__name__, 0)]]
    expanded = {"": module, **first.expanded, **second.expanded}
    flags = [tuple(mode[part] for part in expanded.values()) for mode in modes]
    return ModeGraphs(module, first, second, starts, calls, Flags(expanded, *flags))


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    """The modes that the modules have after `module.train(training)`, for a while."""
    modes = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _common(first: TracedGraph, second: TracedGraph) -> list[tuple[fx.Node, fx.Node]]:
    """The starts that both modes have, in the same order."""
    keys = [[calls[-1] for calls in recording.entered.values()] for recording in (first, second)]
    nodes = list(first.entered), list(second.entered)
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return [
        (nodes[0][block.a + offset], nodes[1][block.b + offset])
        for block in blocks
        for offset in range(block.size)
    ]


def _signature(recording: TracedGraph) -> list[Any]:
    """What a graph does, comparable with another graph's."""
    graph = recording.graph
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}

    def target(node: fx.Node) -> Any:
        # tensors that a forward has from elsewhere may have one name in both modes
        return id(recording.find(str(node.target))) if node.op == "get_attr" else node.target

    def by_number(arguments: Any) -> str:
        return repr(fx.node.map_arg(arguments, lambda node: number[node]))

    return [
        (node.op, target(node), by_number(node.args), by_number(node.kwargs))
        for node in graph.nodes
    ]


def _named(name: str, call: int) -> str:
    return f"{name}@{call + 1}" if call else name
