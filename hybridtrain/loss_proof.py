"""A proof in the first step with a loss: is it the mean, or the sum, that it is taken for?

Some samples are cut in two, and the loss of all is compared with the losses of the two parts:

    a mean    loss(both) = (count(a) loss(a) + count(b) loss(b)) / (count(a) + count(b))
    a sum     loss(both) = loss(a) + loss(b)

A loss that is contradicted by its own count is an error. A plain function, which is taken for a
mean over samples, may compare samples with one another on purpose: that is a warning. Losses of
PyTorch and of `hybridtrain.losses` are known, and are not looked at.

The samples of a plain function are those of the batch, as far as their outputs take little memory.
With a count they are those of one micro-batch, or two micro-batches of one sample each: the ones
whose parts both count, and most unevenly, since equal parts tell little of a count. Nothing is
proven of a loss that draws random numbers, raises an error for the parts, or is not finite, nor of
a method of an object that is not a module, which a call may change.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from hybridtrain import losses
from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.loss_counts import Loss, checked_loss, function_of, has_count, name_of
from hybridtrain.loss_weights import Counts
from hybridtrain.losses import LossFn, MeanLoss, SumLoss
from hybridtrain.microbatch import leaves_of, map_tensors, merge, split
from hybridtrain.output_loss import WAY_OUT
from hybridtrain.pipeline.layer_rng import default_generator_lock
from hybridtrain.pipeline.step import HeadOutput

_log = logging.getLogger(__name__)

# How far both sides may be apart, relative to the larger values, and at all. Sums in another order
# explain 1e-6; an output in half precision is rounded, and may tip when it is computed again.
_RELATIVE, _RELATIVE_OF_HALF, _ABSOLUTE = 1e-4, 1e-2, 1e-6

_KEPT_BYTES = 2**26  # of the outputs of earlier micro-batches


def kind_of(loss_fn: Any) -> Hashable:
    """Returns what two losses have in common that need only one proof.

    A lambda that is written in a loop is a new object each time, with the same code.
    """
    if isinstance(loss_fn, SumLoss | MeanLoss):
        return type(loss_fn), kind_of(function_of(loss_fn)), kind_of(loss_fn.count)
    if isinstance(loss_fn, functools.partial):
        return kind_of(loss_fn.func)
    kind: Any = type(loss_fn)
    found: Hashable = getattr(loss_fn, "__code__", kind)
    return found


def by_model(loss: Loss, targets: Any) -> bool:
    """Returns whether the model computes the loss itself, so that its output has no samples."""
    if function_of(loss) is losses.model_output:
        return True
    return targets is None and isinstance(loss, MeanLoss)


class LossProof:
    """Compares the loss of some samples of a batch with those of two parts of them.

    Attributes:
        inputs: both parts together, and each of them: the micro-batches of a forward that ends
            with `head`, if the loss comes out of the model. Otherwise the head of the training
            step calls `look`.

    Args:
        loss_fn: of the step.
        loss: the result of `with_count`.
        inputs, targets: of the batch, as its counts are given them.
        targets_there: the targets beside the model's outputs.
        sizes: of its micro-batches; two samples or more.
        warns: whether this process says what is only a warning.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        loss: Loss,
        inputs: Any,
        targets: Any,
        targets_there: Any,
        sizes: Sequence[int],
        warns: bool,
    ) -> None:
        self._loss_fn, self._loss, self._warns = loss_fn, loss, warns
        self._chunk_sizes, self._batch_targets = sizes, targets_there
        self._outputs: list[Any] = []
        self._values: list[Tensor] = []
        self._copy: Any = None
        self._half = False
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        # first sample, sizes of the parts, micro-batches
        cases = [
            (start, (size - size // 2, size // 2), range(number, number + 1))
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if size > 1
        ] or [(start, (1, 1), range(start, start + 2)) for start in starts[:-1]]
        counts: list[Sequence[float]] = [parts for _, parts, _ in cases]
        if isinstance(loss, MeanLoss):
            found = []
            for start, parts, _ in cases:
                pairs = zip(
                    self._parts(inputs, start, parts),
                    self._parts(targets, start, parts),
                    strict=True,
                )
                found += [loss.count(*pair) for pair in list(pairs)[1:]]
            numbers = Counts(found).numbers()
            counts = [numbers[at : at + 2] for at in range(0, len(numbers), 2)]
        uneven = [
            (bool(a and b), abs(a / parts[0] - b / parts[1]) / (a + b) if a + b else -1.0)
            for (a, b), (_, parts, _) in zip(counts, cases, strict=True)
        ]
        chosen = uneven.index(max(uneven))
        start, self._sizes, self._microbatches = cases[chosen]
        self._counts = counts[chosen]
        self.inputs = self._parts(inputs, start, self._sizes)
        self._targets = self._parts(targets_there, start, self._sizes)
        self._grows = not has_count(loss)
        if self._grows:
            self._microbatches = range(len(sizes))

    def _parts(self, batch: Any, start: int, parts: Sequence[int]) -> list[Any]:
        """Returns the samples from `start` on, together and in two parts."""
        rest = sum(self._chunk_sizes) - start - sum(parts)
        both = split(batch, [start, sum(parts), rest])[1]
        return [both, *split(both, parts)]

    def look(self, microbatch: int, output: Any) -> None:
        """Looks at the output of a micro-batch of the training step.

        Raises:
            ConfigError: the loss is not what it is said to be.
        """
        if microbatch not in self._microbatches:
            return
        leaves = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]
        if any(not t.dim() or t.shape[0] != self._chunk_sizes[microbatch] for t in leaves):
            self._microbatches = range(0)  # not cut along its samples
            return
        self._outputs.append(map_tensors(_single, output))
        if self._grows:
            size = sum(self._chunk_sizes[: microbatch + 1])
            kept = len(self._outputs) * sum(t.nbytes for t in leaves)
            if size > 1 and kept > _KEPT_BYTES:
                self._microbatches = range(microbatch + 1)
            self._sizes = self._counts = size - size // 2, size // 2
        if microbatch + 1 < self._microbatches.stop:
            return
        outputs, self._outputs = self._outputs, []
        try:
            both = outputs[0] if len(outputs) == 1 else merge(outputs)
        except (BatchError, RuntimeError):  # of other shapes, as where padding is cut off
            return
        if self._grows:
            self._targets = self._parts(self._batch_targets, 0, self._sizes)
        device = leaves[0].device if leaves else torch.device("cpu")
        with torch.autocast(device.type, enabled=False):
            for number, part in enumerate([both, *split(both, self._sizes)]):
                # a copy: a loss may work in place
                self._call(number, map_tensors(torch.clone, part), device)
        self._judge()

    def head(self, microbatch: int, output: Any) -> HeadOutput:
        """Ends a forward of `inputs[microbatch]`.

        Raises:
            ConfigError: as of `look`.
        """
        tensors = [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]
        self._half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        self._call(microbatch, output, tensors[0].device if tensors else torch.device("cpu"))
        if microbatch == 2:
            self._judge()
        return HeadOutput(None)

    def _call(self, number: int, output: Any, device: torch.device) -> None:
        """Calls a copy of the loss for both parts together (0), or for one of them."""
        if len(self._values) < number:
            return  # an earlier one has failed
        if number and not self._counts[number - 1]:
            self._values.append(torch.zeros((), device=device))  # of nothing: it is not called
            return
        gpus = [device] if device.type == "cuda" else []

        def generators() -> list[Tensor]:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

        try:
            # stages in other threads may use the same generators
            with default_generator_lock, torch.random.fork_rng(gpus), torch.no_grad():
                before = generators()
                if not number:
                    self._copy = _copied(self._loss_fn)
                value = checked_loss(self._copy(output, self._targets[number]))
                drawn = not all(map(torch.equal, before, generators()))
        except Exception:  # of samples that are too few for it, say
            return
        if not drawn:
            self._half |= value.dtype.itemsize < 4
            self._values.append(value.detach().double())

    def _judge(self) -> None:
        if len(self._values) < 3 or not any(self._counts):
            return
        # the one wait for a GPU
        both, *parts = torch.stack(self._values).cpu().tolist()
        is_sum = isinstance(self._loss, SumLoss)
        total = 1 if is_sum else sum(self._counts)
        shares = [1 if is_sum else count / total for count in self._counts]
        weighted = [share * part for share, part in zip(shares, parts, strict=True)]
        scale = max(map(abs, [both, *weighted]))
        if not math.isfinite(scale):
            return
        relative = _RELATIVE_OF_HALF if self._half else _RELATIVE
        if abs(both - sum(weighted)) > _ABSOLUTE + relative * scale:
            self._contradict(both, sum(weighted), parts)

    def _contradict(self, both: float, expected: float, parts: Sequence[float]) -> None:
        name, samples = name_of(function_of(self._loss_fn)), sum(self._sizes)
        first, second = self._sizes
        if isinstance(self._loss, SumLoss):
            raise ConfigError(
                f"loss_fn={name} is said to be a sum: it is {both:.7g} for {samples} samples, and "
                f"{expected:.7g} for {first} of them and the other {second} added up. For a mean, "
                f"pass MeanLoss(loss_fn, count), with a count of what it is a mean over"
            )
        if isinstance(self._loss, MeanLoss):
            counts = " and ".join(f"{count:.7g}" for count in self._counts)
            raise ConfigError(
                f"loss_fn={name} is {both:.7g} for {samples} samples, and {expected:.7g} as the "
                f"mean of {first} of them and the other {second}, weighted by their counts "
                f"{counts}: it is not a mean over what is counted, and micro-batches would give "
                f"another gradient than the batch. Turn off what else the model adds to its loss "
                f"(of a router, a z-loss), or {WAY_OUT}"
            )
        if not self._warns:
            return
        if abs(both - sum(parts)) <= _ABSOLUTE + _RELATIVE * abs(both):
            way = "It is a sum: pass SumLoss(loss_fn, lambda inputs, targets: len(targets))"
        else:
            way = (
                "If it averages over something else, pass MeanLoss(loss_fn, lambda inputs, "
                "targets: ...) with a count of that, such as (targets != -100).sum() or "
                "weight[targets].sum(); a loss that compares samples sees those of its "
                "micro-batch alone"
            )
        _log.warning(
            "loss_fn=%s is taken for a mean over samples, and is none: it is %.7g for %d samples, "
            "and %.7g as the mean of %d of them and the other %d. %s",
            name,
            both,
            samples,
            expected,
            first,
            second,
            way,
        )


def can_be_copied(loss_fn: Any) -> bool:
    """Returns whether calls of a copy leave no trace: not for a method, such as a trainer's."""
    owner = getattr(function_of(loss_fn), "__self__", None)
    return owner is None or isinstance(owner, nn.Module)


def _copied(loss_fn: Any) -> Any:
    """Returns a copy, whose calls change nothing that `loss_fn` keeps.

    Of a function too, with what it has from the function around it: a list of losses, a counter.
    Tensors, modules and functions there are shared. What a function keeps in a global is not
    copied.
    """
    if isinstance(loss_fn, functools.partial):
        return functools.partial(_copied(loss_fn.func), *loss_fn.args, **loss_fn.keywords)
    if isinstance(loss_fn, MeanLoss):
        return replace(loss_fn, loss_mean=_copied(loss_fn.loss_mean))
    if isinstance(loss_fn, SumLoss):
        return replace(loss_fn, loss_sum=_copied(loss_fn.loss_sum))
    if not isinstance(loss_fn, FunctionType):
        return copy.deepcopy(loss_fn)
    kept = [cell.cell_contents for cell in loss_fn.__closure__ or ()]
    cells = tuple(CellType(v if isinstance(v, _SHARED) else copy.deepcopy(v)) for v in kept)
    own = FunctionType(
        loss_fn.__code__, loss_fn.__globals__, loss_fn.__name__, loss_fn.__defaults__, cells
    )
    own.__kwdefaults__ = loss_fn.__kwdefaults__
    return own


_SHARED = Tensor, nn.Module, type, FunctionType


def _single(tensor: Tensor) -> Tensor:
    """Returns a copy, in single precision if it is in half: rounding would hide differences."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        return tensor.float()
    return tensor.clone()
