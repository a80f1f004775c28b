"""The variants of a traced model: its graphs for inputs of other kinds than the example.

Only `engine="distributed"` needs this file.

A graph is valid for inputs with the same control flow in the forward. They have the same kind
(structure, dtypes, numbers of dimensions, which sizes are 0, 1 or larger, contiguity), and the same
answers about sizes. For a micro-batch of another kind or with other answers, the model is traced
again and cut at the same layers:

    shapes of a micro-batch  ->  known?  ->  number of the variant
                                 no      ->  is a variant's graph valid?
                                 no      ->  trace again, cut at the same layers

All variants share modules and parameters, and so the stages, their reducers, aliases and devices.
They differ in their graphs, and so in the values that cross the cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from hybridtrain.errors import BatchError, SplitError, UserError, argument, setting
from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.examples import Examples
from hybridtrain.graph.exporter import SizeChecks, graph_does_the_same
from hybridtrain.graph.mode_graphs import ModeGraphs, TraceGuards
from hybridtrain.graph.traced_graph import TracedGraph, first_difference, user_line

MAX_VARIANTS = 8
_MAX_KNOWN = 4096  # maximum number of cached shape combinations


class VariantCut:
    """The graphs of a variant, cut like the first trace.

    Attributes:
        graphs: the graphs of each layer, in training and in evaluation.
        owners: the buffers that they read directly, as in `Segment`.
        no_cut_before: the positions where no cut is possible, as in `Chain`.
    """

    def __init__(self, first: ModeGraphs, other: ModeGraphs) -> None:
        self.graphs, self.owners, self.no_cut_before = first.cut_alike(other)


class _Variant:
    """One control flow of the forward.

    Attributes:
        graphs: the graphs of both modes.
        number: the index of the graphs in the segments; several variants may share it.
        kinds: the kinds of inputs for which the graphs are known to be valid, with the mode.
        guards: check that the model has not changed since.
    """

    def __init__(self, graphs: ModeGraphs, number: int) -> None:
        self.graphs = graphs
        self.number = number
        self.kinds: set[tuple[bool, Hashable]] = set()
        self.guards = TraceGuards([graphs])

    def traced(self, training: bool) -> TracedGraph:
        return self.graphs.training if training else self.graphs.evaluation


class Variants:
    """Chooses the variant for each micro-batch, tracing it if missing.

    Args:
        net: the model.
        signature: the signature of the first trace.
        graphs: the first trace.
        values: the arguments of the first trace.
        retrace: traces the model for other arguments.
        device: the apparent device of example tensors.

    Attributes:
        count: the number of variants in the segments.
        install: adds a new variant, with the next index, to the segments.
    """

    def __init__(
        self,
        net: nn.Module,
        signature: CallSignature,
        graphs: ModeGraphs,
        values: Sequence[Any],
        retrace: Callable[[Sequence[Any]], ModeGraphs],
        device: torch.device,
    ) -> None:
        self._net = net
        self._signature = signature
        self._retrace = retrace
        self._device = device
        self._example = tree_map_only(Tensor, _without_data, list(values))
        first = _Variant(graphs, 0)
        first.kinds = {(training, kind_of(values)) for training in (True, False)}
        self._variants = [first]
        self.count = 1
        self._known: dict[Hashable, _Variant] = {}
        self.install: Callable[[VariantCut], None] = _not_installed

    def choose(self, parts: Sequence[Any]) -> list[int]:
        """Returns the number of the variant for the inputs of each micro-batch.

        Raises:
            BatchError: the model cannot be traced for a micro-batch, or has too many variants.
            SplitError: the variant does not fit the stages.
        """
        training = self._net.training
        chosen = [self._variant_for(inputs, training) for inputs in parts]
        for variant in {id(variant): variant for variant in chosen}.values():
            if variant is not self._variants[0]:
                variant.guards.check()
        return [variant.number for variant in chosen]

    def forget(self) -> None:
        """Clears the known shapes, because other parameters require gradients now."""
        self._known.clear()

    def _variant_for(self, inputs: Any, training: bool) -> _Variant:
        leaves, spec = tree_flatten(inputs)
        key = training, _autocast(self._device), spec, tuple(map(_described, leaves))
        if (variant := self._known.get(key)) is None:
            if len(self._known) == _MAX_KNOWN:
                self._known.clear()
            variant = self._known[key] = self._find_or_trace(inputs, training)
        return variant

    def _find_or_trace(self, inputs: Any, training: bool) -> _Variant:
        signature, values = CallSignature.of_inputs(self._net, inputs)
        by_name = dict(zip(signature.names, values, strict=True))
        if set(by_name) != set(self._signature.names):
            return self._variants[0]  # its first segment reports the error
        values = [by_name[name] for name in self._signature.names]
        kind = training, kind_of(values)
        with plain_parameters(self._net):
            for variant in self._variants:
                if self._fits(variant, kind, values):
                    variant.kinds.add(kind)
                    return variant
            return self._traced(kind, values)

    def _fits(self, variant: _Variant, kind: tuple[bool, Hashable], values: Sequence[Any]) -> bool:
        traced = variant.traced(kind[0])
        examples = Examples(self._net, self._device)
        if traced.size_guards is not None:
            arguments = examples.of_inputs(list(values))
            return kind in variant.kinds and traced.size_guards.hold(examples, arguments)
        try:
            for node in traced.graph.find_nodes(op="call_module"):
                if isinstance(checks := traced.find(str(node.target)), SizeChecks):
                    checks(*tree_flatten(list(values))[0])
        except BatchError:
            return False
        if kind in variant.kinds:
            return True
        return graph_does_the_same(
            traced, self._net, self._signature, values, self._example, examples
        )

    def _traced(self, kind: tuple[bool, Hashable], values: Sequence[Any]) -> _Variant:
        model = type(self._net).__name__
        shapes = ", ".join(
            str(list(v.shape)) for v in tree_flatten(list(values))[0] if _is_tensor(v)
        )
        change = (
            f"the forward of {model} takes a different path for a micro-batch of shapes {shapes}"
        )
        hint = (
            f"Choose the batch size and {argument('chunks')} so that all micro-batches are of the "
            f"same kind as example_inputs= ({setting('drop_last', True)} drops a short last batch)"
        )
        try:
            graphs = self._retrace(values)
        except UserError:
            raise
        except Exception as error:
            raise BatchError(
                f"{change}, and it cannot be traced for these inputs: {user_line(error)}. {hint}"
            ) from error
        variant = _Variant(graphs, self._same_as(graphs))
        variant.kinds.add(kind)
        if not self._fits(variant, kind, values):
            raise BatchError(
                f"{change}, and a trace for these inputs depends on more than sizes. {hint}"
            )
        if variant.number == self.count:
            if self.count == MAX_VARIANTS:
                guards = variant.traced(kind[0]).size_guards
                conditions = "; ".join(guards.texts[:3]) if guards is not None else ""
                raise BatchError(
                    f"{change}, which would be variant {MAX_VARIANTS + 1} of at most "
                    f"{MAX_VARIANTS}: pad the inputs to fewer "
                    f"sizes{f' ({conditions})' if conditions else ''}"
                )
            try:
                self.install(VariantCut(self._variants[0].graphs, graphs))
            except SplitError as error:
                raise SplitError(
                    f"{change}, which does not fit the stages: {error}. Move the branch into the "
                    f"forward of a separate nn.Module, which becomes one layer. {hint}"
                ) from error
            self.count += 1
        self._variants.append(variant)
        return variant

    def _same_as(self, graphs: ModeGraphs) -> int:
        """Returns the number of the variant with the same operations, or else the next number."""
        for variant in self._variants:
            if all(
                first_difference(variant.traced(mode), _of_mode(graphs, mode)) is None
                for mode in (True, False)
            ):
                return variant.number
        return self.count


def _of_mode(graphs: ModeGraphs, training: bool) -> TracedGraph:
    return graphs.training if training else graphs.evaluation


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _not_installed(cut: VariantCut) -> None:
    raise SplitError("the model has no stages yet")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _autocast(device: torch.device) -> Hashable:
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _described(leaf: Any) -> Any:
    """Returns the properties of a leaf that may affect a forward; for a tensor, not its data."""
    if isinstance(leaf, Tensor):
        stride = leaf.stride() if leaf.layout == torch.strided else None
        return leaf.shape, stride, leaf.dtype, leaf.requires_grad
    return type(leaf)


def kind_of(values: Any) -> Hashable:
    """Returns the kind of the inputs `values`, a pytree."""
    leaves, spec = tree_flatten(list(values))
    return spec, tuple(map(_kind_of_leaf, leaves))


def _kind_of_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    is_contiguous = leaf.layout == torch.strided and leaf.is_contiguous()
    sizes = tuple(min(size, 2) for size in leaf.shape)
    return leaf.dtype, leaf.layout, sizes, is_contiguous, leaf.requires_grad


@contextmanager
def plain_parameters(net: nn.Module) -> Any:
    """Removes the aliases of tied parameters (`pipeline.ties`) from the modules in the block."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for module in net.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        attributes: dict[str, Any] = vars(module)
        hidden += [
            (attributes, name, attributes.pop(name))
            for name in module._parameters
            if name in attributes
        ]
    try:
        yield
    finally:
        for attributes, name, alias in hidden:
            attributes[name] = alias
