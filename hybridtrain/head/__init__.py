"""The head of a language model, and its loss without logits.

choice        which linear layer is the head, and whether its loss needs the logits
calls         the calls of the head, which return
lazy_logits   a value that knows hidden states and weight, and takes part in operations
chunked_loss  the cross-entropy of these, in chunks of logits
"""

from hybridtrain.head.calls import HeadCall, install, lazily
from hybridtrain.head.choice import LARGE_VOCABULARY, HeadChoice, head_of
from hybridtrain.head.lazy_logits import (
    LazyLogits,
    concatenated,
    hidden_states,
    lazy_linear,
    made,
    made_from,
    with_backward,
    without_graph,
    without_lazy,
)

__all__ = [
    "LARGE_VOCABULARY",
    "HeadCall",
    "HeadChoice",
    "LazyLogits",
    "concatenated",
    "head_of",
    "hidden_states",
    "install",
    "lazily",
    "lazy_linear",
    "made",
    "made_from",
    "with_backward",
    "without_graph",
    "without_lazy",
]
