"""The work of layers in a run of a model, counted operator by operator.

The operators may run on fake tensors or on data: FLOPs, bytes read and written, the memory of new
tensors, what autograd saves, and what crosses a cut follow from shapes and storages.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from hybridtrain._base.tensors import Saved, byte_size, count_saved, storage_id
from hybridtrain._base.torch_private import TorchDispatchMode, adds_up_gradients, is_composite
from hybridtrain.partitioning.costs import LayerCost, tensors_of
from hybridtrain.partitioning.layer_watch import LayerWatch

# PyTorch's FLOP counter may have formulas for attention on GPUs only, but fake tensors are on the
# CPU. The counter wraps the formulas that it receives, so these are unwrapped.
_aten = torch.ops.aten
_ATTENTION_ON_CPU = {
    on_cpu: inspect.unwrap(flop_registry[on_gpu])
    for on_cpu, on_gpu in [
        (
            _aten._scaled_dot_product_flash_attention_for_cpu,
            _aten._scaled_dot_product_flash_attention,
        ),
        (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward,
            _aten._scaled_dot_product_flash_attention_backward,
        ),
    ]
}


@dataclass(frozen=True)
class Work:
    """The work of a forward or a backward.

    Attributes:
        flops: FLOPs of matrix products, convolutions and attention.
        bytes: the sum of the bytes that each operator reads and writes.
        product_bytes: the part of `bytes` of the operators that `flops` counts.
        operators: the number of operator calls, including views.
        peak_bytes: the peak memory of new tensors; in a backward, all that backwards have made,
            but for gradients of weights, which are freed at once.
    """

    flops: float = 0
    bytes: float = 0
    product_bytes: float = 0
    operators: float = 0
    peak_bytes: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            *(a + b for a, b in zip(astuple(self), astuple(other), strict=True)),
        )


@dataclass(frozen=True)
class LayerWork:
    """The work and the memory of a layer in a run.

    Attributes:
        forward: the work of the forward.
        backward: the work of the backward.
        activation_bytes: as in `LayerCost`.
        temporary_bytes: as in `LayerCost`.
        crossing_bytes: as in `LayerCost`.
        later_bytes: as in `LayerCost`.
        kept_bytes: as in `LayerCost`.
    """

    forward: Work
    backward: Work
    activation_bytes: int
    temporary_bytes: int
    crossing_bytes: int
    later_bytes: int
    kept_bytes: int

    def of(self, cost: LayerCost) -> LayerCost:
        """Returns a layer's cost with this memory."""
        return replace(
            cost,
            activation_bytes=self.activation_bytes,
            temporary_bytes=self.temporary_bytes,
            crossing_bytes=self.crossing_bytes,
            later_bytes=self.later_bytes,
            kept_bytes=self.kept_bytes,
        )


def counted_work(
    watch: LayerWatch, inputs: Any, precision: Callable[[], AbstractContextManager[object]]
) -> list[LayerWork]:
    """Returns the work of each layer, and of the loss, in one run of a watched model.

    Args:
        watch: the model.
        inputs: the inputs of a micro-batch.
        precision: returns the context of the forward.
    """
    counter = _WorkCounter(watch, inputs)
    with count_saved(watch.parts, saved=counter.saved), counter:
        watch.run(inputs, precision, counter)
    return counter.result()


@dataclass
class _Alive:
    """The bytes of some tensors that are alive."""

    nbytes: int = 0


@dataclass
class _Tally:
    """The work so far of a layer's forward or backward.

    Attributes:
        alive: the new tensors, of which the peak is taken: of this forward, or of all backwards.
        held_bytes: in a backward, the peak of the new tensors and of those that the layer's forward
            made. What autograd saved is freed on the way.
    """

    alive: _Alive = field(default_factory=_Alive)
    flops: float = 0
    bytes: int = 0
    product_bytes: int = 0
    operators: int = 0
    peak_bytes: int = 0
    held_bytes: int = 0

    def work(self) -> Work:
        return Work(self.flops, self.bytes, self.product_bytes, self.operators, self.peak_bytes)


@dataclass(eq=False)
class _Stored:
    """A storage.

    Attributes:
        storage: the storage; the reference is empty when it has been freed.
        nbytes: its bytes.
        layer: the layer that made it; for a constant, the first that reads it.
        is_made: whether an operator of the run made it.
        uses: for each tensor with this storage, by its layout, the layer that made it, the last
            one that read it, and its bytes; None for a constant, which every stage has.
    """

    storage: weakref.ref[UntypedStorage]
    nbytes: int
    layer: int
    is_made: bool
    uses: dict[Any, tuple[int, int, int]] | None = field(default_factory=dict)

    def note(self, tensor: Tensor, layer: int) -> None:
        """Notes that `layer` makes or reads a tensor."""
        if self.uses is not None:
            layout = tensor.storage_offset(), tensor.size(), tensor.stride()
            first, last, size = self.uses.get(layout) or (layer, layer, byte_size(tensor))
            self.uses[layout] = first, max(last, layer), size

    def crossing(self, cut: int, since: int = 0) -> int:
        """Returns the bytes that cross the cut behind layer `cut`.

        Args:
            cut: the layer before the cut.
            since: the first layer whose values count.
        """
        sizes = [
            size for first, last, size in (self.uses or {}).values() if since <= first <= cut < last
        ]
        # views of one storage overlap
        return max(max(sizes), min(sum(sizes), self.nbytes)) if sizes else 0


class _SavedByLayer(Saved):
    """The storages that autograd keeps, and the first layer that saves each.

    Args:
        watch: tells which layer runs.
    """

    def __init__(self, watch: LayerWatch) -> None:
        super().__init__()
        self._watch = watch
        self.first_savers: dict[int, int] = {}

    def note(self, storage: int, nbytes: int) -> None:
        super().note(storage, nbytes)
        self.first_savers.setdefault(storage, self._watch.layer)


class _WorkCounter(TorchDispatchMode):
    """Counts the operators of a run, by layer.

    Views read and write no bytes.
    """

    def __init__(self, watch: LayerWatch, inputs: Any) -> None:
        super().__init__()
        self.saved = _SavedByLayer(watch)
        layers = len(watch.names)
        self._last_layer = len(watch.modules) - 1  # without the loss
        self._forward = [_Tally() for _ in range(layers)]
        in_backwards = _Alive()  # a layer's gradient is another layer's new tensor
        self._backward = [_Tally(in_backwards) for _ in range(layers)]
        self._tally: _Tally | None = None
        self._layer = 0
        self._is_forward = True
        self._activations = [0] * layers
        self._later = [0] * layers  # those that only later layers save
        self._made = [0] * layers  # the activations that are not inputs or constants
        counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_ON_CPU)
        self._flops: dict[Any, Callable[..., int]] = counter.flop_registry
        self._stored: dict[int, _Stored] = {}  # by storage_id
        self._crossed: dict[_Stored, None] = {}  # in order
        self._output_bytes = 0
        # the weights, which every stage has
        parts = (*watch.parts.parameters(), *watch.parts.buffers())
        self._weights = {storage_id(tensor) for tensor in parts}
        self._inputs = {self._entry(tensor): tensor for tensor in tensors_of(inputs)}
        for entry, tensor in self._inputs.items():
            entry.note(tensor, 0)

    def forward_begins(self, layer: int) -> None:
        """Counts for the forward of a layer."""
        self._layer, self._tally = layer, self._forward[layer]

    def forward_ends(self, output: Any) -> None:
        """Counts what the model returns as read by the last layer."""
        outputs: dict[_Stored, list[Tensor]] = {}
        for tensor in tensors_of(output):
            if storage_id(tensor) not in self._weights:
                entry = self._entry(tensor)
                self._read(entry, tensor, self._last_layer)
                outputs.setdefault(entry, []).append(tensor)
        self._tally = None
        self._output_bytes = sum(max(map(byte_size, same)) for same in outputs.values())

    def backward_begins(self, layer: int) -> None:
        """Counts for the backward of a layer."""
        if self._is_forward:
            self._is_forward = False
            self._attribute_saved()
        self._layer, self._tally = layer, self._backward[layer]

    def result(self) -> list[LayerWork]:
        """Returns the work of each layer; the run is over."""
        if self._is_forward:
            self._attribute_saved()
        crossing = [
            sum(entry.crossing(cut) for entry in self._crossed) for cut in range(self._last_layer)
        ]
        crossing += [self._output_bytes, 0]
        result = []
        received = 0
        for layer, handed_on in enumerate(crossing[: len(self._forward)]):
            forward, backward = self._forward[layer], self._backward[layer]
            made, later = self._made[layer], self._later[layer]
            # an input counts in the forward even if a backward needs it too
            held = max(0, forward.peak_bytes - made) + received, backward.held_bytes - made
            kept = later
            if layer < self._last_layer:
                kept = sum(entry.crossing(layer, since=layer) for entry in self._crossed)
                if layer == 0:  # it starts from the inputs of the model
                    alone = (t for entry, t in self._inputs.items() if not entry.crossing(0))
                    kept += sum(map(byte_size, alone))
            elif layer > self._last_layer:  # the loss is not recomputed
                kept = self._activations[layer]
            result.append(
                LayerWork(
                    *(forward.work(), backward.work(), self._activations[layer], max(held)),
                    *(handed_on, later, kept),
                )
            )
            received = handed_on
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        formula = self._flops.get(packet)
        if formula is None and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        tally = self._tally
        if tally is None or not (outputs := tensors_of(result)):  # or a query, such as the device
            return result
        if not self._is_forward and adds_up_gradients():
            return result  # fake tensors need copies for it, real tensors do not
        tally.operators += 1
        is_view = getattr(func, "is_view", False) or func is _aten._unsafe_view.default
        if is_view and not self._is_forward:
            return result
        read = tensors_of((args, kwargs))
        if not is_view:
            nbytes = sum(map(byte_size, (*read, *outputs)))
            tally.bytes += nbytes
            if formula is not None:
                tally.flops += formula(*args, **kwargs, out_val=result)
                tally.product_bytes += nbytes
        numbers = {storage_id(tensor) for tensor in read}
        if self._is_forward:
            for tensor in read:
                if storage_id(tensor) not in self._weights:
                    # `torch.tensor` makes its tensor without an operator, and lifts it
                    is_new = func is _aten.lift_fresh.default
                    self._read(self._entry(tensor, is_new=is_new), tensor, self._layer)
        self._note_outputs(outputs, numbers, tally)
        return result

    def _note_outputs(
        self, outputs: Sequence[Tensor], numbers: Collection[int], tally: _Tally
    ) -> None:
        """Notes the tensors that an operator returned; `numbers` are the storages it read."""
        for tensor in outputs:
            number = storage_id(tensor)
            if number in self._weights:
                continue
            if number not in numbers and self._known(number, tensor) is None:
                tally.alive.nbytes += self._entry(tensor, tally.alive).nbytes
            if self._is_forward:
                self._entry(tensor).note(tensor, self._layer)
        tally.peak_bytes = max(tally.peak_bytes, tally.alive.nbytes)
        if not self._is_forward:
            of_forward = self._forward[self._layer].alive.nbytes
            tally.held_bytes = max(tally.held_bytes, tally.alive.nbytes + of_forward)

    def _read(self, entry: _Stored, tensor: Tensor, layer: int) -> None:
        entry.note(tensor, layer)
        if entry.layer < layer:
            self._crossed[entry] = None

    def _known(self, number: int, tensor: Tensor) -> _Stored | None:
        entry = self._stored.get(number)
        if entry is None or entry.storage() is not tensor.untyped_storage():
            return None
        return entry

    def _entry(
        self, tensor: Tensor, alive: _Alive | None = None, *, is_new: bool = True
    ) -> _Stored:
        """Returns what is known of a tensor's storage.

        Args:
            tensor: the tensor.
            alive: where a new storage counts until it is freed.
            is_new: whether an unknown storage is a new one; otherwise it is a constant.
        """
        number = storage_id(tensor)
        entry = self._known(number, tensor)
        if entry is None:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            freed = partial(self._free, number, nbytes, alive)
            entry = _Stored(weakref.ref(storage, freed), nbytes, self._layer, alive is not None)
            if not is_new:
                entry.uses = None
            self._stored[number] = entry
        return entry

    def _free(self, number: int, nbytes: int, alive: _Alive | None, storage: object) -> None:
        if alive is not None:
            alive.nbytes -= nbytes
        if number in self._stored and self._stored[number].storage is storage:
            del self._stored[number]

    def _attribute_saved(self) -> None:
        """Counts what autograd has saved for the layers that made it."""
        for number, nbytes in self.saved.storages.items():
            entry = self._stored.get(number)
            layer = self._layer if entry is None else entry.layer
            self._activations[layer] += nbytes
            if self.saved.first_savers[number] > layer:
                self._later[layer] += nbytes
            if entry is not None and entry.is_made:
                self._made[layer] += nbytes
