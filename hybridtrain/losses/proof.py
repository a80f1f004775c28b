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
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtrain.accelerator import put
from hybridtrain.devices import byte_size
from hybridtrain.errors import BatchError, ConfigError
from hybridtrain.losses.by_name import model_output
from hybridtrain.losses.counted import CountedLoss
from hybridtrain.losses.transformers_counts import WAY_OUT
from hybridtrain.losses.weights import copied_to_host
from hybridtrain.microbatch import map_tensors, merge, split
from hybridtrain.pipeline import HeadOutput, default_generator_lock
from hybridtrain.values import leaves_of

_log = logging.getLogger(__name__)

# How far both sides may be apart, relative to the larger values, and at all. Sums in another order
# explain 1e-6; an output in half precision is rounded, and may tip when it is computed again.
_RELATIVE, _RELATIVE_OF_HALF, _ABSOLUTE = 1e-4, 1e-2, 1e-6

_KEPT_BYTES = 2**26  # of the outputs of earlier micro-batches


def kind_of(loss: CountedLoss) -> Hashable:
    """Returns what two losses have in common that need only one proof."""
    return loss.is_sum, _code_of(loss.function), _code_of(loss.count)


def _code_of(function: Any) -> Hashable:
    """Returns what is the same of a lambda in a loop, which is a new object each time."""
    while isinstance(function, functools.partial):
        function = function.func
    kind: Any = type(function)
    code: Hashable = getattr(function, "__code__", kind)
    return code


def is_of_model(loss: CountedLoss, targets: Any) -> bool:
    """Returns whether a loss comes out of the model, so that its output has no samples to cut."""
    has_counts = not (loss.is_sum or loss.counts_samples)
    return loss.function is model_output or (targets is None and has_counts)


class _Samples(NamedTuple):
    """Some samples of a batch, in two parts.

    Attributes:
        start: the first of them.
        sizes: of the parts.
        counts: of the parts.
        microbatches: those that have them.
    """

    start: int
    sizes: Sequence[int]
    counts: Sequence[float]
    microbatches: range

    def of(self, batch: Any, batch_size: int) -> list[Any]:
        """Returns these samples of a batch: together, and in two parts."""
        samples = sum(self.sizes)
        rest = batch_size - self.start - samples
        both = split(batch, [self.start, samples, rest])[1]
        # of the batch again, in which values are marked that are not cut
        return [both, *split(batch, [self.start, *self.sizes, rest])[1:-1]]


def _of_first(sizes: Sequence[int]) -> _Samples:
    """Returns all samples of the first micro-batches, of these sizes, whose counts they are."""
    halves = _halves(sum(sizes))
    return _Samples(0, halves, halves, range(len(sizes)))


def _telling(loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int]) -> _Samples:
    """Returns the samples of a micro-batch, or of two of one sample, that tell most of a count."""
    # each micro-batch in two parts; one of a single sample stays whole
    parts = [part for size in sizes for part in _halves(size) if part]
    microbatch = [number for number, size in enumerate(sizes) for _ in range(min(size, 2))]
    has_counts = not (loss.is_sum or loss.counts_samples)
    counts = copied_to_host(loss.counts(inputs, targets, parts))() if has_counts else parts

    def unevenness(first: int) -> tuple[bool, float]:
        (a, b), (size_a, size_b) = counts[first : first + 2], parts[first : first + 2]
        return bool(a and b), abs(a / size_a - b / size_b) / (a + b) if a + b else -1.0

    pairs = [at for at in range(len(parts) - 1) if microbatch[at] == microbatch[at + 1]]
    first = max(pairs or range(len(parts) - 1), key=unevenness)
    two = slice(first, first + 2)
    within = range(microbatch[first], microbatch[first + 1] + 1)
    return _Samples(sum(parts[:first]), parts[two], counts[two], within)


class ModelLossProof:
    """Compares a loss that comes out of the model, by a forward of some samples and of their parts.

    Args:
        loss: of the step.
        inputs: of the batch.
        targets: of the batch.
        sizes: of its micro-batches; two samples or more.
        warns: whether this process says what is only a warning.

    Attributes:
        inputs: the micro-batches of the forward, which ends with `head`.
    """

    def __init__(
        self, loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int], warns: bool
    ) -> None:
        samples = _telling(loss, inputs, targets, sizes)
        self.inputs = samples.of(inputs, sum(sizes))
        self._values = _Values(loss, samples, samples.of(targets, sum(sizes)), warns)

    def head(self, number: int, output: Any) -> HeadOutput:
        """Takes the output for one of `inputs`.

        Raises:
            ConfigError: the loss is not what it is said to be.
        """
        self._values.add(number, output)
        return HeadOutput(None)


class OutputProof:
    """Compares the loss of outputs of the training step, whose head calls `look`.

    Args:
        loss: of the step.
        inputs: of the batch.
        targets: of the batch.
        sizes: of its micro-batches; two samples or more.
        warns: whether this process says what is only a warning.
    """

    def __init__(
        self, loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int], warns: bool
    ) -> None:
        self._loss, self._targets, self._sizes, self._warns = loss, targets, sizes, warns
        plain = loss.counts_samples
        self._samples = _of_first(sizes) if plain else _telling(loss, inputs, targets, sizes)
        self._outputs: list[Any] | None = []  # None: they cannot be cut, or the proof is done

    def look(self, microbatch: int, output: Any) -> None:
        """Looks at the output of a micro-batch of the training step.

        Raises:
            ConfigError: the loss is not what it is said to be.
        """
        if self._outputs is None or microbatch not in self._samples.microbatches:
            return
        tensors = _tensors_of(output)
        if any(not t.dim() or t.shape[0] != self._sizes[microbatch] for t in tensors):
            self._outputs = None  # not cut along its samples
            return
        self._outputs.append(map_tensors(_single, output))
        seen = self._sizes[: microbatch + 1]
        kept = len(self._outputs) * sum(map(byte_size, tensors))
        if self._loss.counts_samples and sum(seen) > 1 and kept > _KEPT_BYTES:
            self._samples = _of_first(seen)
        if microbatch + 1 < self._samples.microbatches.stop:
            return
        outputs, self._outputs = self._outputs, None
        try:
            both = merge(outputs)
        except (BatchError, RuntimeError):  # of other shapes, as where padding is cut off
            return
        targets = self._samples.of(self._targets, sum(self._sizes))
        values = _Values(self._loss, self._samples, targets, self._warns)
        with torch.autocast(_device_of(tensors).type, enabled=False):
            for number, part in enumerate([both, *split(both, self._samples.sizes)]):
                # a copy: a loss may work in place
                values.add(number, map_tensors(torch.clone, part))


class _Values:
    """The values of a loss for some samples, and for two parts of them.

    Args:
        loss: of the step.
        samples: the samples.
        targets: theirs: together, and in two parts.
        warns: see `OutputProof`.
    """

    def __init__(
        self, loss: CountedLoss, samples: _Samples, targets: Sequence[Any], warns: bool
    ) -> None:
        self._loss, self._targets, self._warns = loss, targets, warns
        self._sizes, self._counts = samples.sizes, samples.counts
        self._values: list[Tensor] = []
        self._copy: Any = None
        self._half = False

    def add(self, number: int, output: Any) -> None:
        """Calls a copy of the loss for both parts (0), or for one; compares after the last.

        Raises:
            ConfigError: the loss is not what it is said to be.
        """
        tensors = _tensors_of(output)
        device = _device_of(tensors)
        self._half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        if len(self._values) == number:  # else an earlier one has failed
            if number and not self._counts[number - 1]:
                self._values.append(torch.zeros((), device=device))  # of nothing: it is not called
            else:
                self._call(output, self._targets[number], device)
        if len(self._values) == 3:
            self._judge()

    def _call(self, output: Any, targets: Any, device: torch.device) -> None:
        gpus = [device] if device.type == "cuda" else []

        def generators() -> list[Tensor]:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

        try:
            # stages in other threads may use the same generators
            with default_generator_lock, torch.random.fork_rng(gpus), torch.no_grad():
                before = generators()
                if self._copy is None:
                    self._copy = self._loss.of(_copied(self._loss.function))
                value = self._copy(output, map_tensors(lambda t: put(t, device), targets))
                drawn = not all(map(torch.equal, before, generators()))
        except Exception:  # of samples that are too few for it, say
            return
        if not drawn:
            self._half |= value.dtype.itemsize < 4
            self._values.append(value.detach().double())

    def _judge(self) -> None:
        if not any(self._counts):
            return
        # the one wait for a GPU
        both, *parts = torch.stack(self._values).cpu().tolist()
        factors = (1, 1) if self._loss.is_sum else self._counts
        total = 1 if self._loss.is_sum else sum(self._counts)
        weighted = [part * factor / total for part, factor in zip(parts, factors, strict=True)]
        scale = max(map(abs, [both, *weighted]))
        relative = _RELATIVE_OF_HALF if self._half else _RELATIVE
        expected = sum(weighted)
        if math.isfinite(scale) and abs(both - expected) > _ABSOLUTE + relative * scale:
            self._contradict(both, expected, parts)

    def _contradict(self, both: float, expected: float, parts: Sequence[float]) -> None:
        name, samples, (first, second) = self._loss.name, sum(self._sizes), self._sizes
        if self._loss.is_sum:
            raise ConfigError(
                f"loss_fn={name} is said to be a sum: it is {both:.7g} for {samples} samples, and "
                f"{expected:.7g} for {first} of them and the other {second} added up. For a mean, "
                f"pass MeanLoss(loss_fn, count), with a count of what it is a mean over"
            )
        if not self._loss.counts_samples:
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
        text = (
            "loss_fn=%s is taken for a mean over samples, and is none: it is %.7g for %d samples, "
            "and %.7g as the mean of %d of them and the other %d. %s"
        )
        _log.warning(text, name, both, samples, expected, first, second, way)


def can_be_copied(loss: CountedLoss) -> bool:
    """Returns whether calls of a copy leave no trace: not for a method, such as a trainer's."""
    owner = getattr(loss.function, "__self__", None)
    return owner is None or isinstance(owner, nn.Module)


def _copied(function: Any) -> Any:
    """Returns a copy, whose calls change nothing that `function` keeps.

    Of a function too, with what it has from the function around it: a list of losses, a counter.
    Tensors, modules and functions there are shared. What a function keeps in a global is not
    copied.
    """
    if isinstance(function, functools.partial):
        return functools.partial(_copied(function.func), *function.args, **function.keywords)
    if not isinstance(function, FunctionType):
        return copy.deepcopy(function)
    kept = [cell.cell_contents for cell in function.__closure__ or ()]
    cells = tuple(CellType(v if isinstance(v, _SHARED) else copy.deepcopy(v)) for v in kept)
    own = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


_SHARED = Tensor, nn.Module, type, FunctionType


def _single(tensor: Tensor) -> Tensor:
    """Returns a copy, in single precision if it is in half: rounding would hide differences."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        return tensor.float()
    return tensor.clone()


def _halves(samples: int) -> list[int]:
    return [samples - samples // 2, samples // 2]


def _tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
