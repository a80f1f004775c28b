"""A chain of layers that run one after another, each with the output of the one before.

Only a traced model (`engine="distributed"`) needs this file, and callers that have layers without
a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from hybridtrain._base.skip import pop, popped_by
from hybridtrain.graph import Layer

# The input of a layer: the value before it, and the skip values that it pops.
LayerInput = tuple[Any, dict[str, Any]]


class PipedLayers(nn.Module):
    """A module that runs the layers of a chain one after another.

    Attributes:
        received: the input of each layer in the last forward.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)
        self.received: list[LayerInput] = []

    def forward(self, value: Any) -> Any:
        """Returns the output of the last layer."""
        self.received.clear()
        for layer in self.layers:
            popped: dict[str, Any] = {}
            with suppress(KeyError):  # the layer raises it
                popped.update((name, pop(name)) for name in popped_by(layer))
            self.received.append((value, popped))
            value = layer(value)
        return value
