"""Restoring buffers after a step that is not finite, and finding the origin of the value.

A forward changes running statistics and counters in place, and a batch that is not finite would
leave NaN in them forever, so `BufferSnapshot` stores their previous values. `find_origin` repeats
the forward of a `StepInProgress`, and names the first module, loss or gradient that is not finite.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves

from hybridtrain._base.accelerator import put
from hybridtrain.loss import LossFn, microbatch_weights
from hybridtrain.model import HybridModel
from hybridtrain.pipeline import HeadOutput
from hybridtrain.step.in_progress import StepInProgress


class _Place:
    """The place of a buffer, and its value in a `BufferSnapshot`.

    Attributes:
        taken: the buffer; it may be None, which a forward may replace.
        version: its version.
        copy: its values.
        unversioned: True if its values may change without a new version, as in a batch norm.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.taken: Tensor | None = None
        self.version = -1
        self.copy = torch.empty(0)
        self.unversioned = isinstance(module, _NormBase)

    @property
    def buffer(self) -> Tensor | None:
        """The current buffer."""
        return self.module._buffers.get(self.name)

    @property
    def may_have_changed(self) -> bool:
        """True if the current buffer may differ from the snapshot."""
        buffer = self.buffer
        if buffer is not self.taken:  # replaced or deleted
            return True
        if buffer is None:
            return False
        return buffer._version != self.version or (self.unversioned and self.module.training)


class BufferSnapshot:
    """Stores copies of the buffers of `net`; `take` copies the buffers changed since the last call.

    Masks and other constants are copied once, by the first `take`. A tensor's version reveals
    changes in place, except a batch norm's: these are detected by type, or by a single comparison
    in the second `take`. If buffers or modules were replaced since the last `take`, it starts over.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._look()

    def _look(self) -> None:
        """Records the current places of the buffers."""
        modules = list(self._net.modules())
        # TorchScript's buffers cannot be replaced
        plain_modules = [
            module for module in modules if not isinstance(module, torch.jit.ScriptModule)
        ]
        self._names = [(module, frozenset(module._buffers)) for module in plain_modules]
        # live views of the modules: the names of buffers, and the submodules
        self._held = [
            view for m in plain_modules for view in (m._buffers.keys(), m._modules.values())
        ]
        self._lengths = list(map(len, self._held))
        self._members = list(chain.from_iterable(self._held))
        self._places = [
            _Place(module, name)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is None or not (buffer.is_inference() or buffer.is_meta)
        ]
        self._takes = 0

    def take(self) -> None:
        """Copies the buffers that may have changed."""
        is_same = list(map(len, self._held)) == self._lengths
        if not is_same or list(chain.from_iterable(self._held)) != self._members:
            self._look()
        self._takes += 1
        if self._takes == 2:  # find buffers that a step has changed without a new version
            for place in self._places:
                if place.taken is not None and not place.may_have_changed:
                    place.unversioned |= not torch.equal(place.taken, place.copy)
        if not self._places:
            return
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]]
        groups = defaultdict(lambda: ([], []))
        for place in self._places:
            if not place.may_have_changed:
                continue
            buffer, before = place.buffer, place.taken
            place.taken, place.version = buffer, -1 if buffer is None else buffer._version
            if buffer is not None:
                if buffer is not before:
                    place.copy = torch.empty_like(buffer)
                copies, buffers = groups[buffer.device, buffer.dtype]
                copies.append(place.copy)
                buffers.append(buffer)
        for copies, buffers in groups.values():
            with torch.no_grad():
                torch._foreach_copy_(copies, buffers)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the values of the last `take`; removes new buffers."""
        for module, names in self._names:
            for name in module._buffers.keys() - names:
                delattr(module, name)
        for place in self._to_restore():
            place.module._buffers[place.name] = place.taken
            if place.taken is not None:
                place.taken.copy_(place.copy)
                place.version = place.taken._version

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Restores the buffers where `flag` is true, on their devices.

        `flag` is a 0-dim tensor, and the host does not wait for it. A buffer that was created,
        deleted, or replaced by one of a different shape is left unchanged.
        """
        flags: dict[torch.device, Tensor] = {}
        for place in self._to_restore():
            buffer = place.buffer
            if buffer is None or place.taken is None or buffer.shape != place.copy.shape:
                continue
            here = flags.setdefault(buffer.device, put(flag, buffer.device))
            buffer.copy_(torch.where(here, place.copy, buffer))

    def _to_restore(self) -> list[_Place]:
        # before the first step nothing has been compared, and every copy is new
        return [p for p in self._places if self._takes < 2 or p.may_have_changed]


def non_finite_names(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors with values that are not finite; waits for devices."""
    candidates = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    floats = {
        name: value
        for name, value in candidates.items()
        if _is_float(value) and value.numel() and not value.is_meta
    }
    # one pass and one wait in the usual case; the largest magnitude, because it cannot overflow
    if math.isfinite(float(get_total_norm(floats.values(), math.inf))):
        return []
    return [name for name, value in floats.items() if not _all_finite(value)]


def find_origin(
    model: HybridModel, trained: StepInProgress, loss_fn: LossFn | None, gradients: bool = True
) -> str:
    """Returns the origin of a step's first value that is not finite, for a message.

    Repeats the forward with the step's random numbers and checks the output of every module, then
    the loss, then the step's gradients. A collective call of all processes.

    Args:
        model: the model, with the buffers from before the step; it is left unchanged.
        trained: the step in progress.
        loss_fn: as in the step; None if its losses were finite.
        gradients: whether the gradients are still those of the step.
    """
    origin = _origin_in_forward(model, trained, loss_fn)
    origins = [
        (place, rank) for rank, place in enumerate(model.world.gather(origin)) if place is not None
    ]
    if origins:
        (_, _, _, where), rank = min(origins)
        return where + f" (rank {rank})" * (model.world.size > 1)
    in_backward = _origin_in_backward(model) if gradients else None
    backwards = [place for place in model.world.gather(in_backward) if place]
    if not backwards:
        return "no single layer: a second forward of the batch is finite"
    return max(backwards, key=lambda place: place[0])[1]


def largest_gradient(model: HybridModel) -> str:
    """Returns the gradient with the largest value, for a message; a collective call."""
    magnitudes = [
        (float(gradient.abs().max()), name)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and (gradient := parameter.grad).numel() > 0
    ]
    largest = max(magnitudes, default=(0.0, "no parameter"))
    value, name = max(model.world.gather(largest))
    return f"the gradient of {name}, with values up to {value:.3g}"


# (stage, or -1 before the first and the number of stages for the loss; its place; the text)
_Origin = tuple[int, int, int, str]


class _Watch:
    """Records the modules with outputs that are not finite, in the order of the calls."""

    def __init__(self, model: HybridModel) -> None:
        names = {id(module): name for name, module in model.net.named_modules()}
        self._places: dict[int, tuple[int, str]] = {}
        for stage in model.stages:
            for layer in stage.layers:
                for name, module in layer.module.named_modules(prefix=layer.name):
                    layer_name = names.get(id(module)) or (name if module is layer.module else "")
                    self._places.setdefault(id(module), (stage.index, layer_name or layer.name))
        self.batch = 0
        self.found: list[tuple[bool, _Origin]] = []
        self._calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1  # in the order of the stage's thread; stages are kept apart
        if id(module) not in self._places or not (bad := _bad(output)):
            return
        stage, name = self._places[id(module)]
        where = f"stage {stage}, layer {name!r}: "
        # an alias, if another stage has the parameter
        parameters = {key: getattr(module, key) for key in module._parameters}
        parameters = {key: value for key, value in parameters.items() if value is not None}
        if poisoned := [key for key, value in parameters.items() if not _all_finite(value)]:
            where += f"its parameter {poisoned[0]!r} is not finite"
        else:
            where += f"its output {bad}, and its inputs and parameters are finite"
            if _bad(args):
                where = where.partition(", and")[0] + ", and its input is not finite either"
        self.found.append((bad == _MINUS_INF, (stage, self.batch, self._calls, where)))


def _origin_in_forward(
    model: HybridModel, trained: StepInProgress, loss_fn: LossFn | None
) -> _Origin | None:
    """Returns the first non-finite place in this process's forward; None if all is finite."""
    watch = _Watch(model)
    last = len(model.plan.stages)
    ends: list[_Origin] = []
    factors: Iterator[float]

    def measure(output: Any, targets: Any) -> None:
        if (
            loss_fn is None
            or not next(factors)  # without counted elements, the loss is NaN by definition
            or _bad(output)
            or not (bad := _bad(loss_fn(output, targets)))
        ):
            return  # if the output is not finite, a layer is the cause
        layer = model.stages[-1].layers[-1].name
        text = f"stage {last - 1}, the loss after layer {layer!r}: it {bad}, for a finite output"
        text += " and targets that are not finite" * bool(_bad(targets))
        ends.append((last, watch.batch, 0, text))

    snapshot = BufferSnapshot(model.net)
    snapshot.take()
    step = model.rng.step
    model.rng.step = trained.rng_step  # the same dropout masks as in the step
    hook = register_module_forward_hook(watch)
    # compiled layers do not call hooks that were added after compilation
    stance = torch.compiler.set_stance("force_eager")
    try:
        with stance:
            for watch.batch, (inputs, targets) in enumerate(trained.batches):
                if bad := _bad(inputs):
                    text = f"the inputs of the batch, before stage 0: a tensor {bad}"
                    ends.append((-1, watch.batch, 0, text))
                if trained.by_microbatch:
                    with torch.no_grad():
                        model.run_microbatches(inputs, lambda *_: HeadOutput(None), trains=False)
                    continue
                if loss_fn is not None:
                    loss, batch = model.resolve_loss(loss_fn), (inputs, targets)
                    factors = iter(microbatch_weights(loss, batch, model.options.chunks))
                model.map_outputs(inputs, targets, measure)
    finally:
        hook.remove()
        model.rng.step = step
        snapshot.restore()
    # -inf may be intended, as in a mask or as the logarithm of a probability
    certain = [place for doubtful, place in watch.found if not doubtful] + ends
    return min(certain or [place for _, place in watch.found], default=None)


def _origin_in_backward(model: HybridModel) -> tuple[int, str] | None:
    """Returns the last layer (the first in the backward) with a gradient that is not finite.

    Only for this process: the stage, and the text.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage in reversed(model.stages):
        for layer in reversed(stage.layers):
            for parameter in reversed(list(layer.module.parameters())):
                if parameter.grad is not None and not _all_finite(parameter.grad):
                    return stage.index, (
                        f"stage {stage.index}, the backward of layer {layer.name!r}: the gradient "
                        f"of {names.get(id(parameter), 'a parameter')} is not finite, but the "
                        f"forward is"
                    )
    return None


_MINUS_INF = "has -inf"


def _bad(values: Any) -> str:
    """Returns the non-finite values in a pytree: "has NaN", "has inf", "has -inf" or ""."""
    wrong = ""
    for value in tree_leaves(values):
        if not isinstance(value, Tensor) or not _is_float(value) or _all_finite(value):
            continue
        if bool(value.isnan().any()):
            return "has NaN"
        if value.is_complex() or bool((value > 0).logical_and(value.isinf()).any()):
            wrong = "has inf"
        wrong = wrong or _MINUS_INF
    return wrong


def _is_float(value: Tensor) -> bool:
    # float8 has no comparison operators
    return (value.is_floating_point() and value.dtype.itemsize > 1) or value.is_complex()


def _all_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())
