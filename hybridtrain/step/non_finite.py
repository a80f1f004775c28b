"""The buffers of before a step that is not finite, and the place where it began.

A forward changes running statistics and counters in place, and a batch that is not finite would
leave NaN in them for ever, so `BufferSnapshot` keeps what they were. `find_origin` repeats the
forward of a `StepInProgress`, and names the first module, loss or gradient that is not finite.
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
from hybridtrain.graph import looks_only
from hybridtrain.loss import LossFn, microbatch_weights
from hybridtrain.model import HybridModel
from hybridtrain.pipeline import HeadOutput
from hybridtrain.step.in_progress import StepInProgress


class _Place:
    """The place of a buffer, and what a `BufferSnapshot` has taken there.

    Attributes:
        taken: the buffer; None is one too, which a forward may fill.
        version: of it.
        copy: its values.
        unversioned: its values may change under one version, as those of a batch norm do.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.taken: Tensor | None = None
        self.version = -1
        self.copy = torch.empty(0)
        self.unversioned = isinstance(module, _NormBase)

    @property
    def buffer(self) -> Tensor | None:
        """The buffer that is there now."""
        return self.module._buffers.get(self.name)

    @property
    def may_have_changed(self) -> bool:
        """True if what is there may not be what was taken."""
        buffer = self.buffer
        if buffer is not self.taken:  # replaced or deleted
            return True
        if buffer is None:
            return False
        return buffer._version != self.version or (self.unversioned and self.module.training)


class BufferSnapshot:
    """Keeps copies of the buffers of `net`; a `take` copies those that have changed since the last.

    Masks and other constants are copied once, by the first `take`. A tensor's version tells of
    changes in place, but not of a batch norm's own: these are seen by their type, or by comparing
    once, at the second `take`. Where buffers or modules are others than at the last `take`, it
    begins anew.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._look()

    def _look(self) -> None:
        """Notes where the buffers are now."""
        modules = list(self._net.modules())
        # TorchScript's buffers cannot be replaced
        own = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._names = [(module, frozenset(module._buffers)) for module in own]
        # views, which follow the modules: the names of buffers, and the submodules
        self._held = [view for m in own for view in (m._buffers.keys(), m._modules.values())]
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
        if self._takes == 2:  # what a step has changed under the same version
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
        """Gives the buffers the values that they had at the last `take`; removes new ones."""
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
        """Gives the buffers back their values where `flag` is true, on their devices.

        No host waits for the flag, a 0-dim tensor. A buffer that was made, deleted, or replaced by
        one of another shape is left unchanged.
        """
        flags: dict[torch.device, Tensor] = {}
        for place in self._to_restore():
            buffer = place.buffer
            if buffer is None or place.taken is None or buffer.shape != place.copy.shape:
                continue
            here = flags.setdefault(buffer.device, put(flag, buffer.device))
            buffer.copy_(torch.where(here, place.copy, buffer))

    def _to_restore(self) -> list[_Place]:
        # at the first step nothing is known yet, and every copy is new
        return [p for p in self._places if self._takes < 2 or p.may_have_changed]


def non_finite_names(tensors: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tensors that have a value that is not finite; waits for devices."""
    own = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    floats = {
        name: value
        for name, value in own.items()
        if _is_float(value) and value.numel() and not value.is_meta
    }
    # one pass and one wait in the usual case; the largest magnitude, since it cannot overflow
    if math.isfinite(float(get_total_norm(floats.values(), math.inf))):
        return []
    return [name for name, value in floats.items() if not _all_finite(value)]


def find_origin(
    model: HybridModel, trained: StepInProgress, loss_fn: LossFn | None, gradients: bool = True
) -> str:
    """Returns where a step first met a value that is not finite, for a message.

    Repeats the forward, with the draws of the step, and looks at the output of every module; then
    at the loss; then at the gradients that the step has left. A collective call, of all processes.

    Args:
        model: as the step began: its buffers must be those of before. They are left unchanged.
        trained: what the step was trained on.
        loss_fn: as in the step; None if its losses were finite.
        gradients: whether the gradients are still those of the step.
    """
    own = _origin_in_forward(model, trained, loss_fn)
    found = [(each, rank) for rank, each in enumerate(model.world.gather(own)) if each is not None]
    if found:
        (_, _, _, where), rank = min(found)
        return where + f" (rank {rank})" * (model.world.size > 1)
    in_backward = _origin_in_backward(model) if gradients else None
    backwards = [each for each in model.world.gather(in_backward) if each]
    if not backwards:
        return "no single layer: a second forward of the batch is finite"
    return max(backwards, key=lambda each: each[0])[1]


def largest_gradient(model: HybridModel) -> str:
    """Returns the gradient with the largest value, for a message; a collective call."""
    found = [
        (float(gradient.abs().max()), name)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and (gradient := parameter.grad).numel() > 0
    ]
    own = max(found, default=(0.0, "no parameter"))
    value, name = max(model.world.gather(own))
    return f"the gradient of {name}, with values up to {value:.3g}"


# (stage, or -1 before the first and the number of stages for the loss; its place; the text)
_Origin = tuple[int, int, int, str]


class _Watch:
    """Notes the outputs of modules that are not finite, in the order of the calls."""

    def __init__(self, model: HybridModel) -> None:
        names = {id(module): name for name, module in model.net.named_modules()}
        self._places: dict[int, tuple[int, str]] = {}
        for stage in model.stages:
            for layer in stage.layers:
                for name, module in layer.module.named_modules(prefix=layer.name):
                    known = names.get(id(module)) or (name if module is layer.module else "")
                    self._places.setdefault(id(module), (stage.index, known or layer.name))
        self.batch = 0
        self.found: list[tuple[bool, _Origin]] = []
        self._calls = 0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls += 1  # in the order of the thread that runs the stage; stages are told apart
        if id(module) not in self._places or not (bad := _bad(output)):
            return
        stage, name = self._places[id(module)]
        where = f"stage {stage}, layer {name!r}: "
        # an alias where another stage has the parameter
        parameters = {key: getattr(module, key) for key in module._parameters}
        parameters = {key: value for key, value in parameters.items() if value is not None}
        if poisoned := [key for key, value in parameters.items() if not _all_finite(value)]:
            where += f"its parameter {poisoned[0]!r} is not finite"
        else:
            where += f"its output {bad}, and its inputs and parameters are finite"
            if _bad(args):
                where = where.partition(", and")[0] + ", and what it was given is not finite either"
        self.found.append((bad == _MINUS_INF, (stage, self.batch, self._calls, where)))


def _origin_in_forward(
    model: HybridModel, trained: StepInProgress, loss_fn: LossFn | None
) -> _Origin | None:
    """Returns the first place of this process's forward; None if all of it is finite."""
    watch = _Watch(model)
    last = len(model.plan.stages)
    ends: list[_Origin] = []
    factors: Iterator[float]

    def measure(output: Any, targets: Any) -> None:
        if (
            loss_fn is None
            or not next(factors)  # the loss of what counts nothing is NaN by right
            or _bad(output)
            or not (bad := _bad(loss_fn(output, targets)))
        ):
            return  # of an output that is not finite, a layer is the cause
        layer = model.stages[-1].layers[-1].name
        text = f"stage {last - 1}, the loss after layer {layer!r}: it {bad}, of a finite output"
        text += " and targets that are not finite" * bool(_bad(targets))
        ends.append((last, watch.batch, 0, text))

    snapshot = BufferSnapshot(model.net)
    snapshot.take()
    step = model.rng.step
    model.rng.step = trained.rng_step  # the same masks of dropout as in the step
    hook = register_module_forward_hook(looks_only(watch))
    # compiled layers do not call hooks that they were not compiled with
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
    # -inf alone may be meant, as in a mask or as the logarithm of a probability
    certain = [place for doubtful, place in watch.found if not doubtful] + ends
    return min(certain or [place for _, place in watch.found], default=None)


def _origin_in_backward(model: HybridModel) -> tuple[int, str] | None:
    """Returns the last layer, so the first of the backward, with a gradient that is not finite.

    Of this process: the stage, and the text.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage in reversed(model.stages):
        for layer in reversed(stage.layers):
            for parameter in reversed(list(layer.module.parameters())):
                if parameter.grad is not None and not _all_finite(parameter.grad):
                    return stage.index, (
                        f"stage {stage.index}, the backward of layer {layer.name!r}: the gradient "
                        f"of {names.get(id(parameter), 'a parameter')} is not finite, and the "
                        f"forward is"
                    )
    return None


_MINUS_INF = "has -inf"


def _bad(values: Any) -> str:
    """Returns what is not finite in a pytree: "has NaN", "has inf", "has -inf" or nothing."""
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
    # float8 has no operators to look with
    return (value.is_floating_point() and value.dtype.itemsize > 1) or value.is_complex()


def _all_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())
