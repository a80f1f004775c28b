"""The code between layers: it runs in the stage of the layer before it, and cuts what it uses.

A micro-batch's forward builds one autograd graph. To run the stages' backwards one after another,
each value of an earlier stage is cut out of that graph where a later stage uses it:

    stage 0        x ----------------------------+
                   | cut                         | cut
    stage 1        x' (the same memory) --- ...  x'
                                                 | cut
    stage 2                                      x'' ---- loss

A `CutValue` is a stage's own name for such a value, and collects its gradient. A value that skips
stages has an alias in each of them, so that gradients are added in the order in which one backward
through the whole graph would add them.

Which stage made a tensor is read from PyTorch: autograd numbers the nodes of each thread in the
order of their creation, so the stages of a micro-batch are ranges of numbers. Nothing is attached
to tensors, so views, in-place changes and outputs of any kind need no special care.

`Glue` is the TorchFunctionMode that looks at the arguments of each operation between layers.
Function modes do not see two entries into autograd, which `watch_autograd` wraps:
`Function.apply`, and the backward that a forward may run itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hybridtrain._base.torch_private import leave_uncompiled, replace_backward_entry
from hybridtrain.errors import SplitError
from hybridtrain.head import without_lazy
from hybridtrain.pipeline import transfer

if TYPE_CHECKING:
    from hybridtrain.pipeline.forward.trip import Trip


# Leaves of arguments that are not tensors and hold none, by far the most frequent.
PLAIN = frozenset(
    (
        *(int, float, bool, str, type(None), slice, type(...)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    )
)


_tensor: Any = Tensor  # whose attributes are descriptors

DESCRIBING = frozenset(
    (
        *(_tensor.shape.__get__, _tensor.dtype.__get__, _tensor.ndim.__get__),
        *(_tensor.layout.__get__, _tensor.requires_grad.__get__, _tensor.is_leaf.__get__),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    )
)
"""Functions that neither read values nor add to the graph.

A tensor of an earlier stage need not be cut, nor copied to another device, to answer them.
"""

# What these see or change is the whole gradient of a tensor, of all stages.
_OF_GRADIENT = frozenset(
    (
        *(Tensor.register_hook, Tensor.retain_grad, _tensor.retains_grad.__get__),
        *(_tensor.grad_fn.__get__, _tensor.grad.__get__),
    )
)

DEVICE = _tensor.device.__get__

GRADIENT_OVER_CUT = (
    "the forward computes a gradient across a stage boundary, as for a force or a gradient "
    "penalty does: cut the model elsewhere, so that this code and the layers that it "
    "differentiates are in one stage"
)

LATE_GRADIENT = (
    "a gradient reaches a value of an earlier stage after the backward of the stage that uses it: "
    "the forward makes a value in a thread of its own, so the pipeline cannot tell to which stage "
    "the value belongs; compute it in the thread of the forward, or inside one layer"
)


class CutValue:
    """A stage's own name for a value of the stage before, and the gradient that it gets.

    Attributes:
        source: the value: of the stage before, or that stage's own alias.
        value: a tensor with the same memory, on the stage's device.
        version: the version counter of `value` when it was made.
        node: the graph node of the cut.
        gradient: the sum of the gradients that have arrived.
        is_sent: whether the stage before has got the gradient.
    """

    __slots__ = ("gradient", "is_sent", "node", "source", "value", "version")

    source: Tensor
    value: Tensor
    version: int
    node: Node | None

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.gradient: Tensor | None = None
        self.is_sent = False

    def forget_graph(self) -> None:
        """Drops the tensors: the graph has what it needs of them, and holds this."""
        del self.source
        if hasattr(self, "value"):  # else making it has failed
            del self.value, self.node


class Cut(torch.autograd.Function):
    """Begins a new graph at a value: neither a leaf nor a view, so that layers may change it.

    Its gradient ends here as it arrives. The `grad` of a leaf would be copied to the leaf's
    strides, and later sums would round differently.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, cut_leaf: Tensor, trip: Trip, alias: CutValue, device: torch.device
    ) -> Tensor:
        ctx.trip, ctx.alias = trip, alias
        # not an argument, which would be in the graph of the stage before
        source = alias.source
        return source.detach() if source.device == device else copied(source, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: D102
        # The stage before runs its backward later, with the gradient of the loss alone.
        if ctx.trip.is_in_forward:
            raise SplitError(GRADIENT_OVER_CUT)
        alias = ctx.alias
        if alias.is_sent:
            raise SplitError(LATE_GRADIENT)
        # Out of place: autograd may have given the first gradient to others too.
        alias.gradient = gradient if alias.gradient is None else alias.gradient + gradient
        return None, None, None, None


_UNWATCHED: set[type] = {Cut}


def unwatched(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Marks a function that gets only a stage's own names, so that nothing looks at each call."""
    _UNWATCHED.add(function)
    return function


class Glue(TorchFunctionMode):
    """Sees each operation between layers; those inside layers only if a layer needs it.

    Attributes:
        is_off: True while operations pass without a look.
    """

    def __init__(self, trip: Trip) -> None:
        super().__init__()
        self._trip: Trip | None = trip
        self.is_off = False

    def forget_trip(self) -> None:
        """Breaks the reference cycle between the trip and this object."""
        self._trip = None

    def off(self) -> AbstractContextManager[None]:
        """Lets operations in the block pass."""
        return _Off(self)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        trip = self._trip
        # The cheapest questions first: this runs at every operation between layers.
        if trip is None or self.is_off or not trip.looks or func in DESCRIBING:
            return func(*args, **kwargs or {})
        # Dynamo would trace the questions below about its own tensors; the compiled code calls a
        # custom function, which `watch_autograd` sees.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs or {})
        if func in _OF_GRADIENT:
            # What this asks of tensors is seen by the mode as well.
            with self.off():
                if func is Tensor.register_hook:
                    trip.check_hook(args[0])
                return func(trip.with_whole_gradient(args[0]), *args[1:], **kwargs or {})
        if func is DEVICE:
            with self.off():
                return trip.device_of(args[0])
        args = trip.cut_all(args)
        return func(*args, **trip.cut_all(kwargs) if kwargs else {})


class _Off(AbstractContextManager[None]):
    """The context manager of `Glue.off`; a class for speed, because every layer enters it."""

    __slots__ = ("_glue", "_was_off")

    def __init__(self, glue: Glue) -> None:
        self._glue = glue

    def __enter__(self) -> None:
        self._was_off, self._glue.is_off = self._glue.is_off, True

    def __exit__(self, *error: object) -> None:
        self._glue.is_off = self._was_off


class OnDevice(TorchFunctionMode):
    """Copies values of other stages to the device of a layer that is recomputed.

    Args:
        device: the device of the layer.
        devices: the devices of all stages.
    """

    def __init__(self, device: torch.device, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._device = device
        self._others = set(devices) - {device}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and args[0].device in self._others:
            return self._device
        if func is DEVICE or func in DESCRIBING or torch.compiler.is_compiling():
            return func(*args, **kwargs or {})
        args, kwargs = tree_map_only(Tensor, self._copy_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _copy_of(self, tensor: Tensor) -> Tensor:
        if tensor.device not in self._others:
            return tensor
        # The tensor is kept with its copy, so that its id stays its own.
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor, copied(tensor, self._device)
        return self._copies[id(tensor)][1]


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a detached copy of a tensor on another device, usable in the current stream."""
    # Of the kind of forwards, behind whose copies it queues in the side stream.
    value: Tensor = transfer.receive(transfer.send(tensor, tensor.device, device, "F"), device)
    return value


class _Here(threading.local):
    trip: Trip | None = None


here = _Here()
"""The trip that runs in this thread, if any."""


@functools.cache
def watch_autograd() -> None:
    """Wraps `Function.apply` and the entry of all backwards, once per process.

    `TorchFunctionMode` does not see custom functions: without this, one between layers would keep
    the graph of an earlier stage, or get lazy logits as a leaf.
    """
    function: Any = torch.autograd.Function
    apply = function.__dict__.get("apply") or function.apply

    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls in _UNWATCHED:
            return apply.__get__(None, cls)(*args, **kwargs)
        trip = here.trip
        args, kwargs = without_lazy(args), without_lazy(kwargs) if kwargs else kwargs
        if trip is not None and trip.looks_in_functions:
            with trip.glue.off():  # or the mode would see how this looks at the tensors
                args, kwargs = trip.cut_all(args), trip.cut_all(kwargs) if kwargs else kwargs
        return apply.__get__(None, cls)(*args, **kwargs)

    leave_uncompiled(watched)  # Dynamo fails at the call of a class method of C
    function.apply = classmethod(watched)
    # For the process, and harmless outside of trips: `here.trip` is then None.
    replace_backward_entry(_before_backward, _after_backward, _explain)


def _before_backward(inputs: Any) -> None:
    """Refuses a gradient that a forward takes with respect to a value of an earlier stage."""
    trip = here.trip
    if trip is not None and trip.is_in_forward and trip.stage:
        with trip.glue.off():
            trip.check_inner_gradient(inputs)


def _after_backward(gradients: Any) -> None:
    """Notes the stage of gradients that have a graph: on a GPU, another thread makes its nodes."""
    trip = here.trip
    if trip is not None and trip.is_cut and trip.is_in_forward and gradients:
        with trip.glue.off():
            trip.note_own(gradients)


def _explain(error: RuntimeError) -> None:
    """Attributes a gradient that does not reach a value of an earlier stage to the cut."""
    trip = here.trip
    is_lost = "been used in the graph" in str(error)
    if is_lost and trip is not None and trip.is_in_forward and trip.stage:
        raise SplitError(GRADIENT_OVER_CUT) from error
