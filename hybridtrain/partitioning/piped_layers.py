"""Layers that run one after another, each with the output of the one before.

For callers that have layers without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hybridtrain.graph import Layer


class PipedLayers(nn.Module):
    """A module that runs layers one after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer.module for layer in layers)

    def forward(self, value: Any) -> Any:
        """Returns the output of the last layer."""
        for layer in self.layers:
            value = layer(value)
        return value
