"""Any `nn.Module` as a chain of layers, and the inputs of a batch as the arguments of its forward.

layers             the layers of a chain
call_signature     arguments of a forward, their names, and a batch as arguments
"""

from hybridtrain.graph.call_signature import arguments_of, signature_of
from hybridtrain.graph.layers import (
    LARGE_SHARE,
    Chain,
    Layer,
    check_unwrapped,
    initialize_lazy,
    is_chain,
    layers_of,
    works_in_place,
)

__all__ = [
    "LARGE_SHARE",
    "Chain",
    "Layer",
    "arguments_of",
    "check_unwrapped",
    "initialize_lazy",
    "is_chain",
    "layers_of",
    "signature_of",
    "works_in_place",
]
