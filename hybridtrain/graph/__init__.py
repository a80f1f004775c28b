"""Any `nn.Module` as a chain of layers: the elements of a Sequential, or segments of a graph."""

from hybridtrain.graph.call_signature import CallSignature
from hybridtrain.graph.chain import Chain, ChainBuilder, can_expand
from hybridtrain.graph.layer import Layer, is_chain, layers_of, works_in_place
from hybridtrain.graph.mode_graphs import TraceGuards
from hybridtrain.graph.segment import Segment

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
