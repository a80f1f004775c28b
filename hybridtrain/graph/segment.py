"""The layers of a chain, including segments of a traced graph.

A chain is an ordered list of `Layer`s, each with its name in the user's model: the elements of an
`nn.Sequential`, or the `Segment`s that `cut` makes of a graph.

Consecutive segments pass one value, the main value, like the layers of any chain. Every other value
that a later segment needs is a named skip value: an earlier segment stashes it, and a later one
pops it (see `hybridtrain._base.skip`).

A skip value begins a new autograd graph, without the tensor that it is a view of. An in-place
change of a view must therefore stay in the same segment as the viewed tensor. A buffer that one
segment changes and another reads must not be used by two threads at the same time.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from hybridtrain._base.skip import pop, pop_last, stash
from hybridtrain._base.torch_private import operator_overloads, operator_schema
from hybridtrain.errors import SplitError
from hybridtrain.graph.call_signature import CallSignature, arguments_of
from hybridtrain.graph.output_capture import has_hooks
from hybridtrain.graph.traced_graph import TracedGraph

# operator.iadd for operator.add etc.
IN_PLACE_OPERATORS = {
    vars(operator)[f"i{name.strip('_')}"]
    for name in vars(operator)
    if hasattr(operator, f"__i{name.strip('_')}__")
}

# Functions, methods and properties that may return their input or a view of it although PyTorch's
# operators do not declare it: no-op conversions, dropout outside training etc.
_MAY_RETURN_INPUT = {
    "H", "T", "atleast_1d", "atleast_2d", "atleast_3d", "bfloat16", "bool", "broadcast_tensors",
    "data", "double", "dropout", "float", "getitem", "half", "int", "long", "meshgrid", "type",
    "type_as",
}  # fmt: skip

# These modules return a new tensor; any other module without parameters may return its input.
_RETURN_NEW_TENSORS = {
    f"torch.nn.modules.{name}" for name in ("activation", "padding", "pooling", "upsampling")
}


@dataclass
class SegmentGraph:
    """The operations of a segment in one mode, training or evaluation.

    Attributes:
        module: the nodes as a module; returns the main value and then `outputs`.
        takes_main: whether its first argument is the main value.
        inputs: the names of the other arguments.
        last_uses: the names in `inputs` that no later segment uses.
        outputs: the names of the values passed on in addition to the main value.
        attrs: the parameters, buffers and constants that it reads, as pairs of names in the traced
            module and in `module`.
        modules: the submodules that it calls, by their names in the traced module.
        in_place: whether it changes a tensor in place or, for the first segment, passes on an input
            that a later segment changes.
        output_spec: the structure of the main value, if `module` returns only its leaves.
        takes_leaves: whether the model's arguments are the leaves of their pytrees.
    """

    module: fx.GraphModule
    takes_main: bool
    inputs: tuple[str, ...]
    last_uses: frozenset[str]
    outputs: tuple[str, ...]
    attrs: Mapping[str, str]
    modules: Mapping[str, nn.Module]
    in_place: bool
    output_spec: TreeSpec | None = None
    takes_leaves: bool = False
    compiled: Callable[..., Any] | None = None

    def put_constants_on(self, device: torch.device) -> None:
        """Makes `torch.arange(..., device=...)` and the like create tensors on `device`."""

        def moved(argument: Any) -> Any:
            return device if isinstance(argument, torch.device) else argument

        for part in self.module.modules():  # there may be nested graphs
            if not isinstance(part, fx.GraphModule):
                continue
            changed = False
            for node in part.graph.nodes:
                args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), moved)
                if (args, kwargs) != (node.args, node.kwargs):
                    node.args, node.kwargs, changed = args, kwargs, True
            if changed:
                part.recompile()


def assign_segments(graph: fx.Graph, starts: Sequence[fx.Node | None]) -> dict[fx.Node, int]:
    """Returns the index of each node's segment.

    Args:
        graph: the graph.
        starts: the first node of each segment; None for an empty segment.
    """
    number = {node: segment for segment, node in enumerate(starts) if node is not None}
    segment_of: dict[fx.Node, int] = {}
    segment = 0
    for node in graph.nodes:
        segment_of[node] = segment = max(segment, number.get(node, 0))
        if node.op == "output":  # the last segments may be empty
            segment_of[node] = len(starts) - 1
    return segment_of


def cut(
    traced: TracedGraph, starts: Sequence[fx.Node | None], names: Sequence[str]
) -> list[SegmentGraph]:
    """Cuts `traced` into segments.

    Args:
        traced: the graph.
        starts: the first node of each segment; None for an empty segment.
        names: the names of the segments, which prefix the names of their skip values.
    """
    graph, find = traced.graph, traced.find
    segment_of = assign_segments(graph, starts)
    users = {node: sorted({segment_of[user] for user in node.users}) for node in graph.nodes}
    mains: dict[int, fx.Node] = {}  # segment -> its main value from the previous segment
    named: list[dict[fx.Node, str]] = [{} for _ in starts]
    for node in graph.nodes:
        here = segment_of[node]
        later = [segment for segment in users[node] if segment > here]
        if node.op == "get_attr" or not later:
            continue
        skipping: fx.Node | None = node
        if later == [here + 1]:  # the last such value is the main value
            skipping, mains[here + 1] = mains.get(here + 1), node
        if skipping is not None:
            named[here][skipping] = f"{names[here]}/{len(named[here])}"
    name_of = {node: name for nodes in named for node, name in nodes.items()}
    (output,) = (node for node in graph.nodes if node.op == "output")
    input_changes = _changes_inputs(traced)
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
                fx.GraphModule(
                    {local_name: find(target) for target, local_name in own_names.items()}, part
                ),
                takes_main=bool(main) or here == 0,
                inputs=tuple(name_of[node] for node in inputs),
                last_uses=frozenset(name_of[node] for node in inputs if users[node][-1] == here),
                outputs=tuple(outputs.values()),
                attrs={
                    t: local_name
                    for t, local_name in own_names.items()
                    if isinstance(find(t), Tensor)
                },
                modules={t: find(t) for t in own_names if isinstance(find(t), nn.Module)},
                in_place=any(_works_in_place(node, find) for node in body)
                or (here == 0 and input_changes),
                output_spec=traced.output_spec if is_last else None,
                takes_leaves=traced.output_spec is not None,
            )
        )
    return segments


def _own_graph(
    arguments: Sequence[fx.Node], body: Sequence[fx.Node], returned: Any, own_names: dict[str, str]
) -> fx.Graph:
    """Returns a separate graph of `body`, which reads parameters where it needs them.

    Its modules and tensors get names without dots, recorded in `own_names`: a dotted name could
    lead through a user's module, to which `fx.GraphModule` would then write.
    """
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in arguments}

    def own_name(target: Any) -> str:
        return own_names.setdefault(target, f"own{len(own_names)}_{target.replace('.', '_')}")

    def own_node(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in copies:
            copies[node] = part.get_attr(own_name(node.target))
        return copies[node]

    for node in body:
        copies[node] = part.node_copy(node, own_node)
        copies[node].meta = {}  # from torch.export, with tensors in it
        if node.op == "call_module":
            copies[node].target = own_name(node.target)
    part.output(fx.node.map_arg(returned, own_node))
    return part


def _works_in_place(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Returns whether `node` changes its first argument, or `out=`."""
    target = node.target
    if node.op == "call_module":
        return bool(getattr(find(str(target)), "inplace", False))
    if node.op == "call_method":
        return str(target).endswith("_") and not str(target).endswith("__")
    if node.op != "call_function" or isinstance(target, str):
        return False
    if isinstance(node.kwargs.get("out"), fx.Node):
        return True
    if (schema := operator_schema(target)) is not None:
        return bool(schema.is_mutable)
    if (
        target in IN_PLACE_OPERATORS
        or target is operator.setitem
        or getattr(target, "__name__", "").endswith("_")
    ):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True


def _changes_inputs(traced: TracedGraph) -> bool:
    """Returns whether the graph changes its inputs in place, or views of them."""
    return any(
        base.op == "placeholder" and base is not node and _works_in_place(node, traced.find)
        for node, base in viewed_by(traced).items()
    )


def segments_without_cut(traced: TracedGraph, segment_of: Mapping[fx.Node, int]) -> set[int]:
    """Returns the indices of segments before which no cut is possible."""
    no_cut_before: set[int] = set()
    changed: set[str] = set()
    has_views: set[fx.Node] = set()
    viewed = viewed_by(traced)
    for node, base in viewed.items():
        if not node.all_input_nodes:
            continue
        if not _works_in_place(node, traced.find):
            if base is not node:
                has_views.add(base)
        elif base.op == "get_attr":
            changed.add(str(base.target))
        elif base in has_views or node.target is operator.setitem:
            no_cut_before.update(range(segment_of[base] + 1, segment_of[node] + 1))
    for target in changed:
        readers = [n for n in traced.graph.nodes if n.op == "get_attr" and n.target == target]
        uses = [segment_of[user] for reader in readers for user in reader.users]
        no_cut_before.update(range(min(uses) + 1, max(uses) + 1))
    return no_cut_before


def viewed_by(traced: TracedGraph) -> dict[fx.Node, fx.Node]:
    """Returns, for each node, the node with which it may share memory; itself for a new tensor."""
    viewed: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        shares = node.all_input_nodes and (
            _works_in_place(node, traced.find) or _is_view(node, traced.find)
        )
        out = node.kwargs.get("out")
        if not shares:
            viewed[node] = node
        else:
            viewed[node] = viewed[out if isinstance(out, fx.Node) else node.all_input_nodes[0]]
    return viewed


def _is_view(node: fx.Node, find: Callable[[str], Any]) -> bool:
    """Returns whether the result of `node` may share the memory of its first argument."""
    if node.op == "call_module":
        module = find(str(node.target))
        is_new = type(module).__module__ in _RETURN_NEW_TENSORS
        return not is_new and not any(True for _ in module.parameters())
    if (schema := operator_schema(node.target)) is not None:
        return _returns_view(schema)
    if node.target is getattr:
        return _may_return_view(str(node.args[1]))
    if node.op == "call_method":
        return _may_return_view(str(node.target))
    return node.op == "call_function" and _may_return_view(getattr(node.target, "__name__", ""))


@cache
def _may_return_view(name: str) -> bool:
    """Returns whether the function, method or property `name` may return a view of its input."""
    return name in _MAY_RETURN_INPUT or any(map(_returns_view, operator_overloads(name)))


def _returns_view(schema: torch.FunctionSchema) -> bool:
    """Returns whether the result of an operator is a view of an argument."""
    alias = schema.returns[0].alias_info if schema.returns else None
    return alias is not None and not alias.is_write


class Segment(nn.Module):
    """Consecutive nodes of a traced graph, in training and in evaluation mode.

    Its submodules and parameters are the objects of the user's model.

    Args:
        training: its graph in training mode.
        evaluation: its graph in evaluation mode; the same object if there is no difference.
        root: the traced module; its mode selects the graph.
        owners: the buffers that graphs read directly, each with the user's module that holds it and
            its name there.
        signature: for the first segment of a model, the mapping of a batch's inputs to arguments.
    """

    def __init__(
        self,
        training: SegmentGraph,
        evaluation: SegmentGraph,
        root: nn.Module,
        owners: Mapping[str, tuple[nn.Module, str]],
        signature: CallSignature | None = None,
    ) -> None:
        super().__init__()
        self.training_graph = training.module
        if evaluation is not training:
            self.evaluation_graph = evaluation.module
        self.stashes = tuple(dict.fromkeys([*training.outputs, *evaluation.outputs]))
        self.pops = tuple(dict.fromkeys([*training.inputs, *evaluation.inputs]))
        self.inplace = training.in_place or evaluation.in_place
        self.signature = signature
        self.variant = 0
        self._variants = [{True: training, False: evaluation}]
        self._graphs = [training] if evaluation is training else [training, evaluation]
        self._root = (root,)  # in a tuple, to keep it from becoming a submodule
        self._owners = dict(owners)
        self._compile_options: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.uses_compiled = True  # the compiled graphs, if any

    def forward(self, value: Any) -> Any:
        """Returns this segment's main value, given the previous segment's."""
        graph = self._variants[self.variant][self._root[0].training]
        if self.signature is not None:
            arguments = self.signature.graph_inputs(value)
            if graph.takes_leaves:
                arguments = tree_leaves(arguments)
        else:
            arguments = [value] if graph.takes_main else []
            for name in graph.inputs:
                arguments.append(pop_last(name) if name in graph.last_uses else pop(name))
        # not the module's own call, which would print its code if a layer in it raises
        run = graph.module.forward
        if graph.compiled is not None and self.uses_compiled:
            run = graph.compiled
        main, *further = run(*arguments)
        for name, skip_value in zip(graph.outputs, further, strict=True):
            stash(name, skip_value)
        for name in self.stashes:
            if name not in graph.outputs:
                stash(name, None)
        return main if graph.output_spec is None else tree_unflatten(main, graph.output_spec)

    @property
    def root(self) -> nn.Module:
        """The traced module."""
        return self._root[0]

    @property
    def takes_leaves(self) -> bool:
        """True if it was traced with torch.export."""
        return self._graphs[0].takes_leaves

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the graphs, which contain all computation."""
        self._compile_options = args, kwargs
        for graph in self._graphs:
            graph.compiled = torch.compile(graph.module, *args, **kwargs)

    def compiled_graphs(self) -> list[Callable[..., Any]]:
        """Returns the graphs that `compile` has compiled."""
        return [graph.compiled for graph in self._graphs if graph.compiled is not None]

    def add_variant(
        self,
        training: SegmentGraph,
        evaluation: SegmentGraph,
        owners: Mapping[str, tuple[nn.Module, str]],
        device: torch.device | None,
        aliases: Mapping[int, nn.Parameter],
    ) -> None:
        """Adds the graphs of another variant of the model.

        Args:
            training: the graph for training mode.
            evaluation: the graph for evaluation mode.
            owners: the buffers that the graphs read directly, each with the user's module that
                holds it and its name there.
            device: the device of the segment; None if another process has it.
            aliases: the replacements of tied parameters, by `id`.
        """
        number = len(self._variants)
        graphs = [training] if evaluation is training else [training, evaluation]
        self._owners |= owners
        self._variants.append({True: training, False: evaluation})
        self._graphs += graphs
        self.stashes = tuple(
            dict.fromkeys([*self.stashes, *(n for g in graphs for n in g.outputs)])
        )
        self.pops = tuple(dict.fromkeys([*self.pops, *(n for g in graphs for n in g.inputs)]))
        self.inplace = self.inplace or any(graph.in_place for graph in graphs)
        for graph, mode in zip(graphs, ("training", "evaluation"), strict=False):
            if device is not None:
                self._place(graph, device, aliases)
            self.add_module(f"{mode}_graph_{number}", graph.module)
            if self._compile_options is not None:
                args, kwargs = self._compile_options
                graph.compiled = torch.compile(graph.module, *args, **kwargs)

    def _place(
        self, graph: SegmentGraph, device: torch.device, aliases: Mapping[int, nn.Parameter]
    ) -> None:
        graph.put_constants_on(device)
        for held in graph.attrs.values():
            tensor = getattr(graph.module, held)
            if not isinstance(tensor, nn.Parameter):
                setattr(graph.module, held, tensor.to(device))
            elif id(tensor) in aliases:
                vars(graph.module)[held] = aliases[id(tensor)]

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the buffers that this segment has copied, as pairs (user's buffer, copy).

        A buffer is copied if another stage has moved the user's buffer to another device.
        """
        held = self._held()
        pairs = [
            (getattr(owner, name), getattr(module, local_name))
            for module, local_name, owner, name in held
        ]
        return [(buffer, copy) for buffer, copy in pairs if buffer is not copy]

    def surroundings(self) -> dict[int, Any]:
        """Returns the objects that a copy of this segment shares, as a memo for `copy.deepcopy`.

        These are the user's model, which also determines the mode of the copy, and its buffers.
        """
        called = self._root if self.signature is None else self.signature.module
        return {id(self._root): self._root, id(called): called, id(self._owners): {}}

    def _held(self) -> list[tuple[nn.Module, str, nn.Module, str]]:
        """Returns the buffers of the user's modules that graphs use: holder, name, owner, name."""
        return [
            (graph.module, held, *self._owners[target])
            for graph in self._graphs
            for target, held in graph.attrs.items()
            if target in self._owners
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Segment:
        """Moves the segment, including the buffers that it shares with the user's modules."""
        super()._apply(fn, recurse)
        moved: dict[tuple[int, str], Tensor] = {}
        for holder, held, owner, name in self._held():
            buffer = moved.setdefault((id(owner), name), getattr(holder, held))
            setattr(holder, held, buffer)
            setattr(owner, name, buffer)
        tensors = (*self.parameters(), *self.buffers())
        device = tensors[0].device if tensors else fn(torch.empty(0)).device
        self.put_constants_on(device)
        return self

    def put_constants_on(self, device: torch.device) -> None:
        """Makes the graphs create constant tensors on `device`."""
        for graph in self._graphs:
            graph.put_constants_on(device)


class SingleLayer(nn.Module):
    """A model as one layer, called with a batch's inputs as arguments of its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, value: Any) -> Any:
        """Returns the model's output."""
        args, kwargs = arguments_of(self.module, value)
        return self.module(*args, **kwargs)


@dataclass(frozen=True)
class Layer:
    """One element of a chain: its name in the user's model, and the module itself."""

    name: str
    module: nn.Module


def layers_of(net: nn.Module) -> list[Layer]:
    """Returns the layers of a chain by their names in `net`, flattening nested `nn.Sequential`s.

    A `Sequential` with hooks stays one layer: flattened, its hooks would not run.

    Raises:
        SplitError: `net` has no layers.
    """
    layers = _flatten("", net)
    if not layers:
        raise SplitError("the model has no layers")
    return layers


def is_chain(module: nn.Module) -> bool:
    """Returns whether `module` only runs its children in sequence."""
    if not isinstance(module, nn.Sequential) or has_hooks(module):
        return False
    return type(module).forward is nn.Sequential.forward


def _flatten(name: str, module: nn.Module) -> list[Layer]:
    if not is_chain(module):
        return [Layer(name, module)]
    prefix = f"{name}." if name else ""
    return [
        layer
        # named_children() would omit a module's second occurrence
        for child_name, child in module.named_modules(remove_duplicate=False)
        if child_name and "." not in child_name
        for layer in _flatten(prefix + child_name, child)
    ]


def works_in_place(module: nn.Module) -> bool:
    """Returns whether `module` contains an in-place module, such as `nn.ReLU(inplace=True)`."""
    return any(getattr(part, "inplace", False) for part in module.modules())
