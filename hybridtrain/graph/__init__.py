"""Any `nn.Module` as a chain of layers: the elements of a Sequential, or segments of a graph.

chain              a module as a chain of layers
segment            the layers of a chain, and segments of a graph
tracer, exporter   a forward as a graph, by torch.fx or torch.export
traced_graph       the result of both tracers, and values that must not be frozen into it
variants           further graphs of a model, for inputs of other kinds
examples           the values of a forward for example inputs
output_capture     the hooks of transformers that collect outputs of layers
recorder           records the values that a forward reads, and rejects changes
reads              the recorded values, compared before each step
attributes         the places where Python looks up an attribute
changes            state that a forward must not change
code_names         the names that a function's code looks up
shadows            stand-ins for Python builtins in traced code
mode_graphs        one graph per mode, and the assumptions they depend on
call_signature     a batch as the arguments of a forward
"""

from hybridtrain.graph.call_signature import CallSignature, arguments_of
from hybridtrain.graph.chain import (
    LARGE_SHARE,
    Chain,
    ChainBuilder,
    can_expand,
    check_unwrapped,
    initialize_lazy,
)
from hybridtrain.graph.mode_graphs import TraceGuards, looks_only
from hybridtrain.graph.segment import (
    Layer,
    Segment,
    SegmentGraph,
    is_chain,
    layers_of,
    works_in_place,
)
from hybridtrain.graph.variants import VariantCut, Variants

__all__ = [
    "LARGE_SHARE",
    "CallSignature",
    "Chain",
    "ChainBuilder",
    "Layer",
    "Segment",
    "SegmentGraph",
    "TraceGuards",
    "VariantCut",
    "Variants",
    "arguments_of",
    "can_expand",
    "check_unwrapped",
    "initialize_lazy",
    "is_chain",
    "layers_of",
    "looks_only",
    "works_in_place",
]
