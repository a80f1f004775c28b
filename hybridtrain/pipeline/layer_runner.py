"""Runs a stage's layers on one micro-batch: seeded, recomputed, compiled, with named errors.

A layer that draws random numbers runs uncompiled in training even with torch.compile, because
compiled code draws different numbers (Inductor has its own kernels): the masks would not match
a run with `compile=False`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hybridtrain._base.microbatch import map_tensors
from hybridtrain._base.skip import pop, popped_by, skip_scope, stash, stashed_by
from hybridtrain._base.tensors import storage_id
from hybridtrain._base.torch_private import (
    allowing_torch_func,
    backward_of_batch_norm,
    call_uncompiled,
    compile_module,
    is_profiled,
    prepare_compiler,
    profiled,
    saved_hooks,
)
from hybridtrain.errors import UserError, argument, setting
from hybridtrain.graph import Layer, Segment, works_in_place
from hybridtrain.pipeline.boundary import refuse_overlaps
from hybridtrain.pipeline.layer_rng import LayerRNG
from hybridtrain.pipeline.layer_state import Change, StageState
from hybridtrain.pipeline.recomputation_proof import (
    FIRST_STEPS,
    Record,
    check_records,
    is_compared,
)
from hybridtrain.pipeline.recompute import (
    Piece,
    as_recomputation,
    is_recomputing,
    run_to_recompute,
)
from hybridtrain.pipeline.tensor_digest import digest


def compile_layers(modules: Sequence[nn.Module], recomputes: bool) -> None:
    """Compiles each of `modules`, in its first forward.

    Args:
        modules: the layers.
        recomputes: whether backwards run layers again. The second run must use the same code as the
            first, but with dynamic shapes another variant may match by then.
    """
    # all layers share the code of a call, and each may be compiled for its own reasons
    prepare_compiler(len(modules), recomputes)
    dynamic = False if recomputes else None
    for module in modules:
        if isinstance(module, Segment):
            module.compile(dynamic=dynamic)
        else:
            compile_module(module, dynamic=dynamic)


def run_plainly(module: nn.Module, value: Any) -> Any:
    """Returns the output of a layer without its compiled code; hooks run as usual."""
    if not isinstance(module, Segment):
        return call_uncompiled(module, value)
    module.uses_compiled = False
    try:
        return module(value)
    finally:
        module.uses_compiled = True


def error_hints() -> dict[str, str]:
    """Returns advice for errors that are likely in a pipeline, by a part of PyTorch's message."""
    return {
        "leaf Variable that requires grad": (
            "the layer changes its input in place: declare it with an attribute inplace = True on "
            "its module, as nn.ReLU does"
        ),
        "Expected more than 1 value per channel": (
            f"a micro-batch is too small for a batch norm: lower {argument('chunks')}, or set "
            f"{setting('drop_last', True)} so that there is no short last batch"
        ),
        "'lengths' argument should be a 1D CPU int64 tensor": (
            "all tensors of a batch are moved to the first stage's device: pass lengths.cpu() to "
            "pack_padded_sequence"
        ),
    }


_NO_SCOPE: AbstractContextManager[Any] = nullcontext()


class LayerRunner:
    """Runs consecutive layers.

    Attributes:
        layers: the layers.
        first: the index of the first layer in the model.
        recomputes: True if some of them are recomputed individually.
        variants: for each micro-batch, the graph variant of traced layers; None: the first.
        tied: the identities of parameters that stages share.

    Args:
        layers, first: the arguments of the constructor.
        module: all layers under one root.
        rng: seeds their random operations.
        recomputed_layers: the numbers of the layers whose activations are recomputed.
        clone_inputs: copy the inputs of a recomputed layer, because another layer works in place.
        changer: see `boundary.refuse_overlaps`.
        tied: the argument of the constructor.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        first: int,
        module: nn.Module,
        rng: LayerRNG,
        recomputed_layers: frozenset[int],
        clone_inputs: bool,
        changer: str | None,
        tied: Collection[int],
    ) -> None:
        self.layers = tuple(layers)
        self.first = first
        self.rng = rng
        self._recomputed_layers = recomputed_layers
        self.recomputes = any(
            number in recomputed_layers for number in range(first, first + len(self.layers))
        )
        self._clone_inputs = clone_inputs
        self._changer = changer
        self._skips = any(stashed_by(part.module) or popped_by(part.module) for part in layers)
        # The samples of a batch are views. A copy has another alignment, which may change last
        # bits: the first stage copies them only if its first layer may change them.
        self._copies_to_recompute = works_in_place(module if first else layers[0].module)
        self.variants: Sequence[int] | None = None
        self.tied = set(tied)
        self.state = StageState(self.layers)
        self._steps: Counter[object] = Counter()  # of each kind
        self._compares = self._is_late = self._recomputes_some = False
        self._records: list[Record] = []

    def begin_step(self, kind: object, recomputes: bool) -> None:
        """Begins a step that trains.

        Args:
            kind: the kind of step; the first steps of each kind check what forwards change.
            recomputes: whether backwards run some layers or stages again.
        """
        self._recomputes_some = recomputes
        self._steps[kind] += 1
        step = self._steps[kind]
        self._compares = is_compared(step) if self._recomputes_some else step <= FIRST_STEPS
        self._is_late = self._steps.total() > FIRST_STEPS
        self._records.clear()

    def check_recomputations(self) -> None:
        """Compares the recomputations of a step with its forwards.

        Raises:
            ConfigError: they differ; the message names the first such layer.
        """
        records, self._records = self._records, []
        check_records(records, self.layers)

    def run(
        self,
        microbatch: int,
        value: Any,
        skipped: dict[str, Any],
        record: Record | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the last layer's output and the skip values, given the values that came in.

        A `record` also stores the layers' outputs.
        """
        index, rng = self.first, self.rng
        probes = rng.probes_compiled and rng.active
        watches = self._compares and torch.is_grad_enabled() and not is_recomputing()
        guards = self.guards_saved and record is None
        # most steps: nothing is recomputed, compared or checked
        is_plain = (
            not (probes or watches or self.recomputes or self.variants is not None or is_profiled())
            and record is None
        )
        try:
            with (
                skip_scope(skipped) if self._skips else _NO_SCOPE as scope,
                rng.seeded(microbatch) as draws,
                guarding_saved(self.state) if watches and guards else _NO_SCOPE,
                _NO_SCOPE if record is None else record.run(),
            ):
                if is_plain:
                    for layer in self.layers:
                        draws.at(index)
                        value = layer.module(value)
                        index += 1
                    return value, skipped if scope is None else scope
                for layer in self.layers:
                    if self.variants is not None:
                        self._choose_variant(layer, microbatch)
                    if probes and rng.needs_probe(index):
                        self._probe(microbatch, index, layer, value)
                    if record is not None:
                        record.at(index - self.first)
                    with profiled(layer.name), self._watched(index) if watches else _NO_SCOPE:
                        if index in self._recomputed_layers and torch.is_grad_enabled():
                            value = self._run_recomputed_layer(microbatch, index, layer, value)
                        else:
                            draws.at(index)
                            module = self._callable(index, layer) if probes else layer.module
                            value = module(value)
                    if record is not None:
                        record.output(value)
                    index += 1
        except Exception as error:
            name = self.layers[index - self.first].name
            error.add_note(f"in layer {name!r}, with the input {describe(value)}")
            for sign, hint in error_hints().items():
                if sign in str(error):
                    error.add_note(hint)
            raise
        return value, skipped if scope is None else scope

    def run_recomputed(
        self, microbatch: int, value: Any, skipped: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Runs all layers as `run` does, to be recomputed in the backward."""

        def run(
            piece: Piece, microbatch: int, value: Any, skipped: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            with self._in_state(piece, range(len(self.layers))):
                return self.run(microbatch, value, skipped, piece.record)

        if self._copies_to_recompute:
            refuse_overlaps((value, skipped), self._changer)
        output, skipped = run_to_recompute(
            run, self._copies_to_recompute, microbatch, value, skipped
        )
        return output, skipped

    def _watched(self, index: int) -> AbstractContextManager[None]:
        return self.state.watched(
            index - self.first, self._is_late, self._recomputes_some, self.tied
        )

    @property
    def guards_saved(self) -> bool:
        """True if saved tensors are compared, see `guarding_saved`."""
        return self._compares and bool(self.state.uncounted)

    @contextmanager
    def _in_state(self, piece: Piece, positions: Sequence[int]) -> Iterator[None]:
        """Surrounds the forward of a piece, and its recomputation."""
        restored: AbstractContextManager[None] = _NO_SCOPE
        if piece.snapshot is not None:
            restored = self.state.restored(piece.snapshot)
        else:
            piece.snapshot = self.state.save(positions)
            if self._compares:
                piece.record = Record()
                self._records.append(piece.record)
        with restored:
            yield

    def _choose_variant(self, layer: Layer, microbatch: int) -> None:
        assert self.variants is not None
        if isinstance(layer.module, Segment):
            layer.module.variant = self.variants[microbatch]

    def _callable(self, index: int, layer: Layer) -> Callable[[Any], Any]:
        """Returns the layer's module, or a function that runs it uncompiled if it draws."""
        # a layer that has drawn in compiled code in this step also does so when recomputed
        if self.rng.probes_compiled and self.rng.active and self.rng.draws(index):
            return partial(run_plainly, layer.module)
        return layer.module

    def _probe(self, microbatch: int, index: int, layer: Layer, value: Any) -> None:
        """Determines whether a compiled layer draws random numbers, by running the plain layer.

        The run changes nothing: neither the layer's state, nor its inputs, nor what it pops.
        """
        names = set(popped_by(layer.module)) - set(stashed_by(layer.module))
        popped = {name: pop(name) for name in names}
        if works_in_place(layer.module):
            value, popped = map_tensors(torch.clone, (value, popped))
        with (
            torch.no_grad(),  # or an enclosing checkpoint would count its saved tensors
            self.state.undone(index - self.first),
            skip_scope(popped),
            as_recomputation(),  # statistics of batch norms are not collected
            self.rng.seeded(microbatch) as draws,
        ):
            draws.at(index)
            run_plainly(layer.module, value)
        self.rng.mark_probed(index)

    def _run_recomputed_layer(self, microbatch: int, index: int, layer: Layer, value: Any) -> Any:
        def run(piece: Piece, value: Any, popped: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            position = index - self.first
            if self.variants is not None:  # this may be in a backward
                self._choose_variant(layer, microbatch)
            with (
                skip_scope(popped) as values,
                self._in_state(piece, [position]),
                self.rng.seeded(microbatch) as draws,
                _NO_SCOPE if piece.record is None else piece.record.run(),
            ):
                if piece.record is not None:
                    piece.record.at(position)
                draws.at(index)
                output = self._callable(index, layer)(value)
                if piece.record is not None:
                    piece.record.output(output)
                return output, values

        in_place = works_in_place(layer.module)
        # values that modules of the layer stash for each other are not there yet
        names = set(popped_by(layer.module)) - set(stashed_by(layer.module))
        popped = {name: pop(name) for name in sorted(names)}
        refuse_overlaps((value, popped), self._changer)
        if self._clone_inputs and (index or self._copies_to_recompute):
            value, popped = map_tensors(torch.clone, (value, popped))
        value, values = run_to_recompute(run, in_place, value, popped)
        # an in-place layer has changed copies of the values that it popped
        for name in (*stashed_by(layer.module), *(popped if in_place else {})):
            stash(name, values[name])
        return value


@contextmanager
def guarding_saved(state: StageState) -> Iterator[None]:
    """Compares tensors between the time autograd saves them in the block and their backward.

    Finds parameters and buffers that a forward changes through .data: the backward of an earlier
    micro-batch would use the later values, and PyTorch does not increment the version.

    Raises:
        UserError: in the backward, that the values have changed; names the layer.
    """
    changes = dict(state.uncounted)
    hooks = saved_hooks()  # the caller's, which PyTorch does not call around the hooks here

    def pack(tensor: Tensor) -> Any:
        change = None
        if tensor.layout == torch.strided and not tensor.is_meta:
            change = changes.get(storage_id(tensor))
        before = None if change is None else digest(tensor)
        packed = None if hooks is None else hooks[0](tensor)
        return tensor, tensor._version, change, before, packed

    def unpack(packed: Any) -> Tensor:
        tensor: Tensor
        tensor, version, change, before, packed = packed
        value = tensor if hooks is None else hooks[1](packed)
        if backward_of_batch_norm():  # saves its running statistics, but does not use them
            return value
        if change is not None and before is not None:
            if not torch.equal(before, digest(tensor)):  # type: ignore[arg-type]
                raise changed_before_backward(change)
        elif tensor._version != version and (other := state.change_of(str(tensor.shape))):
            raise changed_before_backward(other)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), allowing_torch_func():
        yield


def changed_before_backward(change: Change) -> UserError:
    """Returns the error for a tensor that the next micro-batch's forward changes too early."""
    return UserError(
        f"{change}, but the backward of a micro-batch needs the values of its own forward, and "
        f"in a pipeline the forward of the next micro-batch runs before and changes "
        f"them. Compute with a copy ({change.name}.clone()), or recompute the layer from its own "
        f"state: {argument('recompute')}[{change.layer!r}]"
    )


def describe(value: Any) -> str:
    """Returns the shapes and types in a pytree, for an error message."""
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for leaf in tree_leaves(value)
    ]
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
