"""The values of earlier stages, as a stage uses them: its own names, its own device.

    stage 0      x ── used by stage 2 ──> x' (a name of stage 1) ──> x'' (a name of stage 2)

`glue` explains how a value is cut and why a name is made in each stage on the way. Here is what a
trip notes for it: which stage made a tensor, the names so far, copies on other devices, and changes
in place that a name cannot see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.tensors import storage_id, version_of
from hybridtrain._base.torch_private import move_hooks, number_of_node
from hybridtrain.errors import SplitError
from hybridtrain.pipeline.autograd_graph import nodes_from
from hybridtrain.pipeline.forward.glue import (
    GRADIENT_OVER_CUT,
    PLAIN,
    Cut,
    CutValue,
    Glue,
    copied,
)

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.places import LayerPlace, Place


class Model(NamedTuple):
    """What trips know of the model.

    Attributes:
        net: the module.
        places: the places of each module, one for each of its calls, by the `id` of the module.
        owners: the stage that owns each parameter, by the parameter's `id`.
        devices: the device of each stage.
        look_inside: the layers, by index, that use values of earlier stages besides their
            arguments, such as a weight that an earlier stage owns.
        cut_leaf: for each stage, a leaf that makes autograd record its cuts.
        moves: whether the stages are on several devices, so that values must be copied.
        names: the names of parameters and buffers, by their `id`.
        containers: the modules, by name, that layers are in; the model itself among them.
        recast: the names of parameters that a later stage uses under autocast, and so casts again.
        is_lazy: whether the products of the head are lazy, see `head`.
    """

    net: nn.Module
    places: Mapping[int, Sequence[Place]]
    owners: Mapping[int, int]
    devices: Sequence[torch.device]
    look_inside: set[int]
    cut_leaf: Sequence[Tensor]
    moves: bool
    names: Mapping[int, str]
    containers: Mapping[str, nn.Module]
    recast: set[str]
    is_lazy: bool


def _changed_through_view(tensor: Tensor) -> str:
    return (
        f"a value of shape {tuple(tensor.shape)} of an earlier stage is changed in place through "
        "another view of it: change a copy (.clone()), or cut elsewhere"
    )


class _Copies:
    """A value that needs no gradient, on several devices.

    Attributes:
        source: the value as the forward knows it.
        values: its equal copies; the one that was used last is at the end.
        version: the version counter of the last, when it was taken.
        is_changed: whether a stage has changed its copy in place.
    """

    __slots__ = ("is_changed", "source", "values", "version")

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.values = [source]
        self.version = version_of(source)
        self.is_changed = False

    def on(self, device: torch.device) -> Tensor:
        """Returns the value on a device, copied there unless an equal copy is there."""
        # The copy that was used last: only the stage that runs can have changed it.
        last = self.values[-1]
        if self.has_changed:
            self.is_changed = True
            self.values = [last]
        equal = next((value for value in self.values if value.device == device), None)
        value = copied(last, device) if equal is None else equal
        self.values = [other for other in self.values if other is not value]
        self.values.append(value)
        self.version = version_of(value)
        return value

    @property
    def has_changed(self) -> bool:
        """Whether the stage that took the last copy has changed it since."""
        return version_of(self.values[-1]) != self.version


class StageValues:
    """The values of the stages of one micro-batch.

    Args:
        model: the model.
        trains: whether a backward follows.
        learns: look inside all layers, to find those that use values of earlier stages besides
            their arguments.

    Attributes:
        stage: the stage in which the forward is.
        layer: the layer in which it is; None between layers.
        is_in_forward: False before and after the forward.
        is_cut: whether there are several stages; in a single one, no value is of another.
    """

    @cached_property
    def glue(self) -> Glue:
        """Sees the operations between layers; a model in one stage needs none."""
        raise NotImplementedError

    def __init__(self, model: Model, trains: bool, learns: bool) -> None:
        self.stage = 0
        self.layer: LayerPlace | None = None
        self.is_in_forward = False
        self._model = model
        self._cuts = trains
        self._learns = learns
        self._is_in_head = False
        self._starts: list[int] = []  # the first node number of each stage so far
        # of tensors whose node does not say it, other than parameters: stage and tensor
        self._stages: dict[int, tuple[int, Tensor]] = {}
        self._aliases: list[dict[int, CutValue]] = [{}]
        self.is_cut = len(model.devices) > 1
        if self.is_cut:
            self._aliases = [{} for _ in model.devices]
        self._copies: dict[int, _Copies] = {}  # by the `id` of the source
        # the last stage that has changed the memory of an earlier stage in place, by `storage_id`
        self._changed: dict[int, int] = {}

    @property
    def looks(self) -> bool:
        """True where an operation may use a value of an earlier stage."""
        if not self.stage:
            return False
        return (self._cuts and torch.is_grad_enabled()) or self._model.moves

    def looks_inside(self, layer: int) -> bool:
        """Returns whether a layer is known, or not yet known, to use values of earlier stages."""
        return (self._learns or layer in self._model.look_inside) and self.looks

    @property
    def looks_in_functions(self) -> bool:
        """The same for custom autograd functions, which modes do not see."""
        inside = self.layer is not None and not self.looks_inside(self.layer.number)
        return self.is_in_forward and not inside and self.looks

    def cut_all(self, tree: Any) -> Any:
        """Returns a pytree with each tensor of an earlier stage replaced by this stage's own."""
        if not self._has_foreign(tree.values() if type(tree) is dict else tree):
            return tree
        return tree_map_only(Tensor, self.cut, tree)

    def cut(self, tensor: Tensor) -> Tensor:
        """Returns this stage's own name of a tensor, which is the tensor itself if it is its own.

        Shared by all uses in the stage, and copied to the stage's device once.
        """
        # Without a gradient nothing leads back into an earlier graph; only the device matters.
        if not (self._cuts and tensor.requires_grad and torch.is_grad_enabled()):
            return self._on_device(tensor) if self._model.moves else tensor
        if not self._is_earlier(tensor):
            return tensor
        if self._is_in_head and self._is_of_head(tensor):
            self.note_own(tensor)
            return tensor
        if self.layer is not None:
            self._model.look_inside.add(self.layer.number)
        # Reading `requires_grad` or `grad_fn` would be seen by the mode, and cut again.
        with self.glue.off():
            source, last = tensor, self._stage_of(tensor)
            # In every stage on the way, also in those that do not use it: see `glue`.
            for stage in range(last + 1, self.stage + 1):
                alias = self._aliases[stage].get(id(tensor))
                if alias is None:
                    self._check_memory(source, last)
                    if not tensor.requires_grad:  # an earlier stage has detached it in place
                        return self._on_device(tensor) if self._model.moves else tensor
                    if tensor.is_leaf and torch.is_autocast_enabled(tensor.device.type):
                        self._model.recast.add(self._model.names.get(id(tensor), ""))
                    # The alias holds `tensor` as its source, so that the id stays its own.
                    alias = self._aliases[stage][id(tensor)] = CutValue(tensor)
                    devices = self._model.devices
                    to = devices[stage] if tensor.device in devices else tensor.device
                    # After it is in the table: `Cut.forward` reads its source.
                    alias.value = Cut.apply(self._model.cut_leaf[stage], self, alias, to)
                    alias.version, alias.node = alias.value._version, alias.value.grad_fn
                tensor, last = alias.value, stage
        return tensor

    def note_own(self, *values: Any) -> None:
        """Notes values as this stage's: inputs, and those that another thread has made, whose nodes
        do not say it."""
        for value in values:
            kind = type(value)
            for leaf in (value,) if kind is Tensor or kind in PLAIN else tree_leaves(value):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    # With the tensor, or its id could become another's.
                    self._stages[id(leaf)] = self.stage, leaf

    def check_hook(self, tensor: Tensor) -> None:
        """Refuses a hook that a stage sets on a parameter of an earlier one.

        Raises:
            SplitError: the backward of another micro-batch may run the hook, or not.
        """
        if id(tensor) in self._model.owners and self._is_earlier(tensor):
            raise SplitError(
                f"the forward sets a hook on {self._model.names.get(id(tensor))!r} in stage "
                f"{self.stage}, but the parameter belongs to stage {self._stage_of(tensor)}, which "
                "runs at the same time: set the hook once, before the training"
            )

    def _is_of_head(self, tensor: Tensor) -> bool:
        """Returns whether the head has made a tensor in a thread of its own, which numbers nodes by
        itself: then its graph leads to values that the last stage has taken."""
        aliases = self._aliases[self.stage]
        if tensor.grad_fn is None or not aliases or id(tensor) in aliases:
            return False
        taken = {alias.node for alias in aliases.values()}
        return any(node in taken for node in nodes_from([tensor]))

    def with_whole_gradient(self, tensor: Tensor) -> Tensor:
        """Returns the name of a tensor whose node gets the gradients of all stages.

        It is the tensor itself, or the name in the last stage that has changed it in place.
        """
        whole = tensor
        for of_stage in self._aliases[self._stage_of(tensor) + 1 : self.stage + 1]:
            alias = of_stage.get(id(tensor))
            if alias is None:
                break
            tensor = alias.value
            if tensor.grad_fn is not alias.node:
                whole = tensor
        return whole

    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the device on which this stage has a tensor."""
        is_moved = self._model.moves and tensor.device in self._model.devices
        return self._model.devices[self.stage] if is_moved else tensor.device

    def check_inner_gradient(self, inputs: Any) -> None:
        """Refuses a gradient that the forward takes with respect to a value of another stage."""
        for leaf in tree_leaves(inputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad and self._is_earlier(leaf):
                raise SplitError(GRADIENT_OVER_CUT)

    def _has_foreign(self, values: Any) -> bool:
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is nn.Parameter:
                if self._is_foreign(value):
                    return True
            elif kind in PLAIN:
                continue
            elif kind is list or kind is tuple:
                if self._has_foreign(value):
                    return True
            elif any(
                isinstance(leaf, Tensor) and self._is_foreign(leaf) for leaf in tree_leaves(value)
            ):
                return True
        return False

    def _is_foreign(self, tensor: Tensor) -> bool:
        model = self._model
        if model.moves:
            if tensor.device != model.devices[self.stage] and tensor.device in model.devices:
                return True
            if id(tensor) in self._copies:  # a later stage may have changed its copy
                return True
        return self._cuts and tensor.requires_grad and self._is_earlier(tensor)

    def _is_earlier(self, tensor: Tensor) -> bool:
        node = tensor.grad_fn
        if node is None or id(tensor) in self._stages:
            return self._stage_of(tensor) < self.stage
        # Numbers of a thread only grow, so this stage's nodes are all above its start.
        if number_of_node(node) < self._starts[-1]:
            return True
        # most tensors have never been changed in place
        return tensor._version > 0 and self._stage_of(tensor) < self.stage

    def _stage_of(self, tensor: Tensor) -> int:
        noted = self._stages.get(id(tensor))
        if noted is not None:
            return noted[0]
        node = tensor.grad_fn
        if node is not None:
            # Only then can the node be younger than the operation, see `_made_by`.
            if tensor._version and tensor._is_view():
                node = self._made_by(node)
            # a graph from before the trip counts as the first stage's
            return max(bisect_right(self._starts, number_of_node(node)) - 1, 0)
        owner = self._model.owners.get(id(tensor))
        if owner is not None:
            return owner
        self._stages[id(tensor)] = self.stage, tensor  # its first use
        return self.stage

    def _made_by(self, node: Node) -> Node:
        """Returns the node of the operation that has made a view, or has changed its base.

        When the base of a view changes in place, autograd makes a new node for the view, but only
        when code asks for it, so perhaps in a later stage. That stage has no other node that leads
        to an earlier one: cuts lead to none.
        """
        start = self._starts[-1]
        following: Node | None = node
        while following is not None and number_of_node(following) >= start:
            functions = following.next_functions
            if len(functions) != 1:
                return node
            following = functions[0][0]
        return node if following is None else following

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Returns a value that needs no gradient on this stage's device."""
        device, copies = self._model.devices[self.stage], self._copies.get(id(tensor))
        if copies is None:
            if tensor.device == device or tensor.device not in self._model.devices:
                return tensor
            with self.glue.off():
                self._check_memory(tensor, self.stage - 1)
                copies = self._copies[id(tensor)] = _Copies(tensor)
        if self.layer is not None:
            self._model.look_inside.add(self.layer.number)
        with self.glue.off():
            return copies.on(device)

    def _check_memory(self, tensor: Tensor, last: int) -> None:
        """Refuses a value that a stage after `last` has changed under another name."""
        if self._changed.get(storage_id(tensor), 0) > last:
            raise SplitError(_changed_through_view(tensor))

    def _check_changes(self) -> None:
        """Refuses a change in place that a stage's own name cannot see.

        Raises:
            SplitError: a value of an earlier stage was changed through another view of its memory;
                or a parameter or buffer that is on another device was changed.
        """
        if self._copies:
            self._check_copies()
        aliases = list(self._aliases[self.stage].values())
        for alias in aliases:
            if alias.value._backward_hooks or alias.value.retains_grad:
                self._move_hooks()
                break
        changed = [alias for alias in aliases if alias.value._version != alias.version]
        for alias in changed:
            memory = storage_id(alias.source)
            is_shared = any(
                other is not alias and storage_id(other.source) == memory for other in aliases
            )
            # Changed memory, but the graph still begins at the cut: the change went through another
            # tensor.
            if alias.value.grad_fn is alias.node or is_shared:
                raise SplitError(_changed_through_view(alias.value))
            self._changed[memory] = self.stage

    def _move_hooks(self) -> None:
        """Moves hooks that layers have set on their arguments to where the whole gradient arrives.

        Raises:
            SplitError: a layer retains the gradient of an argument.
        """
        for stage in range(self.stage, 0, -1):
            for alias in self._aliases[stage].values():
                if alias.value.grad_fn is not alias.node:
                    continue  # a hook on the changed value sees its whole gradient
                if alias.value.retains_grad:
                    raise SplitError(
                        f"a layer of stage {self.stage} calls retain_grad() of an argument from an "
                        "earlier stage, and would get a part of the gradient: call it where the "
                        "value is made, or between layers"
                    )
                move_hooks(alias.value, alias.source)

    def _check_copies(self) -> None:
        for copies in self._copies.values():
            if not (copies.is_changed or copies.has_changed):
                continue
            name = self._model.names.get(id(copies.source))
            if name is not None:
                raise SplitError(
                    f"stage {self.stage} changes {name!r} in place, which is on the device of "
                    "another stage: cut elsewhere, so that this code is in the stage of the layer "
                    "that has it"
                )
            memory = storage_id(copies.source)
            if any(
                other is not copies and storage_id(other.source) == memory
                for other in self._copies.values()
            ):
                raise SplitError(_changed_through_view(copies.source))
