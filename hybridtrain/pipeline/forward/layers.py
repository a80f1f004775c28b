"""The calls of layers: where a forward meets the pipeline, and how a layer's module runs there.

`install` makes `module(...)` of each layer a `LayerCall`. Inside of a trip it moves the trip to the
layer's stage and runs its `LayerRun`: the module itself, compiled or recomputed if asked for.
Everywhere else the call is the module's own.

PyTorch asks `nn.Module._compiled_call_impl` before it runs hooks and forward, so a `LayerCall`
surrounds both, needs no hook of its own, and neither copies nor pickles of the module contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.module_call import ModuleCall
from hybridtrain._base.skip import pop, popped_by, skip_scope, stashed_by
from hybridtrain._base.torch_private import (
    compile_module,
    compiled_call,
    compiled_calls,
    profiled,
    replace_call,
)
from hybridtrain._base.values import structure_copy
from hybridtrain.graph import Layer, works_in_place
from hybridtrain.head import HeadCall
from hybridtrain.pipeline import offload
from hybridtrain.pipeline.autograd_graph import refuse_overlaps
from hybridtrain.pipeline.forward.glue import here
from hybridtrain.pipeline.forward.places import LayerPlace
from hybridtrain.pipeline.layer_errors import describe, error_hints, guarding_saved
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.layer_state import StageState
from hybridtrain.pipeline.recomputation_proof import Record, check_records, is_compared
from hybridtrain.pipeline.recompute import (
    Piece,
    as_recomputation,
    is_recomputing,
    run_to_recompute,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridtrain.pipeline.forward.trip import Trip

_NONE: AbstractContextManager[Any] = nullcontext()


class LayerCall(ModuleCall):
    """What calling the module of a layer does; see the module.

    Attributes:
        device: where a call outside of trips finds its arguments; None: where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.compiled = compiled_call(module)
        self.device: torch.device | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer in the trip of this thread, or the module alone."""
        module: Any = self._module()
        trip = here.trip
        # Inside of a layer, modules that are layers elsewhere run as they are.
        if trip is not None and trip.layer is None and trip.is_in_forward:
            places = trip.places.get(id(module))
            if places is not None:
                place = places[0] if len(places) == 1 else trip.place_of_call(module, places)
                if type(place) is LayerPlace:
                    return trip.run_layer(place, args, kwargs)
                if place is not None:
                    trip.draws.at_unit(place.number)
        elif trip is None and self.device is not None:  # such as generation, which calls parts
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(self.device), (args, kwargs))
        return (self.compiled or module._call_impl)(*args, **kwargs)


def note_layer(error: Exception, name: str, args: Any, kwargs: Any) -> None:
    """Adds to an error in which layer it happened, with which inputs, unless it has this note."""
    if not hasattr(error, "_in_layer"):
        error._in_layer = name  # type: ignore[attr-defined]
        error.add_note(f"in layer {name!r}, with the input {describe((args, kwargs))}")
        for sign, hint in error_hints().items():
            if sign in str(error):
                error.add_note(hint)


def install(modules: Sequence[nn.Module], device: torch.device | None = None) -> None:
    """Makes calls of `modules` known to trips; a second time changes the device alone.

    Args:
        modules: the modules.
        device: their device, if others are on other devices.
    """
    for module in modules:
        call = compiled_call(module)
        if not isinstance(call, LayerCall):
            call = LayerCall(module)
            replace_call(module, call)
        call.device = device or call.device


def uninstall(modules: Iterable[nn.Module]) -> None:
    """Makes calls of `modules` their own again; those without a `LayerCall` stay as they are."""
    for module in modules:
        call = compiled_call(module)
        if isinstance(call, LayerCall):
            replace_call(module, call.compiled)


class LayersOfStage:
    """The layers of a stage: what they change, and which of them a step recomputes.

    Attributes:
        state: the state that forwards change.
        whole: the micro-batches of the step in which all layers are recomputed.
        kept: by micro-batch, the tensors that recomputed layers start from, but for those that can
            leave the device; in steps that are compared.

    Args:
        layers: the layers.
        first: the index of the first of them in the model.
        rng: seeds their random operations.
        recomputed: the indices, in the model, of the layers that are always recomputed.
        compiled: whether layers are compiled.
        static: compile them again for each shape, so that a second run uses the code of the first.
        clone_inputs: keep copies of the inputs of a recomputed layer, because some layer works in
            place.
        tied: the identities of parameters that stages share.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        rng: LayerRNG,
        recomputed: frozenset[int],
        compiled: bool,
        static: bool,
        clone_inputs: bool,
        tied: frozenset[int],
    ) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.rng = rng
        self.state = StageState(layers)
        self.whole: frozenset[int] = frozenset()
        self.kept: dict[int, list[Tensor]] = {}
        self._recomputed = recomputed
        self._recomputes_one = any(first <= index < first + len(layers) for index in recomputed)
        self._clone_inputs = clone_inputs
        self._tied = tied
        self._steps = 0  # that train
        self._compares = self._is_late = self._recomputes_some = False
        self._records: list[Record] = []
        self._compiled = compiled
        self._is_plain = not (recomputed or compiled)
        self._modules = [layer.module for layer in layers]
        self._is_head: list[bool] = []
        self._plain: list[Callable[..., Any]] = []
        self._calls: list[Callable[..., Any]] = []
        for layer in layers:
            # Before compiling, which replaces it.
            call = own_call(layer.module)
            is_head = isinstance(call, HeadCall)
            self._is_head.append(is_head)
            self._plain.append(call if is_head else layer.module._call_impl)
            if compiled and not is_head:
                compile_module(layer.module, dynamic=False if static else None)
            self._calls.append(own_call(layer.module))

    def follow_compiled(self) -> None:
        """Runs layers compiled if the caller has called `module.compile()` since the last step.

        Compiling replaces what a call of the module does, and so the `LayerCall`.
        """
        if set(map(type, compiled_calls(self._modules))) == {LayerCall}:
            return
        for position, layer in enumerate(self.layers):
            if not isinstance(compiled_call(layer.module), LayerCall):
                install([layer.module])
                self._calls[position] = own_call(layer.module)

    def begin_step(self, number: int, whole: frozenset[int]) -> None:
        """Begins a step that trains.

        Args:
            number: its number among those of its kind; the first ones compare what forwards change.
            whole: the micro-batches in which all layers are recomputed.
        """
        self.whole = whole
        self._recomputes_some = bool(whole or self._recomputed)
        self._steps += 1
        self._compares = is_compared(number)
        # Decided once per step: `run` is called at every layer.
        self._is_plain = not (self._recomputed or self._compiled or self._compares)
        self._is_late = self._steps > 4
        # A step that failed may have left some.
        self._records.clear()
        self.kept.clear()

    def recomputes(self, microbatch: int) -> bool:
        """Returns whether the backward of a micro-batch recomputes some layers."""
        return self._recomputes_one or microbatch in self.whole

    def check_recomputations(self) -> None:
        """Compares the recomputations of a step with its forwards.

        Raises:
            ConfigError: they differ; the message names the first such layer.
        """
        if self._records:
            # Taken first: an error must not be raised again at the next step.
            records, self._records = self._records, []
            check_records(records, self.layers)

    def run(self, position: int, trip: Trip, args: Any, kwargs: Any) -> Any:
        """Runs the layer at a position of the stage."""
        try:
            if (
                self._is_plain
                and trip.microbatch not in self.whole
                and not (trip.stage and trip.looks_inside(self.first + position))
                and not trip.is_profiled
            ):  # most steps: nothing is recomputed, compared or looked at
                return self._calls[position](*args, **kwargs)
            return self._run_closely(position, trip, args, kwargs)
        except Exception as error:
            note_layer(error, self.layers[position].name, args, kwargs)
            raise

    def _run_closely(self, position: int, trip: Trip, args: Any, kwargs: Any) -> Any:
        """Runs a layer that is recomputed, compared, looked at or measured."""
        index, layer, rng = self.first + position, self.layers[position], self.rng
        with_grad = torch.is_grad_enabled()
        # Without gradients nothing is saved, so there is nothing to save by recomputing.
        recomputes = with_grad and (index in self._recomputed or trip.microbatch in self.whole)
        recomputes = recomputes and not self._is_head[position]  # which saves nothing
        watches = self._compares and with_grad and not is_recomputing()
        guards = watches and not recomputes and self.state.uncounted
        probes = rng.probes_compiled and rng.active
        call = self._calls[position]
        if trip.looks_inside(index):
            call = partial(self._look_inside, trip, self._plain[position])
        elif probes:
            if rng.needs_probe(index):
                self._probe(position, trip, args, kwargs)
            # Its compiled code would draw other numbers than the plain layer.
            if rng.draws(index):
                call = self._plain[position]
        with (
            profiled(layer.name),
            self.state.watched(position, self._is_late, self._recomputes_some, self._tied)
            if watches
            else _NONE,
            guarding_saved(self.state) if guards else _NONE,
        ):
            if recomputes:
                output = self._run_recomputed(position, trip, call, args, kwargs)
            else:
                output = call(*args, **kwargs)
        return output

    def _probe(self, position: int, trip: Trip, args: Any, kwargs: Any) -> None:
        """Determines whether a compiled layer draws random numbers, by running the plain layer.

        The run changes nothing: neither the layer's state, nor its inputs, nor what it pops.
        """
        module = self.layers[position].module
        names = set(popped_by(module)) - set(stashed_by(module))
        popped = {name: pop(name) for name in names}
        values = structure_copy((args, kwargs))
        if works_in_place(module):
            values, popped = map_tensors(torch.clone, (values, popped))
        with (
            torch.no_grad(),  # or an enclosing checkpoint would count its saved tensors
            self.state.undone(position),
            skip_scope(popped),
            as_recomputation(),  # statistics of batch norms are not collected
            self.rng.seeded_again(trip.microbatch, trip.draws.position),
        ):
            self._plain[position](*values[0], **values[1])
        self.rng.mark_probed(self.first + position)

    def _look_inside(self, trip: Trip, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if here.trip is not trip:  # recomputed in the backward, for what autograd saves only
            return call(*args, **kwargs)
        return trip.look_inside(call, args, kwargs)

    def _run_recomputed(
        self, position: int, trip: Trip, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        # Before the first run, which moves it on.
        drawn = trip.draws.position
        names = set(popped_by(self.layers[position].module))
        names -= set(stashed_by(self.layers[position].module))
        # Popped here, once: the second run finds them in a scope of its own.
        popped = {name: pop(name) for name in names}
        microbatch, layer = trip.microbatch, self.layers[position]
        # the first run has the tensors themselves: what changes in place is seen by its other users
        originals: Any = args, kwargs
        if self._clone_inputs:
            if works_in_place(layer.module):
                refuse_overlaps((args, kwargs), layer.name)
            args, kwargs = map_tensors(_copy_for_later, (args, kwargs))
        # A copy of the containers: the layer may change its list or dict.
        objects, popped = offload.kept((structure_copy((args, kwargs)), popped))
        if self._compares:  # to count them
            kept = (leaf for leaf in tree_leaves((objects, popped)) if isinstance(leaf, Tensor))
            self.kept.setdefault(microbatch, []).extend(kept)
        assert trip.layer is not None
        device = trip.on_device_again(trip.layer)

        def run(piece: Piece) -> Any:
            nonlocal originals
            draws = scope = on_device = _NONE
            if originals is not None:
                # The first run drops them, or they would stay on the device until the backward.
                (args, kwargs), originals = originals, None
            else:  # in the backward, without a trip
                on_device = device
                (args, kwargs), skipped = offload.restored((objects, popped))
                draws, scope = self.rng.seeded_again(microbatch, drawn), skip_scope(skipped)
                if self._clone_inputs:  # no leaves, which a layer may not change in place
                    args, kwargs = map_tensors(torch.clone, (args, kwargs))
            with (
                # Outermost, so that the record and the draws see the state that the first run saw.
                self._in_state(piece, position),
                draws,
                scope,
                on_device,
                _NONE if piece.record is None else piece.record.run(),
            ):
                if piece.record is not None:
                    piece.record.at(position)
                output = call(*args, **kwargs)
                if piece.record is not None:
                    piece.record.output(output)
                return output

        # `run` is kept until the backward, and must hold nothing but `objects`.
        inputs, args, kwargs = (args, kwargs), None, None
        return run_to_recompute(run, inputs, trip._model.devices[trip.layer.stage])

    @contextmanager
    def _in_state(self, piece: Piece, position: int) -> Iterator[None]:
        """Wraps the forward of a layer, and its recomputation."""
        restored: AbstractContextManager[None] = _NONE
        if piece.snapshot is not None:
            restored = self.state.restored(piece.snapshot)
        else:
            # In the first run, right before the forward: other micro-batches change the state in
            # between.
            piece.snapshot = self.state.save([position])
            if self._compares:
                piece.record = Record()
                self._records.append(piece.record)
        with restored:
            yield


def _copy_for_later(tensor: Tensor) -> Tensor:
    """Returns the present values of an input, for a second run whose graph is not used."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def own_call(module: nn.Module) -> Callable[..., Any]:
    """Returns the call of a module outside of trips."""
    call = compiled_call(module)
    if isinstance(call, LayerCall):
        call = call.compiled
    return call or module._call_impl
