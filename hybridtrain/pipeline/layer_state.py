"""State that a layer's forward changes, put back for the forward that a backward repeats.

A power iteration of `spectral_norm`, a codebook with moving averages, a counter: the second run of
such a layer must see what the first one saw, and must not change it again. Between the two, other
micro-batches may have run:

    F0: 5 -> 6    F1: 6 -> 7    B0: recomputes F0 from a copy of 5; 7 is back afterwards

All of a layer is looked at in its first forward. From then on what has changed once is copied
before each forward, and the rest is only compared: attributes by identity, tensors by version.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, MutableMapping, ValuesView
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from hybridtrain.errors import ConfigError
from hybridtrain.graph.layer import Layer
from hybridtrain.graph.segment import Segment

# What holds the attributes, buffers or parameters of a module, by name.
_Holder = MutableMapping[str, Any]

_Place = tuple[int, str]  # the number of the holder, and the name there

_MISSING = object()
_version = attrgetter("_version")
_CONTAINERS = (list, dict, set, bytearray, deque, OrderedDict, defaultdict)
# of nn.Module itself: tables of hooks, parameters and the like
_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))


class Snapshot(NamedTuple):
    """The state of a layer before one forward.

    Attributes:
        places: where each value was.
        values: the attributes, buffers and parameters.
        tensors: those, and those in containers, of which an operation in place is noticed.
        versions: how often each of them had been changed in place.
        copies: of tensors and containers that the forward may change in place, by identity.
    """

    places: list[_Place]
    values: list[Any]
    tensors: list[Tensor]
    versions: list[int]
    copies: dict[int, Any]


class _ScriptTensors(MutableMapping[str, Any]):
    """The buffers of a module of TorchScript, which has them elsewhere."""

    def __init__(self, module: torch.jit.ScriptModule, names: list[str]) -> None:
        self._module = module
        self._names = names

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class LayerState:
    """Saves the state of one layer before a forward, and restores it for the recomputation.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Layer) -> None:
        self._name = layer.name
        parts = list(layer.module.modules())
        # in training their output does not depend on what they update: a copy is enough
        self._norms = [part for part in parts if _is_plain_norm(part)]
        plain = {id(part) for part in self._norms}
        self._holders: list[_Holder] = []
        self._kinds: list[str] = []
        self._views: list[ValuesView[Any]] = []
        self._quiet: list[nn.Module] = []
        for part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                self._add(
                    _ScriptTensors(part, [name for name, _ in part._buffers.items()]), "buffer"
                )
                continue
            if id(part) not in plain:
                self._add(part._buffers, "buffer")
            self._add(part._parameters, "parameter")
            if isinstance(part, GraphModule | Segment):
                continue
            if _is_of_torch(part) and not part._forward_pre_hooks and not part._forward_hooks:
                self._quiet.append(part)  # PyTorch's own forwards set no attribute
            else:
                self._add(vars(part), "attribute")
        # the places that a forward has changed
        self._replaced: set[_Place] = set()
        self._changed_in_place: set[_Place] = set()
        self._is_first = True
        self._index(list(chain.from_iterable(self._views)))

    def _add(self, holder: _Holder, kind: str) -> None:
        self._holders.append(holder)
        self._kinds.append(kind)
        self._views.append(holder.values())

    @contextmanager
    def of(self, snapshots: dict[int, Snapshot], index: int) -> Iterator[None]:
        """Surrounds a forward: the first saves `snapshots[index]`, the second runs from it."""
        if index in snapshots:
            with self._restored(snapshots[index]):
                yield
            return
        snapshot = self._save()
        yield
        self._compare(snapshot)
        snapshots[index] = snapshot

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Surrounds a forward after which the layer is as it was before it."""
        self._is_first = True  # everything is copied
        snapshot = self._save()
        tracked = [b for norm in self._norms for b in norm._buffers.values() if b is not None]
        copies = [buffer.clone() for buffer in tracked]
        try:
            yield
        finally:
            self._compare(snapshot)
            for buffer, own in zip(tracked, copies, strict=True):
                buffer.data.copy_(own)
            values = dict(zip(snapshot.places, snapshot.values, strict=True))
            for number, name in sorted(self._replaced | self._changed_in_place):
                before = values.get((number, name), _MISSING)
                saved = snapshot.copies.get(id(before))
                if isinstance(saved, Tensor) and saved is not before:
                    before.data.copy_(saved)
                elif saved is not None:
                    before = saved
                _put(self._holders[number], name, before)

    def _index(self, values: list[Any]) -> None:
        """Notes what is where, for as long as the same objects are there."""
        self._indexed = values
        self._places = [
            (number, name) for number, holder in enumerate(self._holders) for name in holder
        ]
        self._graphs: list[int] = []
        self._tensors: list[Tensor] = []
        self._containers: list[Any] = []
        for position, ((_, name), value) in enumerate(zip(self._places, values, strict=True)):
            if isinstance(value, Tensor):
                if is_lazy(value) or value.is_inference():
                    continue
                if value.grad_fn is None:
                    self._tensors.append(value)
                else:
                    self._graphs.append(position)
            elif type(value) in _CONTAINERS and name not in _OWN_ATTRIBUTES:
                self._containers.append(value)
        self._copied = [
            value
            for place, value in zip(self._places, values, strict=True)
            if isinstance(value, Tensor) and place in self._changed_in_place
        ]

    def _save(self) -> Snapshot:
        for part in self._quiet:
            if part._forward_pre_hooks or part._forward_hooks:  # registered since
                self._quiet = [one for one in self._quiet if one is not part]
                self._add(vars(part), "attribute")
        values = list(chain.from_iterable(self._views))
        if not _identical(values, self._indexed):
            self._index(values)
        tensors, copies = self._tensors, {}
        if self._graphs:
            values = values.copy()
            for position in self._graphs:
                # its graph would keep the micro-batch before, and that the one before it
                values[position] = own = values[position].detach()
                copies[id(own)] = own
        if self._containers:
            tensors = [*tensors, *chain.from_iterable(map(_tensors_in, self._containers))]
            copies.update((id(one), copy.copy(one)) for one in self._containers)
        for tensor in self._tensors if self._is_first else self._copied:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
        return Snapshot(self._places, values, tensors, list(map(_version, tensors)), copies)

    def _compare(self, before: Snapshot) -> None:
        """Notes what the forward has changed.

        Raises:
            ConfigError: it was changed in place, and there is no copy of it.
        """
        values = list(chain.from_iterable(self._views))
        replaced = not _identical(values, before.values)
        versions = list(map(_version, before.tensors))
        in_place = versions != before.versions
        if not (replaced or in_place or self._is_first or self._containers):
            return
        if replaced:
            self._index(values)
            was = dict(zip(before.places, before.values, strict=True))
            now = dict(zip(self._places, values, strict=True))
            self._replaced |= {
                place
                for place in was.keys() | now.keys()
                if was.get(place, _MISSING) is not now.get(place, _MISSING)
            }
        changed = {
            id(tensor)
            for tensor, version, old in zip(before.tensors, versions, before.versions, strict=True)
            if version != old
        }
        if self._is_first:
            self._is_first = False
            # A change through .data counts no version. Looking at the values waits for a GPU, and
            # is done in a layer's first forward only.
            for tensor in before.tensors:
                own = before.copies.get(id(tensor))
                if own is not None and (id(tensor) in changed or not _equal(tensor, own)):
                    changed.add(id(tensor))
                else:
                    before.copies.pop(id(tensor), None)
        for place, value in zip(before.places, before.values, strict=True):
            own = before.copies.get(id(value))
            if id(value) in changed:
                if own is None:
                    raise self._refusal(f"{self._kinds[place[0]]} {place[1]!r}")
                self._changed_in_place.add(place)
            elif own is not None and not isinstance(value, Tensor):
                if any(id(tensor) in changed for tensor in _tensors_in(value)):
                    raise self._refusal(f"a tensor in its attribute {place[1]!r}")
                if not _same_items(value, own):
                    self._changed_in_place.add(place)
        self._indexed = []  # what is copied may have changed

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"layer {self._name!r} has changed {what} in place in its forward, which cannot be "
            f"undone for the recomputation: leave the layer out of checkpoint=, or change it from "
            f"the first forward on, as a registered buffer"
        )

    @contextmanager
    def _restored(self, snapshot: Snapshot) -> Iterator[None]:
        present: list[tuple[_Holder, str, Any]] = []
        swapped: list[tuple[Tensor, Tensor]] = []
        places = self._replaced | self._changed_in_place
        values = dict(zip(snapshot.places, snapshot.values, strict=True)) if places else {}
        for number, name in sorted(places):
            holder, before = self._holders[number], values.get((number, name), _MISSING)
            own = snapshot.copies.get(id(before))
            if own is not None and isinstance(before, nn.Parameter):
                # the same object, so that it gets the gradient
                swapped.append((before, before.data))
                before.data = own
            elif own is not None:
                before = own
            present.append((holder, name, holder.get(name, _MISSING)))
            _put(holder, name, before)
        for norm in self._norms:
            if norm.training and norm.track_running_stats:
                for name, buffer in norm._buffers.items():
                    present.append((norm._buffers, name, buffer))
                    # not None, which would save fewer tensors than the first run did
                    norm._buffers[name] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            for parameter, data in swapped:
                parameter.data = data
            for holder, name, value in present:
                _put(holder, name, value)


def _is_of_torch(part: nn.Module) -> bool:
    return type(part).__module__.startswith("torch.nn.modules.")


def _is_plain_norm(part: nn.Module) -> bool:
    return isinstance(part, _NormBase) and _is_of_torch(part)


def _tensors_in(container: Any) -> list[Tensor]:
    if isinstance(container, bytearray):
        return []
    items = container.values() if isinstance(container, dict) else container
    return [item for item in items if isinstance(item, Tensor) and not item.is_inference()]


def _equal(one: Tensor, other: Tensor) -> bool:
    # as bytes, so that a NaN equals itself
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta:  # another process has it, and an alias stands for it
        return other.is_meta
    return torch.equal(one, other) or bool(((one == other) | (one != one) & (other != other)).all())


def _same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return _identical(one, other) and _identical(one.values(), other.values())
    if isinstance(one, bytearray | set):
        return bool(one == other)
    return _identical(one, other)


def _identical(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _put(holder: _Holder, name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
