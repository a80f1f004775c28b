"""An adapter: trained tensors inside a model with frozen weights loaded from another source.

A model function that adds an adapter registers it with `put_adapter`. `init_from` then finds the
base weights by their names without the adapter, and checkpoints omit them and record their source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

_PLACE = "_hybridtrain_adapter"


class Adapter(Protocol):
    """The names of an adapter's tensors, and its export."""

    def base_name(self, name: str) -> str | None:
        """Returns the name of a tensor in the base model without an adapter.

        Several tensors may have the same base name. None if the base does not have the tensor.
        """

    def is_replaced(self, name: str) -> bool:
        """Returns whether the forward pass uses a trained copy of a tensor instead of it."""

    def train_whole(self, layers: Sequence[str]) -> str:
        """Returns the setting that also trains `layers`, named as in the base, as a whole."""

    def follow_base(self, net: nn.Module) -> None:
        """Sets initial values that depend on the base weights, after these are loaded."""

    def merged(self, net: nn.Module) -> nn.Module:
        """Merges the adapter into the base weights and returns the module; changes `net`."""

    def write(self, folder: Path, net: nn.Module, state: Mapping[str, Tensor], base: str) -> None:
        """Writes only the adapter, in the format of its library.

        Args:
            folder: the existing folder to write to.
            net: the module; its values may be missing.
            state: the values.
            base: the source of the base, or "".
        """


def put_adapter(net: nn.Module, adapter: Adapter) -> None:
    """Declares that `net` has an adapter."""
    object.__setattr__(net, _PLACE, adapter)


def adapter_of(net: nn.Module) -> Adapter | None:
    """Returns the adapter of `net`, or None."""
    adapter: Adapter | None = net.__dict__.get(_PLACE)
    return adapter


@dataclass(frozen=True)
class BaseWeights:
    """The frozen base weights of a model with an adapter.

    Attributes:
        source: the value of `init_from`.
        digest: the digest of the source's tensors.
        names: the model's names of the tensors loaded from the source.
        prefix: the prefix of the names in the source that the model's names lack.
        quantization: how the weights were quantized when they were loaded; "": they were not.
    """

    source: str
    digest: str
    names: frozenset[str]
    prefix: str = ""
    quantization: str = ""
