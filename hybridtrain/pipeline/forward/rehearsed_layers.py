"""The layers of a rehearsal: which of them run, and what is known of the others.

A layer that equals an earlier one, and gets arguments of equal formats, does not run again. Nor
does one of which formulas tell what it returns, see `layer_formulas`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Sized
from contextlib import suppress
from copy import deepcopy
from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from hybridtrain._base.precision import ThreadState
from hybridtrain._base.tensors import storage_id, version_of
from hybridtrain._base.values import is_constant, leaves_of
from hybridtrain.errors import UserError
from hybridtrain.graph import Layer
from hybridtrain.partitioning import copy_of, fake_like
from hybridtrain.pipeline.forward.glue import PLAIN
from hybridtrain.pipeline.forward.layer_formulas import (
    Answer,
    LayerFormulas,
    SymbolicRun,
    kinds_of,
    numbers_of,
    with_numbers,
)
from hybridtrain.pipeline.forward.layers import note_layer
from hybridtrain.pipeline.forward.rehearsal import LayerOutput, ValueFormat, fake_of

if TYPE_CHECKING:
    from hybridtrain._base.symbolic_sizes import SymbolicSizes
    from hybridtrain.pipeline.forward.part_trip import RehearsalTrip

_MOST_FORMULAS = 1024  # each value of a constant argument has its own


class LayersOfCopy:
    """What is known of the layers of a copy of the model, in all its rehearsals."""

    def __init__(self) -> None:
        # by number: a structure is a large tuple, which each look-up would hash and compare
        self._structures: dict[Hashable, int] = {}
        self._formulas: dict[Hashable, LayerFormulas] = {}

    def number_of(self, module: nn.Module) -> int:
        """Returns the number of a layer's structure."""
        return self._structures.setdefault(_structure(module), len(self._structures))

    def formulas(self, key: Hashable) -> LayerFormulas:
        """Returns the formulas of a layer; new ones for a new key."""
        if len(self._formulas) == _MOST_FORMULAS and key not in self._formulas:
            self._formulas.clear()
        return self._formulas.setdefault(key, LayerFormulas())


class RehearsedLayers:
    """The layers of a stage in a rehearsal.

    Args:
        modules: the modules of the layers, in the copy of the model.
        layers: what is known of the layers of all stages.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: LayersOfCopy) -> None:
        self._modules = modules
        self._layers = layers
        self._structures = [layers.number_of(module) for module in modules]

    def run(self, position: int, trip: RehearsalTrip, args: Any, kwargs: Any) -> Any:
        """Returns what a layer returns, on fake tensors."""
        assert trip.layer is not None
        device, stashes = trip._model.devices[0], trip.layer.stashes
        originals, spec = tree_flatten((args, kwargs))
        leaves = [trip._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in originals]
        if any(map(is_not, leaves, originals)):
            args, kwargs = tree_unflatten(leaves, spec)
        formats = [ValueFormat.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        state = ThreadState.capture()
        repeats = not (stashes or trip.layer.pops)
        key = self._structures[position], spec, tuple(map(_plain_or_type, formats)), state
        answer = trip.known.get(key) if repeats else None
        formulas = None
        if repeats and answer is None:
            formulas = self._formulas_for(position, spec, formats, state)
            if formulas is not None:
                answer = formulas.answer(numbers_of(formats))
            if answer is not None:
                trip.known[key] = answer
        if answer is not None:
            trip.draws.skip(answer.draws)
            trip.rehearsal.outputs.append(answer.output.after(trip.draws.counts))
            return answer.output.new(trip._mode, device, (args, kwargs))
        if formulas is not None and formulas.is_due:
            with suppress(Exception):  # objects that cannot be copied
                run = self._run_with_symbols(position, trip, spec, formats, state)
                trip.lessons.append(partial(formulas.learn, run))
        draws, versions = trip.draws.operations, _versions_of(leaves)
        try:
            returned = trip.on_fakes(self._modules[position], args, kwargs)
        except UserError:  # about the model as a whole
            raise
        except Exception as error:
            note_layer(error, trip.layer.name, args, kwargs)
            raise
        values = (returned, trip.stashed(trip.layer)) if stashes else returned
        leaves_of(values)  # registers dataclasses
        output = LayerOutput(values, (args, kwargs), trip.draws.counts)
        trip.rehearsal.outputs.append(output)
        if versions == _versions_of(leaves) and _is_separate(returned, leaves):
            answer = trip.known[key] = Answer(output, trip.draws.operations - draws)
            if formulas is not None:
                formulas.add(numbers_of(formats), answer)
        return returned

    def _formulas_for(
        self, position: int, spec: TreeSpec, formats: Sequence[Any], state: ThreadState
    ) -> LayerFormulas | None:
        """Returns the formulas of a layer; None if an argument may hide what the output depends on.

        Args:
            position: the layer.
            spec: the structure of the arguments.
            formats: their leaves, with the formats of tensors.
            state: grad mode and autocast.
        """
        objects: dict[int, int] = {}
        try:
            others = tuple(
                _contents_of(leaf, objects) for leaf in formats if type(leaf) is not ValueFormat
            )
            key = self._structures[position], spec, kinds_of(formats), others, state
            return self._layers.formulas(key)
        except (TypeError, RecursionError):  # contents that are unknown, or cannot be compared
            return None

    def _run_with_symbols(
        self,
        position: int,
        trip: RehearsalTrip,
        spec: TreeSpec,
        formats: Sequence[Any],
        state: ThreadState,
    ) -> SymbolicRun:
        module, mode, device = self._modules[position], trip._mode, trip._model.devices[0]
        formats = deepcopy(formats)  # the layer may change objects among its arguments

        def run(sizes: SymbolicSizes, numbers: Sequence[Any]) -> LayerOutput:
            with sizes.of(mode), state.applied(), state.autocast():
                leaves = [
                    fake_of(leaf, mode, device) if type(leaf) is ValueFormat else leaf
                    for leaf in with_numbers(formats, numbers)
                ]
                args, kwargs = tree_unflatten(leaves, spec)
                with mode:
                    # a copy, because the layer may keep a symbol in an attribute
                    returned = copy_of(Layer("", module), fake_like)(*args, **kwargs)
                return LayerOutput(returned, (args, kwargs), None)

        return run


def _versions_of(leaves: Sequence[Any]) -> list[int]:
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _is_separate(returned: Any, arguments: Sequence[Any]) -> bool:
    """Returns whether no two tensors share memory, of those that a layer has returned and got.

    Otherwise a change of one changes the other, which tensors that only stand for them would not.
    """
    of_arguments = {id(leaf): storage_id(leaf) for leaf in arguments if isinstance(leaf, Tensor)}
    new = {id(leaf): leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)}
    storages = [storage_id(leaf) for key, leaf in new.items() if key not in of_arguments]
    return len(set(storages)) == len(storages) and not {*storages} & {*of_arguments.values()}


def _contents_of(value: Any, objects: dict[int, int]) -> Hashable:
    """Returns what an object consists of, such as a cache of keys.

    Args:
        value: the object.
        objects: the numbers of the objects so far, by their `id`.

    Raises:
        TypeError: that is not known, as for an object with tensors.
    """
    kind: Any = type(value)
    if kind is not slice and is_constant(value):
        return kind, value
    if id(value) in objects:
        return objects[id(value)]
    objects[id(value)] = len(objects)
    if kind is dict:
        value = tuple(value.items())
    elif kind is not list and kind is not tuple:
        # A subclass of a container, or an object of C, has more than attributes.
        slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        if slots or kind.__new__ is not object.__new__ or isinstance(value, nn.Module):
            raise TypeError(kind)
        value = tuple(vars(value).items())
    return kind, *(_contents_of(part, objects) for part in value)


def _structure(module: nn.Module) -> Hashable:
    """Returns what two layers of equal code have in common."""
    return tuple(
        (name, part.extra_repr(), *_facts_of(part)) for name, part in module.named_modules()
    )


def _facts_of(part: nn.Module) -> tuple[Any, ...]:
    """Returns what a module has besides other modules.

    Its plain attributes, but not its place in the model, and which other objects, such as a config.
    """
    return (
        type(part),
        part.training,
        *_tensors_of(part),
        *(
            (n, v if _is_plain(v) else id(v))
            for n, v in _own_attributes(part)
            if not n.endswith(_PLACES)
        ),
    )


def _tensors_of(part: nn.Module) -> list[Hashable]:
    return [
        (n, None if t is None else (t.shape, t.dtype, t.requires_grad))
        for n, t in (*part._parameters.items(), *part._buffers.items())
    ]


def _own_attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """Returns the attributes of a module but for those that all modules have."""
    return [item for item in vars(part).items() if item[0] not in _OF_MODULES]


def attributes_of(net: nn.Module) -> Hashable:
    """Returns what shows that code has changed a model.

    Its modules, their attributes, the attributes of other objects such as a config, and the lengths
    of lists and tables.
    """
    facts: list[Any] = []
    objects: dict[int, Hashable] = {}
    for part in modules_of(net):
        # By `keys`: a ScriptModule's table of modules cannot be iterated.
        facts += type(part), part.training, *part._modules.keys(), *_tensors_of(part)
        for name, value in _own_attributes(part):
            if _is_plain(value):
                facts += name, value
                continue
            facts += name, id(value)
            # the last: of C++, whose methods may not be there
            if isinstance(value, Tensor | nn.Module | torch.ScriptObject) or id(value) in objects:
                continue  # most layers have the same config
            if isinstance(value, Sized):
                objects[id(value)] = len(value)
            elif hasattr(value, "__dict__"):
                plain = ((n, v) for n, v in vars(value).items() if _is_plain(v))
                objects[id(value)] = tuple(plain)
    return tuple(facts), tuple(objects.items())


def modules_of(net: nn.Module) -> list[nn.Module]:
    """Returns the modules of a model; `net.modules()` also makes their names, in more time."""
    modules = {id(net): net}
    pending = [net]
    while pending:
        for part in pending.pop()._modules.values():
            if part is not None and id(part) not in modules:
                modules[id(part)] = part
                pending.append(part)
    return list(modules.values())


# what each module has; the call is that of a layer, or of compiled code, which a copy does not run
_OF_MODULES = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
_PLAIN_VALUES = (str, bool, float, int)
_PLACES = ("idx", "index", "layer_id", "layer_number")  # names of a layer's place in the model


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):  # such as the shape of a LayerNorm
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN_VALUES)


def _plain_or_type(leaf: Any) -> Any:
    kind = type(leaf)
    return leaf if kind is ValueFormat or (kind in PLAIN and kind is not slice) else kind
