"""An adapter: trained tensors inside a model with frozen weights, which come from elsewhere.

A model function that adds one puts it on the module (`put_adapter`). `init_from` then finds the
base's weights by their names without the adapter, and a checkpoint leaves them out and names their
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

_PLACE = "_hybridtrain_adapter"


class Adapter(Protocol):
    """The names of an adapter's tensors, and its export."""

    def base_name(self, name: str) -> str | None:
        """Returns the name that a tensor of the module has in the base without an adapter.

        Several tensors may have the same one. None: the base has no such tensor.
        """

    def follow_base(self, net: nn.Module) -> None:
        """Sets the initial values that depend on the base's, after these have been loaded."""

    def merged(self, net: nn.Module) -> nn.Module:
        """Returns the module with the adapter's effect in the base's weights; changes `net`."""

    def write(self, folder: Path, net: nn.Module, state: Mapping[str, Tensor], base: str) -> None:
        """Writes the adapter alone, in the format that its library reads.

        Args:
            folder: to write into, which exists.
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
    """The frozen weights that a model with an adapter has been loaded with.

    Attributes:
        source: as `init_from` was given it.
        digest: of the source's tensors.
        names: the model's own names of the tensors that came from there.
        prefix: of the names in the source, which the model's do not have.
    """

    source: str
    digest: str
    names: frozenset[str]
    prefix: str = ""
