"""Layers that repeat: equal layers with equal inputs are counted once.

The layers of a transformer are copies of each other. Each gives an output of the same shape, so
what was counted for the first holds for all, and only the first has to run.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from hybridtrain.graph.layer import Layer
from hybridtrain.memory import storage_id
from hybridtrain.planning.costs import Given, LayerRun, RunLayer, tensors_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

# What every module has, and what does not decide what a forward does.
_OF_MODULE = frozenset(vars(nn.Module()))


class _First(NamedTuple):
    """The run of the first of equal layers."""

    given: list[Tensor]
    ran: LayerRun
    saved: Mapping[int, int]


class RunOnce:
    """Runs the first of equal layers, and gives the others its run with new tensors.

    Attributes:
        first: for each layer that came, the number of the one whose run it has; counted from 0.
    """

    def __init__(self, run: RunLayer) -> None:
        self.first: list[int] = []
        self._run = run
        self._known: dict[Hashable, tuple[int, _First]] = {}
        self._numbers = count(-1, -1)  # of storages that nobody sees; no real one is negative

    def __call__(self, layer: Layer, given: Given) -> tuple[LayerRun, Mapping[int, int]]:
        """Returns what `run` returns."""
        tensors = tensors_of(given)
        key = structure(layer.module), _form(given)
        if None not in key and key in self._known:
            number, first = self._known[key]
            self.first.append(number)
            return self._again(first, tensors)
        ran, saved = self._run(layer, given)
        self._known[key] = len(self.first), _First(tensors, ran, saved)
        self.first.append(len(self.first))
        return ran, saved

    def _again(self, first: _First, given: list[Tensor]) -> tuple[LayerRun, Mapping[int, int]]:
        storages = {storage_id(a): storage_id(b) for a, b in zip(first.given, given, strict=True)}

        def renewed(tensor: Tensor) -> Tensor:
            for old, new in zip(first.given, given, strict=True):
                if storage_id(old) == storage_id(tensor):  # the layer hands its input on
                    return new if old.shape == tensor.shape else new.detach().view(tensor.shape)
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).requires_grad_(tensor.requires_grad)

        handed_on = tree_map_only(Tensor, renewed, first.ran.handed_on)
        made = zip(tensors_of(first.ran.handed_on), tensors_of(handed_on), strict=True)
        storages |= {storage_id(old): storage_id(new) for old, new in made}
        saved = {
            storages[old] if old in storages else next(self._numbers): nbytes
            for old, nbytes in first.saved.items()
        }
        return first.ran._replace(handed_on=handed_on), saved


def structure(module: nn.Module) -> Hashable:
    """Returns a value that is equal for modules that compute the same; None if that is not known.

    Modules are equal if their types, parameters' shapes and plain attributes are, and all other
    attributes are the same objects.
    """
    described: list[Hashable] = []
    for name, part in module.named_modules():
        hooks = [key for key, value in vars(part).items() if key.endswith("_hooks") and value]
        own = {key: value for key, value in vars(part).items() if key not in _OF_MODULE}
        attributes = tuple(sorted((key, _value(value)) for key, value in own.items()))
        if hooks or any(value is None for _, value in attributes):
            return None
        described.append((name, type(part), part.training, attributes))
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            described.append((name, tensor.shape, tensor.stride(), tensor.dtype))
            described.append(tensor.requires_grad)
    return tuple(described)


def _value(value: Any) -> str | None:
    """Returns an attribute as text, so that all can be sorted; None if it may not be compared."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list) and all(isinstance(item, _PLAIN) for item in value):
        return repr(value)
    if callable(value) and not isinstance(value, nn.Module):
        return f"object {id(value)}"
    return None


def _form(given: Given) -> Hashable:
    leaves, tree = tree_flatten(given)
    ids = [storage_id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        str(tree),
        tuple(ids.index(number) for number in ids),
        tuple(
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else repr(leaf)
            for leaf in leaves
        ),
    )
