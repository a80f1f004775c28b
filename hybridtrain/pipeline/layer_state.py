"""State that a stage's forwards change, restored for recomputation in the backward.

Examples are the power iteration of `spectral_norm`, a codebook with moving averages, or a counter.
The second run of a layer must see the same state as the first run, and must not change it again. In
between, other micro-batches may have run:

    F0: 5 -> 6    F1: 6 -> 7    B0: recomputes F0 from a copy of 5; 7 is restored afterwards

State belongs to the stage, because one layer may read a tensor that another layer changes. Before
each piece that will be recomputed (a whole stage or a layer), a `Snapshot` records its buffers,
parameters and attributes, with copies of the tensors that some forward of the stage changes in
place. The first steps determine these tensors: all tensors of each layer are copied and compared
around its forward. If a tensor changes for the first time, snapshots that wait for their backward
lack it, so its copy is added to all of them.

Objects in attributes (nested containers, objects with attributes of their own, NumPy arrays) are
found in the same way, and their contents swapped in place for the recomputation. Objects that no
attribute of the layer leads to, such as globals, are not restored.

A later in-place change of a tensor without a copy is refused if PyTorch increments its version.
`recomputation_proof` covers everything else that a layer depends on.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase

from hybridtrain._base.contents import Contents, contents_of, exchanged, has_changed
from hybridtrain._base.tensors import have_same_values, put_values, storage_id
from hybridtrain.errors import ConfigError, argument
from hybridtrain.graph import Layer
from hybridtrain.pipeline.tensor_digest import digest

# The attributes, buffers or parameters of a module, by name.
_Holder = MutableMapping[str, Any]
# The identity of a module, the kind of the tensor (a buffer, say), and its name.
_Place = tuple[int, str, str]

_MISSING = object()
_CONTAINERS = (list, dict, set, bytearray, deque, OrderedDict, defaultdict)
# attributes of nn.Module itself, such as tables of hooks and parameters
_OWN_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}


class Change(NamedTuple):
    """A tensor that a layer's forward changes in place.

    Attributes:
        layer: the name of the layer.
        kind: parameter, buffer or attribute.
        name: the name of the tensor in its module.
        shape: the shape of the tensor.
    """

    layer: str
    kind: str
    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"layer {self.layer!r} changes its {self.kind} {self.name!r} in its forward"


class _Copy(NamedTuple):
    """A tensor that a forward changes in place, and its values before."""

    tensor: Tensor
    before: Tensor


class Snapshot:
    """The state before a forward.

    Attributes:
        holders: the values in each holder; a container is replaced by a shallow copy.
        parts: the module of each holder.
        copies: copies of the tensors that change in place, by identity.
        versions: the version counter of each tensor.
        generators: the states of generators.
        contents: the contents of the objects in attributes that forwards change, by module and
            attribute.
    """

    def __init__(self) -> None:
        self.holders: list[tuple[_Holder, dict[str, Any]]] = []
        self.parts: list[nn.Module] = []
        self.copies: dict[int, _Copy] = {}
        self.versions: list[tuple[_Place, Tensor, int]] = []
        self.generators: list[tuple[torch.Generator, Tensor]] = []
        self.contents: dict[tuple[int, str], Contents] = {}


class LayersCopy(NamedTuple):
    """A copy of the state of layers; see `StageState.copied`.

    Attributes:
        snapshot: the values in each holder, without copies of tensors.
        tensors: the copied tensors, with their copies.
    """

    snapshot: Snapshot
    tensors: list[tuple[Tensor, Tensor]]


class StageState:
    """Saves the state of a stage's layers before a forward, and restores it for a recomputation.

    Attributes:
        changes: the tensors that forwards change in place, as seen by `watched`.
        uncounted: tensors that change without a new version, by `storage_id`.

    Args:
        layers: the layers of the stage.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.changes: dict[_Place, Change] = {}
        self.uncounted: dict[int, Change] = {}
        self._names = [layer.name for layer in layers]
        self._parts = [list(layer.module.modules()) for layer in layers]
        # neither PyTorch's own forwards nor forwards of graphs set attributes
        self._quiet = {
            id(part): isinstance(part, torch.jit.ScriptModule | GraphModule)
            or type(part).__module__.startswith("torch.nn.modules.")
            for parts in self._parts
            for part in parts
        }
        # Weak: a snapshot ends with the graph of its micro-batch, also in a failed step.
        self._open: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        # modules and attributes with objects that forwards change, beyond a flat container
        self._objects: set[tuple[int, str]] = set()

    def save(self, layers: Iterable[int]) -> Snapshot:
        """Returns the present state of the layers of these positions in the stage."""
        snapshot = Snapshot()
        same: dict[int, Any] = {}  # a container or generator at two places is copied once
        for kind, part, holder in self._holders(layers):
            values = _values(holder)
            snapshot.holders.append((holder, values))
            snapshot.parts.append(part)
            # running statistics change without a new version
            unseen = kind == "buffer" and isinstance(part, _NormBase) and part.training
            for name, value in values.items():
                if (id(part), name) in self._objects:
                    snapshot.contents[id(part), name] = contents_of(value)
                if type(value) in _CONTAINERS:
                    values[name] = same.setdefault(id(value), copy.copy(value))
                elif isinstance(value, torch.Generator):
                    if same.setdefault(id(value), value) is value:
                        snapshot.generators.append((value, value.get_state()))
                elif not _has_values(value):
                    continue
                elif value.grad_fn is not None:
                    # its graph would keep the previous micro-batches alive, one after another
                    values[name] = value.detach()
                else:
                    place = id(part), kind, name
                    snapshot.versions.append((place, value, value._version))
                    if (unseen or place in self.changes) and id(value) not in snapshot.copies:
                        # Only tensors that are known to change: copies of all would take the memory
                        # of the model per micro-batch.
                        snapshot.copies[id(value)] = _Copy(value, value.detach().clone())
        self._open.add(snapshot)
        return snapshot

    @contextmanager
    def restored(self, snapshot: Snapshot) -> Iterator[None]:
        """Restores the state of a snapshot for the duration of the block.

        Raises:
            ConfigError: a tensor without a copy was changed in place after the snapshot.
        """
        for place, tensor, version in snapshot.versions:
            if tensor._version != version and id(tensor) not in snapshot.copies:
                _, kind, name = place
                raise ConfigError(
                    f"layer {self._layer_with(place)!r} has changed {kind} {name!r} in place in "
                    "its forward, which cannot be undone for the recomputation: exclude the layer "
                    f"from {argument('recompute')}, or use a registered buffer and change it from "
                    "the first forward on"
                )
        # From here on its copies are what the recomputation changes: no new copy must be added.
        self._open.discard(snapshot)
        swapped: list[tuple[nn.Parameter, Tensor]] = []
        # Read before anything is put back, since it compares with the present values.
        changes = list(_changes(snapshot))
        present = [(generator, generator.get_state()) for generator, _ in snapshot.generators]
        for generator, state in snapshot.generators:
            generator.set_state(state)
        contents = [exchanged(before) for before in snapshot.contents.values()]
        for holder, name, _, before in changes:
            if isinstance(before, _Copy):
                tensor, before = before
                if isinstance(tensor, nn.Parameter):  # the same object: it gets the gradient
                    if all(tensor is not other for other, _ in swapped):
                        swapped.append((tensor, tensor.data))
                        # `.data`, because autograd must neither record it nor see a new version.
                        tensor.data = before
                    before = tensor
            _put(holder, name, before)
        try:
            yield
        finally:
            for tensor, data in reversed(swapped):
                tensor.data = data
            # Afterwards, what the recomputation itself has changed is lost: the first run has
            # changed it already.
            for holder, name, now, _ in changes:
                _put(holder, name, now)
            # In reverse: an object may contain another one.
            for now in reversed(contents):
                exchanged(now)
            for generator, state in present:
                generator.set_state(state)

    @contextmanager
    def undone(self, layer: int) -> Iterator[None]:
        """Restores the state of a layer after a forward in the block."""
        state = self.copied([layer], ("parameter", "buffer", "attribute"))
        try:
            yield
        finally:
            self.put_back(state)

    def copied(self, layers: Iterable[int] | None, kinds: Collection[str]) -> LayersCopy:
        """Returns a copy of the state of layers, by their positions in the stage; None: of all."""
        positions = range(len(self._parts)) if layers is None else list(layers)
        snapshot = self.save(positions)
        self._open.discard(snapshot)
        # `tensors` has a copy of each; `_changes` must only give what has another identity.
        snapshot.copies.clear()
        tensors = {
            key: tensor
            for position in positions
            for key, ((_, kind, _), tensor, _) in self._tensors(position).items()
            if kind in kinds
        }
        copies = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
        return LayersCopy(snapshot, copies)

    def put_back(self, state: LayersCopy) -> None:
        """Restores the layers' state from the copy `state`."""
        for tensor, before in state.tensors:
            put_values(tensor, before)
        for holder, name, _, before in _changes(state.snapshot):
            _put(holder, name, before)
        for generator, generator_state in state.snapshot.generators:
            generator.set_state(generator_state)

    @contextmanager
    def watched(
        self, layer: int, late: bool, copies: bool, tied: Collection[int]
    ) -> Iterator[None]:
        """Records which tensors of a layer its forward changes in place.

        A change through `.data` does not increment the version, so this compares values. This waits
        for a GPU and takes time, so only some steps do it.

        Args:
            layer: its position in the stage.
            late: whether steps without `watched` have run before.
            copies: whether a snapshot may need a copy; otherwise, digests are compared.
            tied: the identities of parameters that stages share.

        Raises:
            ConfigError: a parameter that stages share changes; or a new change has no version and
                `late` is set, so earlier steps may have recomputed from a wrong state.
        """
        before = self._tensors(layer)
        # Before the forward, of all tensors of the layer: which ones change is not known yet.
        saved = {key: tensor.detach().clone() for key, (_, tensor, _) in before.items() if copies}
        # Without recomputation no values are needed again, and a digest takes no memory.
        digests = {key: digest(tensor) for key, (_, tensor, _) in before.items() if not copies}
        contents = self._contents(layer) if copies else {}
        yield
        self._note_objects(contents)
        for key, (place, tensor, version) in before.items():
            # Both are compared: a version also counts a change that puts the same values back.
            counted = tensor._version != version
            if copies:
                is_same = have_same_values(tensor, saved[key])
            else:
                is_same = _same(digest(tensor), digests[key])
            if is_same and not counted:
                continue
            _, kind, name = place
            change = Change(self._names[layer], kind, name, tuple(tensor.shape))
            if key in tied:
                raise ConfigError(
                    f"{change}, which several stages use: they run concurrently, and would see its "
                    f"values for other micro-batches. Change it between steps, or do not share a "
                    f"parameter with this layer (Embedding(max_norm=...), for example, changes its "
                    f"weight)"
                )
            if late and not counted and place not in self.changes and len(self._open):
                raise ConfigError(
                    f"{change} through .data, but did not in the first steps: steps since the last "
                    "comparison may have been recomputed from a different state. Exclude the "
                    f"layer from {argument('recompute')}, or change the tensor under "
                    "torch.no_grad() instead of through .data"
                )
            if not counted:
                self.uncounted[storage_id(tensor)] = change
            # all layers that have the tensor
            for other, part, holder in self._holders(range(len(self._parts))):
                for key_there, value in _values(holder).items():
                    if value is tensor:
                        # Each place has its own entry, because snapshots are saved by place.
                        self.changes.setdefault((id(part), other, key_there), change)
            self.changes.setdefault(place, change)
            for snapshot in self._open if copies else ():
                if any(tensor is held for _, held, _ in snapshot.versions):
                    # a recomputation changes its snapshot's copy, so each has one of its own
                    snapshot.copies.setdefault(key, _Copy(tensor, saved[key].clone()))

    def _contents(self, layer: int) -> dict[tuple[int, str], Contents]:
        """Returns the contents of objects in the attributes of a layer's modules."""
        return {
            (id(part), name): contents
            for kind, part, holder in self._holders([layer])
            if kind == "attribute"
            for name, value in _values(holder).items()
            if (contents := contents_of(value))
        }

    def _note_objects(self, contents: Mapping[tuple[int, str], Contents]) -> None:
        """Notes objects that a forward has changed, also in snapshots that wait for a backward."""
        for place, before in contents.items():
            if has_changed(before):
                self._objects.add(place)
                for snapshot in self._open:
                    if any(id(part) == place[0] for part in snapshot.parts):
                        snapshot.contents.setdefault(place, before)

    def change_of(self, message: str) -> Change | None:
        """Returns the change that a PyTorch error refers to, by the tensor shape in its message."""
        changes = [change for change in self.changes.values() if change.kind != "attribute"]
        named = [change for change in changes if str(list(change.shape)) in message]
        return next(iter(named or changes), None)

    def _tensors(self, layer: int) -> dict[int, tuple[_Place, Tensor, int]]:
        """Returns all tensors of a layer by identity, with their places and versions."""
        return {
            id(value): ((id(part), kind, name), value, value._version)
            for kind, part, holder in self._holders([layer])
            for name, value in _values(holder).items()
            if _has_values(value) and value.grad_fn is None
        }

    def _holders(self, layers: Iterable[int]) -> Iterator[tuple[str, nn.Module, _Holder]]:
        """Yields each table of the layers' values once: kind of value, module, table."""
        seen: set[int] = set()
        for layer in layers:
            for part in self._parts[layer]:
                if id(part) in seen:
                    continue
                seen.add(id(part))
                yield "parameter", part, part._parameters
                yield "buffer", part, part._buffers
                # a module's dictionary has the alias of a parameter that stages share
                aliases = part._parameters.keys() & vars(part).keys()
                if aliases and self._quiet[id(part)]:
                    yield "parameter", part, {name: vars(part)[name] for name in aliases}
                if not self._quiet[id(part)] or part._forward_pre_hooks or part._forward_hooks:
                    yield "attribute", part, vars(part)

    def _layer_with(self, place: _Place) -> str:
        return next(
            name
            for name, parts in zip(self._names, self._parts, strict=True)
            if any(id(part) == place[0] for part in parts)
        )


def _changes(snapshot: Snapshot) -> Iterator[tuple[_Holder, str, Any, Any]]:
    """Yields values with changed identity or contents: holder, name, current, previous."""
    copies = snapshot.copies
    for holder, values in snapshot.holders:
        present = _values(holder)
        is_same = present.keys() == values.keys() and all(
            map(is_, present.values(), values.values())
        )
        if is_same and (not copies or not any(id(value) in copies for value in values.values())):
            continue
        for name in {**values, **present}:
            now, before = present.get(name, _MISSING), values.get(name, _MISSING)
            # By `is` in the next line, because the identity of a tensor that is gone may be another
            # one's.
            saved = copies.get(id(before))
            if saved is not None and saved.tensor is before:
                yield holder, name, now, saved
                continue
            # A container was copied when it was saved, so its identity differs anyway.
            same_container = type(before) in _CONTAINERS and _contents(now) == _contents(before)
            if now is not before and not same_container:
                yield holder, name, now, before


def _has_values(value: Any) -> bool:
    """Returns whether `value` is a tensor of this process that may change in place."""
    return isinstance(value, Tensor) and not value.is_inference() and not value.is_meta


def _values(holder: _Holder) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if name not in _OWN_ATTRIBUTES}


def _contents(value: Any) -> list[int] | None:
    """Returns the identities of a container's items; None if `value` is not a container."""
    if type(value) not in _CONTAINERS:
        return None
    return [*map(id, value), *(map(id, value.values()) if isinstance(value, dict) else ())]


def _same(first: Tensor | None, other: Tensor | None) -> bool:
    return first is None or other is None or torch.equal(first, other)


def _put(holder: _Holder, name: str, value: Any) -> None:
    if value is _MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value
