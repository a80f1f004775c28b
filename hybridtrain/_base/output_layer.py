"""The layer that a model of transformers says computes its output."""

from __future__ import annotations

from torch import nn


def output_embeddings(net: nn.Module) -> nn.Module | None:
    """Returns `net.get_output_embeddings()`; None for a model that has none, or no such method."""
    method = getattr(net, "get_output_embeddings", None)
    layer = method() if callable(method) else None
    return layer if isinstance(layer, nn.Module) else None
