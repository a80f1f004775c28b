"""Any `nn.Module` as a chain of layers: the elements of a Sequential, or segments of a graph.

chain              a module as a chain of layers
segment            a layer, and one that is a part of a graph
tracer, exporter   a forward as a graph, by torch.fx or torch.export
traced_graph       what both give, and what must not be frozen into it
variants           the graphs of a model for inputs of other kinds
examples           what a forward's values are for example inputs
output_capture     the hooks of transformers that gather outputs of layers
recorder           notes what a forward reads while it is traced, and refuses what it changes
reads              the values that were read, compared before each step
attributes         where Python looks for an attribute
changes            what a forward must not change
code_names         the names that a function's code looks up
shadows            stand-ins for functions of Python in traced code
mode_graphs        one graph for training and one for evaluation, and what they depend on
call_signature     a batch as the arguments of a forward
"""

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.chain import Chain, ChainBuilder, can_expand
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
    "CallSignature",
    "Chain",
    "ChainBuilder",
    "Layer",
    "Segment",
    "SegmentGraph",
    "TraceGuards",
    "VariantCut",
    "Variants",
    "can_expand",
    "is_chain",
    "layers_of",
    "looks_only",
    "works_in_place",
]
