"""State that a layer's forward changes, put back for the forward that a backward repeats.

A power iteration of `spectral_norm`, a codebook with moving averages, a counter: the second run of
such a layer must see what the first one saw, and must not change it again. Between the two, other
micro-batches may have run:

    F0: 5 -> 6    F1: 6 -> 7    B0: recomputes F0 from a copy of 5; 7 is back afterwards

Buffers, parameters and attributes are noted before each forward, and those that are others later
are put back. What changes in place needs a copy made before: all of a layer has one in its first
forward, and from then on what that forward has changed. Any other change in place is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase

from hybridtrain.devices import have_same_values
from hybridtrain.errors import ConfigError
from hybridtrain.graph import Layer, Segment

# What holds the attributes, buffers or parameters of a module, by name.
_Holder = MutableMapping[str, Any]
# The number of a module, what of it (a buffer, say), and the name.
_Place = tuple[int, str, str]

_MISSING = object()
_CONTAINERS = (list, dict, set, bytearray, deque, OrderedDict, defaultdict)
_IN_CONTAINER = "a tensor in its attribute"
# of nn.Module itself: tables of hooks, parameters and the like
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}


class _Copy(NamedTuple):
    """A tensor that a forward may change in place, and what it was before."""

    tensor: Tensor
    before: Tensor


class Snapshot(NamedTuple):
    """The state of a layer before one forward.

    Attributes:
        holders: what was in each; in the place of a tensor that changes in place a `_Copy`, of a
            container a shallow copy.
        copies: those of tensors, by identity.
        versions: how often each tensor had been changed in place.
    """

    holders: list[tuple[_Holder, dict[str, Any]]]
    copies: dict[int, _Copy]
    versions: list[tuple[_Place, Tensor, int]]


class LayerState:
    """Saves the state of one layer before a forward, and restores it for the recomputation.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Layer) -> None:
        self._name = layer.name
        self._parts = list(layer.module.modules())
        # PyTorch's own forwards set no attribute, and neither do those of graphs
        self._quiet = [
            isinstance(part, torch.jit.ScriptModule | GraphModule | Segment) or _is_of_torch(part)
            for part in self._parts
        ]
        self._mutated: set[_Place] = set()  # that a forward has changed
        self._is_first = True

    @contextmanager
    def of(self, snapshots: dict[int, Snapshot], index: int) -> Iterator[None]:
        """Surrounds a forward: the first saves `snapshots[index]`, the second runs from it."""
        if index in snapshots:
            with _restored(snapshots[index]):
                yield
            return
        snapshot = self._save(self._is_first)
        yield
        self._compare(snapshot, self._is_first)
        snapshots[index] = snapshot

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Surrounds a forward after which the layer is as it was before it."""
        snapshot = self._save(everything=True)
        try:
            yield
        finally:
            self._compare(snapshot, everything=True)
            for saved in snapshot.copies.values():
                saved.tensor.data.copy_(saved.before)
            for holder, name, _, before in _changes(snapshot):
                _put(holder, name, before.tensor if isinstance(before, _Copy) else before)

    def _save(self, everything: bool) -> Snapshot:
        snapshot = Snapshot([], {}, [])
        containers: dict[int, Any] = {}  # what is at two places has one copy
        for number, part in enumerate(self._parts):
            held: list[tuple[str, _Holder]] = [
                ("parameter", part._parameters),
                ("buffer", part._buffers),
            ]
            # running statistics change without a new version
            changing = "buffer" if isinstance(part, _NormBase) and part.training else ""
            if not self._quiet[number] or part._forward_pre_hooks or part._forward_hooks:
                held.append(("attribute", vars(part)))
            for kind, holder in held:
                values = _values(holder)
                snapshot.holders.append((holder, values))
                for name, value in values.items():
                    place = number, kind, name
                    if type(value) in _CONTAINERS:
                        values[name] = containers.setdefault(id(value), copy.copy(value))
                        snapshot.versions.extend(
                            ((number, _IN_CONTAINER, name), item, item._version)
                            for item in _tensors_in(value)
                        )
                    elif not isinstance(value, Tensor) or value.is_inference():
                        continue
                    elif value.grad_fn is not None:
                        # its graph would keep the micro-batch before, and that the one before it
                        values[name] = value.detach()
                    else:
                        snapshot.versions.append((place, value, value._version))
                        if everything or kind == changing or place in self._mutated:
                            if id(value) not in snapshot.copies:
                                saved = _Copy(value, value.detach().clone())
                                snapshot.copies[id(value)] = saved
                            values[name] = snapshot.copies[id(value)]
        return snapshot

    def _compare(self, before: Snapshot, everything: bool) -> None:
        """Notes what the forward has changed in place; drops the copies of everything else.

        Raises:
            ConfigError: there is no copy of it.
        """
        changed = {
            id(tensor) for _, tensor, version in before.versions if tensor._version != version
        }
        if everything:
            # A change through .data counts no version. Looking at the values waits for a GPU, and
            # is done in a layer's first forward only.
            self._is_first = False
            for number, saved in list(before.copies.items()):
                if number not in changed and have_same_values(*saved):
                    del before.copies[number]
                else:
                    changed.add(number)
            for _, values in before.holders:
                for name, value in values.items():
                    if isinstance(value, _Copy) and id(value.tensor) not in changed:
                        values[name] = value.tensor
        for place, tensor, _ in before.versions if changed else ():
            _, kind, name = place
            if id(tensor) not in changed:
                continue
            if kind == _IN_CONTAINER or id(tensor) not in before.copies:
                raise ConfigError(
                    f"layer {self._name!r} has changed {kind} {name!r} in place in its forward, "
                    f"which cannot be undone for the recomputation: leave the layer out of "
                    f"checkpoint=, or change it from the first forward on, as a registered buffer"
                )
            self._mutated.add(place)


@contextmanager
def _restored(snapshot: Snapshot) -> Iterator[None]:
    """Makes a layer what it was before a forward, until the end of the block."""
    swapped: list[tuple[nn.Parameter, Tensor]] = []
    changes = list(_changes(snapshot))
    for holder, name, _, before in changes:
        if isinstance(before, _Copy):
            tensor, before = before
            if isinstance(tensor, nn.Parameter):  # the same object, so that it gets the gradient
                swapped.append((tensor, tensor.data))
                tensor.data, before = before, tensor
        _put(holder, name, before)
    try:
        yield
    finally:
        for tensor, data in reversed(swapped):
            tensor.data = data
        for holder, name, now, _ in changes:
            _put(holder, name, now)


def _changes(snapshot: Snapshot) -> Iterator[tuple[_Holder, str, Any, Any]]:
    """Yields what is another object or has other contents: holder, name, now and before."""
    for holder, values in snapshot.holders:
        present = _values(holder)
        if present.keys() == values.keys() and all(map(is_, present.values(), values.values())):
            continue
        for name in {**values, **present}:
            now, before = present.get(name, _MISSING), values.get(name, _MISSING)
            same_container = type(before) in _CONTAINERS and _contents(now) == _contents(before)
            if now is not before and not same_container:
                yield holder, name, now, before


def _values(holder: _Holder) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if name not in _OWN_ATTRIBUTES}


def _contents(value: Any) -> list[int] | None:
    """Returns the identities of a container's items; None: it is not one."""
    if type(value) not in _CONTAINERS:
        return None
    return [*map(id, value), *(map(id, value.values()) if isinstance(value, dict) else ())]


def _is_of_torch(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.nn.modules.")


def _tensors_in(container: Any) -> list[Tensor]:
    if isinstance(container, bytearray):
        return []
    items = container.values() if isinstance(container, dict) else container
    return [item for item in items if isinstance(item, Tensor) and not item.is_inference()]


def _put(holder: _Holder, name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
