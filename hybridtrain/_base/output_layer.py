"""What a model of transformers says about the modules that compute its output."""

from __future__ import annotations

from torch import nn


def output_embeddings(net: nn.Module) -> nn.Module | None:
    """Returns `net.get_output_embeddings()`; None for a model that has none, or no such method."""
    method = getattr(net, "get_output_embeddings", None)
    layer = method() if callable(method) else None
    return layer if isinstance(layer, nn.Module) else None


def head_modules(net: nn.Module) -> list[nn.Module]:
    """Returns the modules outside `net.base_model`, and the modules of `output_embeddings`.

    Empty for a model that has neither.
    """
    base, output = getattr(net, "base_model", None), output_embeddings(net)
    inside = {*map(id, base.modules())} if isinstance(base, nn.Module) else None
    outside = [m for m in net.modules() if inside is not None and id(m) not in inside]
    return [*outside, *([] if output is None else output.modules())]
