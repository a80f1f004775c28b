"""A stretch of a traced graph as a layer: it takes what it needs and passes on what others need.

Consecutive segments hand the main value to one another as the layers of any chain do. Every other
value that a later segment needs goes by name, through `hybridtrain.skip`, from its segment to each
that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.graph.call_signature import Inputs, bind
from hybridtrain.graph.inplace import inputs_are_changed, works_in_place
from hybridtrain.skip import pop, stash, take


@dataclass
class SegmentGraph:
    """What a segment does in one mode, training or evaluation.

    TraceGuards:
        module: the nodes as a module; returns the main value and then the others in `gives`.
        takes_main: whether its first argument is the main value.
        takes: the names of its other arguments.
        last: those of `takes` that no later segment uses.
        gives: the names of the values that it passes on besides the main value.
        reads: the parameters, buffers and constants that it uses directly, and where `module`
            has each.
        in_place: whether it changes a tensor in place or, the first one, passes on an input that
            a later one changes.
        output: the structure of the main value, if the module returns its leaves alone.
        compiled: the module, compiled.
    """

    module: fx.GraphModule
    takes_main: bool = False
    takes: tuple[str, ...] = ()
    last: frozenset[str] = frozenset()
    gives: tuple[str, ...] = ()
    reads: Mapping[str, str] = field(default_factory=dict)
    in_place: bool = False
    output: TreeSpec | None = None
    compiled: Callable[..., Any] | None = None

    def run(self, *values: Any) -> Any:
        """What the module gives for `values`."""
        # not the module's own call, which would print its code when a layer in it raises
        run = self.module.forward if self.compiled is None else self.compiled
        return run(*values)


@dataclass(frozen=True)
class Flags:
    """The training flags that a trace has seen: of the modules whose forward was looked into."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    training: tuple[bool, ...] = ()
    evaluation: tuple[bool, ...] = ()

    def check(self) -> None:
        """Makes sure that the modules are in training or in evaluation mode, as they were traced.

        Raises:
            ConfigError: some are in the one and some in the other.
        """
        now = tuple(module.training for module in self.modules.values())
        if now in (self.training, self.evaluation):
            return
        name = next(
            name
            for name, flag, then in zip(self.modules, now, self.training, strict=True)
            if flag != then
        )
        raise ConfigError(
            f"module {name!r} was switched to another mode than the model around it, whose forward "
            f"depends on the mode: let its train() keep the mode, so that it is seen in the trace"
        )


class Segment(nn.Module):
    """Some consecutive nodes of a traced graph, in training and in evaluation mode.

    Its submodules and parameters are those of the user's model, the same objects.

    Args:
        training: what it does in training mode.
        evaluation: likewise; the same object where there is no difference.
        root: the traced module, which tells the mode.
        owners: the buffers that graphs read directly: the user's module that holds each, and its
            name there.
        binding: for the first segment of a model, what a batch's inputs are to it.
    """

    def __init__(
        self,
        training: SegmentGraph,
        evaluation: SegmentGraph,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        binding: Binding | None = None,
    ) -> None:
        super().__init__()
        self.training_graph = training.module
        if evaluation is not training:
            self.evaluation_graph = evaluation.module
        self.stashes = tuple(dict.fromkeys([*training.gives, *evaluation.gives]))
        self.pops = tuple(dict.fromkeys([*training.takes, *evaluation.takes]))
        self.inplace = training.in_place or evaluation.in_place
        self._programs = {True: training, False: evaluation}
        self._distinct = [training] if evaluation is training else [training, evaluation]
        self._mode_of = (root,)  # in a tuple, so that it is no submodule
        self._owners = owners
        self._binding = binding

    def forward(self, value: Any) -> Any:
        """The main value of this segment from that of the one before."""
        program = self._programs[self._mode_of[0].training]
        if self._binding is not None:
            given = self._binding.values(value)
        else:
            given = [value] if program.takes_main else []
            given += [take(name) if name in program.last else pop(name) for name in program.takes]
        main, *others = program.run(*given)
        for name, other in zip(program.gives, others, strict=True):
            stash(name, other)
        for name in self.stashes:
            if name not in program.gives:
                stash(name, None)
        return main if program.output is None else tree_unflatten(main, program.output)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the graphs; what is around them only hands values over."""
        for program in self._distinct:
            program.compiled = torch.compile(program.module, *args, **kwargs)

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that are here as copies: the user's own, and the copy.

        They are the user's own unless another stage has taken them to another device.
        """
        return [
            (owner._buffers[name], module._buffers[place])  # type: ignore[misc]
            for module, place, owner, name in self._borrowed()
            if owner._buffers[name] is not module._buffers[place]
        ]

    def _borrowed(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """Where the graphs hold the buffers of the user's modules, and where these do."""
        return [
            (program.module, place, *self._owners[target])
            for program in self._distinct
            for target, place in program.reads.items()
            if target in self._owners
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Segment:
        """Moves the segment, and with it the buffers that it shares with the user's modules."""
        super()._apply(fn, recurse)
        moved: dict[tuple[int, str], Tensor | None] = {}
        for module, place, owner, name in self._borrowed():
            buffer = moved.setdefault((id(owner), name), module._buffers[place])
            module._buffers[place] = owner._buffers[name] = buffer
        tensors = (*self.parameters(), *self.buffers())
        device = tensors[0].device if tensors else fn(torch.empty(0)).device
        for program in self._distinct:
            _put_constants_on(device, program.module)
        return self


class SingleLayer(nn.Module):
    """A model that is one layer: it is called with a batch's inputs as they are meant."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Any) -> Any:
        """The model's output."""
        inputs, values = bind(self.module, value)
        return inputs.call(self.module, values)


@dataclass(frozen=True)
class Binding:
    """The inputs that a model was traced with.

    TraceGuards:
        module: the model.
        inputs: its arguments.
        flat: whether the graph takes the leaves of their pytrees.
    """

    module: nn.Module
    inputs: Inputs
    flat: bool = False

    def values(self, given: Any) -> list[Any]:
        """The values of a batch's inputs, in the order of the graph's placeholders.

        Raises:
            BatchError: the batch gives other arguments than the trace has seen.
        """
        inputs, values = bind(self.module, given)
        by_name = dict(zip(inputs.names, values, strict=True))
        for name, constant in self.inputs.constants.items():
            if name in by_name and by_name[name] != constant:
                raise BatchError(
                    f"{type(self.module).__name__} was traced with {name}={constant}, and this "
                    f"batch gives {name}={by_name[name]}: only tensors may change"
                )
        if set(by_name) == set(self.inputs.names):
            values = [by_name[name] for name in self.inputs.names]
            return tree_leaves(values) if self.flat else values
        raise BatchError(
            f"{type(self.module).__name__} was traced with {_listed(self.inputs.names)}, and this "
            f"batch gives {_listed(inputs.names)}: give the same inputs in every batch, those of "
            f"HybridModel(..., example_inputs=...) or of the first one. To predict without labels, say, "
            f"load model.state_dict() into the plain module, or into another HybridModel"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def segments_of(graph: fx.Graph, starts: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The number of the segment of each node; `starts` are the nodes that begin one."""
    home: dict[fx.Node, int] = {}
    for node in graph.nodes:
        here = home.get(node.prev, 0)
        home[node] = here + (here + 1 < len(starts) and node is starts[here + 1])
    return home


def segment_graphs(
    find: Callable[[str], Any], graph: fx.Graph, starts: Sequence[fx.Node], names: Sequence[str]
) -> list[SegmentGraph]:
    """Cuts `graph` before each of `starts` but the first; one program for each.

    Args:
        find: the module, parameter or tensor that a target of the graph means.
        graph: the whole forward.
        starts: the nodes that begin a segment, in order; the first segment also has what is before
            its start.
        names: what each segment is called, for the names of its values.
    """
    home = segments_of(graph, starts)
    users = {node: sorted({home[user] for user in node.users}) for node in graph.nodes}
    mains: dict[int, fx.Node] = {}  # by the segment that gets it from the one before
    named: list[dict[fx.Node, str]] = [{} for _ in starts]
    for node in graph.nodes:
        here = home[node]
        if node.op == "get_attr" or not any(place > here for place in users[node]):
            continue
        replaced: fx.Node | None = node
        if [place for place in users[node] if place > here] == [here + 1]:
            replaced, mains[here + 1] = mains.get(here + 1), node
        if replaced is not None:
            named[here][replaced] = f"{names[here]}/{len(named[here])}"
    name_of = {node: name for nodes in named for node, name in nodes.items()}
    (output,) = (node for node in graph.nodes if node.op == "output")
    programs = []
    for here, given in enumerate(named):
        main = mains.get(here)
        takes = [node for node in name_of if home[node] < here and here in users[node]]
        arguments = [node for node in graph.nodes if node.op == "placeholder"] if not here else []
        body = [n for n in graph.nodes if home[n] == here and n.op not in _NO_BODY]
        returned = output.args[0] if here + 1 == len(named) else mains.get(here + 1, ())
        places: dict[str, str] = {}
        values = [*arguments, *([main] if main else []), *takes]
        part = _part(values, body, (returned, *given), places)
        programs.append(
            SegmentGraph(
                fx.GraphModule({place: find(target) for target, place in places.items()}, part),
                takes_main=main is not None or here == 0,
                takes=tuple(name_of[node] for node in takes),
                last=frozenset(name_of[node] for node in takes if users[node][-1] == here),
                gives=tuple(given.values()),
                reads={t: p for t, p in places.items() if isinstance(find(t), Tensor)},
                in_place=any(works_in_place(node, find) for node in body)
                or (here == 0 and inputs_are_changed(graph, find)),
            )
        )
    return programs


def _put_constants_on(device: torch.device, module: fx.GraphModule) -> None:
    """Has `torch.arange(..., device=...)` and the like make their tensors on `device`."""

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    changed = False
    for node in module.graph.nodes:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs, changed = args, kwargs, True
    if changed:
        module.recompile()


_NO_BODY = ("placeholder", "get_attr", "output")


def _part(
    arguments: Sequence[fx.Node], body: Sequence[fx.Node], returned: Any, places: dict[str, str]
) -> fx.Graph:
    """A graph of its own for `body`, which reads parameters where it needs them.

    Its modules and tensors get names without dots, noted in `places`: a dotted one could lead
    through a module of the user's, which `fx.GraphModule` would then write to.
    """
    part = fx.Graph()
    own = {node: part.placeholder(node.name) for node in arguments}

    def place(target: Any) -> str:
        return places.setdefault(target, f"own{len(places)}_{target.replace('.', '_')}")

    def here(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in own:
            own[node] = part.get_attr(place(node.target))
        return own[node]

    for node in body:
        own[node] = part.node_copy(node, here)
        own[node].meta = {}  # what torch.export knew of it, tensors among that
        if node.op == "call_module":
            own[node].target = place(node.target)
    part.output(fx.node.map_arg(returned, here))
    return part
