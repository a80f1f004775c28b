"""Any `nn.Module` as a chain of layers: the elements of a Sequential, or segments of a graph.

chain              a module as a chain of layers; layer, segment: one of them
tracer, exporter   a forward as a graph, by torch.fx or torch.export; traced_graph: what both give
mode_graphs        one graph for training and one for evaluation, and what they depend on
call_signature     a batch as the arguments of a forward
frozen             what changes from call to call, and must not be frozen
"""

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.chain import Chain, ChainBuilder, can_expand
from hybridtrain.graph.mode_graphs import TraceGuards
from hybridtrain.graph.segment import Layer, Segment, is_chain, layers_of, works_in_place

__all__ = [
    "CallSignature",
    "Chain",
    "ChainBuilder",
    "Layer",
    "Segment",
    "TraceGuards",
    "can_expand",
    "is_chain",
    "layers_of",
    "works_in_place",
]
