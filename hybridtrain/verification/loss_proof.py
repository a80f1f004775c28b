"""Checks in a loss's first step that it is the mean, or the sum, it is treated as.

Some samples are split into parts, and the loss of all samples is compared with the parts' losses:

    a mean    loss(all) = (count(a) loss(a) + count(b) loss(b) + ...) / (count(a) + count(b) + ...)
    a sum     loss(all) = loss(a) + loss(b) + ...

The gradients with respect to the outputs are compared in the same way. A loss that contradicts its
count is an error. A plain function, which is treated as a mean over samples, may compare samples
with one another on purpose, so a mismatch is only a warning. Losses of PyTorch and of
`hybridtrain.loss` are known; they are only checked for logits instead of log-probabilities.

The parts are the first micro-batches of the step, as long as their outputs together take at most
`KEPT_BYTES`. If not even two micro-batches fit, the parts are the halves of one micro-batch, or two
micro-batches of one sample each. Among these pairs the check picks one in which both parts count
and the counts are most uneven, because equal parts would not reveal a wrong count. From halves that
are too large it takes as many samples as fit, at least one of each. At its peak, the check holds
about five times the outputs of these samples.

The check calls a copy of the loss (`captures.copied`) on copies of the outputs, with gradients as
in training. The random numbers that the loss draws for all samples are replayed for the parts
(`replayed_draws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybridtrain._base.accelerator import put
from hybridtrain._base.microbatch import Unread, map_tensors, merge, split
from hybridtrain._base.tensors import byte_size
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import BatchError, ConfigError, setting
from hybridtrain.loss import WAY_OUT, CountedLoss, copied_to_host, field_of, model_output
from hybridtrain.pipeline import HeadOutput, default_generator_lock
from hybridtrain.verification.captures import copied
from hybridtrain.verification.replayed_draws import (
    HostDraws,
    OtherDrawsError,
    RecordedDraws,
    SameDraws,
)

Warn = Callable[..., object]

# Tolerances of both sides: relative to the larger value, and absolute. A different order of
# summation explains 1e-6; outputs in half precision are rounded.
_RELATIVE, _RELATIVE_OF_HALF, _ABSOLUTE = 1e-4, 1e-2, 1e-6
_RELATIVE_OF_GRADIENT = 1e-3  # relative to the largest gradient

KEPT_BYTES = 2**26  # limit for the compared outputs, in bytes


def is_of_model(loss: CountedLoss, targets: Any) -> bool:
    """Returns whether the model computes the loss, so its output has no samples to split."""
    has_counts = not (loss.is_sum or loss.counts_samples)
    return loss.function is model_output or (targets is None and has_counts)


class _Samples(NamedTuple):
    """Some samples of a batch, in parts.

    Attributes:
        start: the index of the first sample in the batch.
        sizes: the number of samples in each part.
        counts: the count of each part.
        microbatches: the micro-batches that contain these samples.
    """

    start: int
    sizes: Sequence[int]
    counts: Sequence[float]
    microbatches: range

    def of(self, batch: Any, batch_size: int) -> list[Any]:
        """Returns these samples of a batch: first all together, then each part."""
        samples = sum(self.sizes)
        remainder = batch_size - self.start - samples
        together = split(batch, [self.start, samples, remainder])[1]
        # from the batch, not from `together`: only the batch marks the values that are not cut
        return [together, *split(batch, [self.start, *self.sizes, remainder])[1:-1]]

    def first(self, microbatches: int) -> _Samples:
        """Returns the first parts, each of which is a micro-batch."""
        sizes, counts = self.sizes[:microbatches], self.counts[:microbatches]
        return _Samples(0, sizes, counts, range(microbatches))


def _counts(loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int]) -> Sequence[float]:
    if loss.is_sum or loss.counts_samples or isinstance(inputs, Unread):
        return sizes
    return copied_to_host(loss.counts(inputs, targets, sizes))()


def _most_informative(
    loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int]
) -> _Samples:
    """Returns the two halves of a micro-batch, or two samples, with the most uneven counts."""
    # each micro-batch in two parts; a micro-batch with a single sample stays whole
    parts = [part for size in sizes for part in (size - size // 2, size // 2) if part]
    microbatch = [number for number, size in enumerate(sizes) for _ in range(min(size, 2))]
    counts = _counts(loss, inputs, targets, parts)

    def unevenness(first: int) -> tuple[bool, float]:
        (a, b), (size_a, size_b) = counts[first : first + 2], parts[first : first + 2]
        return bool(a and b), abs(a / size_a - b / size_b) / (a + b) if a + b else -1.0

    pairs = [at for at in range(len(parts) - 1) if microbatch[at] == microbatch[at + 1]]
    # The first of equal ones, so that all ranks of a pipeline choose the same.
    first = max(pairs or range(len(parts) - 1), key=unevenness)
    pair = slice(first, first + 2)
    microbatches = range(microbatch[first], microbatch[first + 1] + 1)
    return _Samples(sum(parts[:first]), parts[pair], counts[pair], microbatches)


class ModelLossProof:
    """Checks a loss computed by the model, by a forward of some samples and of their parts.

    Args:
        loss: the loss of the step.
        inputs: the inputs of the batch.
        targets: the targets of the batch.
        sizes: the number of samples of each micro-batch; two samples or more in all.
        warn: logs a warning; takes the arguments of `Logger.warning`.

    Attributes:
        inputs: the micro-batches of the forward, which ends with `head`.
    """

    def __init__(
        self, loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int], warn: Warn
    ) -> None:
        samples = _most_informative(loss, inputs, targets, sizes)
        self.inputs = samples.of(inputs, sum(sizes))
        self._calls = _Calls(_Copy(loss), samples, samples.of(targets, sum(sizes)), warn)

    def head(self, number: int, output: Any) -> HeadOutput:
        """Takes the output for the micro-batch `inputs[number]`.

        Raises:
            ConfigError: the loss contradicts its count.
        """
        self._calls.add(number, output)
        return HeadOutput(None)


class LogProbabilityCheck:
    """Refuses logits in the first step with an nll.

    For a known nll it checks the model's output. For other losses it checks the argument of
    `nll_loss`, in a call of a copy of the loss for one sample.

    Args:
        loss: the loss of the step.
        targets: the targets of the batch.
        samples: the number of samples of the batch.
    """

    def __init__(self, loss: CountedLoss, targets: Any, samples: int) -> None:
        self._loss, self._targets, self._samples = loss, targets, samples
        self._copy = None if loss.takes_log_probabilities else _Copy(loss)

    def observe(self, microbatch: int, output: Any) -> None:
        """Checks the output of the first micro-batch; ignores the others.

        Raises:
            ConfigError: the output contains logits.
        """
        if microbatch:
            return
        if self._copy is None:
            check_log_probabilities(field_of(output, "logits", output), self._loss.name)
            return
        if any(not t.dim() or not t.shape[0] or t.is_sparse for t in _tensors_of(output)):
            return
        sample = map_tensors(lambda t: t[:1].detach(), output)
        sample_part = _Samples(0, [1], [1], range(1))
        calls = _Calls(
            self._copy, sample_part, sample_part.of(self._targets, self._samples), lambda *_: None
        )
        calls.add(0, sample)


@torch.no_grad()
def check_log_probabilities(values: Any, loss: str) -> None:
    """Checks that no value exceeds 0 by more than rounding; waits for the device.

    Raises:
        ConfigError: a value is above 0.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.numel():
        return
    largest, size = torch.stack([values.max(), values.abs().max()]).double().tolist()
    # x - logsumexp(x) may round to more than 0, and so may log(p + epsilon)
    if largest > 1e-3 + 4 * torch.finfo(values.dtype).eps * size:
        raise ConfigError(
            f"{setting('loss_fn', loss)} takes log-probabilities, which are never above 0, but the "
            f"model returns logits (one is {largest:.4g}): set "
            f"{setting('loss_fn', 'cross_entropy')}"
        )


class _NllInputs(TorchFunctionMode):
    """Checks the input of every call of `nll_loss` in its context."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self._loss = loss

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.nll_loss:
            check_log_probabilities(args[0] if args else (kwargs or {}).get("input"), self._loss)
        return func(*args, **(kwargs or {}))


class OutputProof:
    """Checks a loss on the outputs of the training step; the step's head calls `observe`.

    Args:
        loss: the loss of the step.
        inputs: the inputs of the batch.
        targets: the targets of the batch.
        sizes: the number of samples of each micro-batch; two samples or more in all.
        warn: logs a warning; takes the arguments of `Logger.warning`.
    """

    def __init__(
        self, loss: CountedLoss, inputs: Any, targets: Any, sizes: Sequence[int], warn: Warn
    ) -> None:
        self._loss, self._inputs, self._targets = loss, inputs, targets
        self._sizes, self._warn = sizes, warn
        self._copy = _Copy(loss)  # now, before a stage changes objects that it captures
        everything = range(len(sizes))
        self._whole = _Samples(0, sizes, _counts(loss, inputs, targets, sizes), everything)
        self._samples = _most_informative(loss, inputs, targets, sizes)
        self._outputs: list[Any] | None = []  # None: they cannot be split, or the check is done
        self._trained: list[bool] = []

    def observe(self, microbatch: int, output: Any) -> None:
        """Takes the output of a micro-batch; compares once all samples have arrived.

        Raises:
            ConfigError: the loss contradicts its count.
        """
        if self._outputs is None:
            return
        try:
            # Heads run at turns of the last stage, so one after another.
            self._observe(self._outputs, microbatch, output)
        except ConfigError:
            raise
        except Exception as error:  # outputs that cannot be split, such as sparse tensors
            self._outputs = None
            _say_not_compared(self._loss, self._warn, error)

    def _observe(self, outputs: list[Any], microbatch: int, output: Any) -> None:
        tensors = _tensors_of(output)
        if any(not t.dim() or t.shape[0] != self._sizes[microbatch] for t in tensors):
            self._outputs = None  # not split along its samples
            if self._loss.counts_samples:
                self._warn(_NOT_BY_SAMPLE, setting("loss_fn", self._loss.name))
            return
        # Outputs are not known earlier, and all micro-batches have about the same bytes per sample.
        if microbatch == 0:
            self._choose(sum(map(byte_size, tensors)) / self._sizes[0])
        if microbatch not in self._samples.microbatches:
            return
        start = self._samples.start - sum(self._sizes[:microbatch])
        compared = slice(max(start, 0), start + sum(self._samples.sizes))
        self._trained = [t.requires_grad for t in tensors]
        # A copy: the loss of the step, which runs next, may work in place.
        outputs.append(map_tensors(lambda t: _single(t[compared]), output))
        if microbatch + 1 < self._samples.microbatches.stop:
            return
        self._outputs = None
        try:
            merged = merge(outputs)
        except (BatchError, RuntimeError):  # different shapes, for example from trimmed padding
            return
        del outputs
        targets = self._samples.of(self._targets, sum(self._sizes))
        calls = _Calls(self._copy, self._samples, targets, self._warn, self._trained)
        with torch.autocast(_device_of(tensors).type, enabled=False):
            for number, part in enumerate([merged, *split(merged, self._samples.sizes)]):
                calls.add(number, part)

    def _choose(self, sample_bytes: float) -> None:
        """Chooses the samples to compare, by the output bytes of a sample."""
        ends = accumulate(self._sizes)
        fitting = sum(samples * sample_bytes <= KEPT_BYTES for samples in ends)
        if fitting > 1:
            self._samples = self._whole.first(fitting)
        elif sum(self._samples.sizes) * sample_bytes > KEPT_BYTES:
            self._samples = self._fewer(max(1, int(KEPT_BYTES / sample_bytes / 2)))

    def _fewer(self, most: int) -> _Samples:
        """Returns at most `most` samples from each of the two parts, around their boundary."""
        start, (first, second), _, microbatches = self._samples
        boundary, end = start + first, sum(self._sizes)
        pair_sizes = [min(first, most), min(second, most)]
        sizes = [boundary - pair_sizes[0], *pair_sizes, end - boundary - pair_sizes[1]]
        counts = iter(_counts(self._loss, self._inputs, self._targets, [n for n in sizes if n]))
        by_part = [next(counts) if size else 0 for size in sizes]
        return _Samples(boundary - pair_sizes[0], pair_sizes, by_part[1:3], microbatches)


_NOT_BY_SAMPLE = (
    "%s is treated as a mean over samples, but this could not be checked: the model's output has "
    "tensors without the samples in dim 0, such as the loss. For the loss of a transformers model, "
    "pass losses.model_output"
)
_NOT_COMPARED = (
    "%s is treated as a mean over samples, but this could not be checked: in a call for all "
    "samples together, or for parts of them with the same random numbers, it %s"
)


def _say_not_compared(loss: CountedLoss, warn: Warn, error: Exception) -> None:
    if loss.counts_samples:
        reason = "draws others"
        if not isinstance(error, OtherDrawsError):
            reason = f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warn(_NOT_COMPARED, setting("loss_fn", loss.name), reason)


class _Calls:
    """Calls a loss for some samples and for their parts, and compares after the last call.

    Args:
        loss_copy: a copy of the step's loss.
        samples: the samples.
        targets: the targets of all samples together, then of each part.
        warn: logs a warning; takes the arguments of `Logger.warning`.
        trained: for each tensor of an output, whether it has a gradient; None: no gradients are
            compared.

    Attributes:
        is_half: whether any value is in half precision.
    """

    def __init__(
        self,
        loss_copy: _Copy,
        samples: _Samples,
        targets: Sequence[Any],
        warn: Warn,
        trained: Sequence[bool] | None = None,
    ) -> None:
        self._copy, self._loss = loss_copy, loss_copy.loss
        self._targets, self._warn, self._trained = targets, warn, trained
        self._sizes, self._counts = samples.sizes, samples.counts
        self._values: list[Tensor] = []
        self._gradients: list[list[Tensor]] = []
        self._draws = RecordedDraws()
        self.is_half = False

    def add(self, number: int, output: Any) -> None:
        """Calls the loss for all samples (`number` 0) or for a part; compares after the last.

        Raises:
            ConfigError: the loss contradicts its count.
        """
        tensors = _tensors_of(output)
        device = _device_of(tensors)
        self.is_half |= any(t.is_floating_point() and t.dtype.itemsize < 4 for t in tensors)
        if len(self._values) == number:  # otherwise an earlier call has failed
            if number and not self._counts[number - 1]:  # an empty part: do not call the loss
                self._values.append(torch.zeros((), device=device, dtype=torch.double))
                trained = self._trained or ()
                pairs = zip(tensors, trained, strict=bool(trained))
                self._gradients.append([torch.zeros_like(t) for t, has in pairs if has])
            else:
                self._try(number, output, device)
        if len(self._values) == 1 + len(self._sizes):
            self._compare()

    def _try(self, number: int, output: Any, device: torch.device) -> None:
        try:
            self._call(number, output, device)
        except ConfigError:  # from `_NllInputs`
            raise
        except OtherDrawsError as error:
            _say_not_compared(self._loss, self._warn, error)
        except Exception as error:
            # the step calls the loss for the parts too, but with different random numbers
            if number == 0 or self._draws.drawn:
                _say_not_compared(self._loss, self._warn, error)

    def _call(self, number: int, output: Any, device: torch.device) -> None:
        leaves, tree = tree_flatten(output)
        inputs: list[Tensor] = []
        trained = iter(self._trained or ())
        with torch.set_grad_enabled(self._trained is not None):
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    leaf = leaf.detach()
                    if next(trained, False):
                        inputs.append(leaf.requires_grad_())
                    leaves[at] = leaf.clone()  # a loss may modify its input in place
            targets = map_tensors(lambda t: put(t, device), self._targets[number])
            draws: Any = self._draws
            if number:
                start = sum(self._sizes[: number - 1])
                size, samples = self._sizes[number - 1], sum(self._sizes)
                draws = SameDraws(self._draws.drawn, start, size, samples)
            with draws, _NllInputs(self._loss.name):
                value = self._copy(tree_unflatten(leaves, tree), targets, device)
            # The generator has moved, but no operation was seen: its numbers cannot be replayed.
            if self._copy.has_drawn and not self._draws.drawn:  # not intercepted in compiled code
                raise OtherDrawsError
            gradients: Sequence[Tensor | None] = [None] * len(inputs)
            if value.requires_grad and inputs:
                gradients = torch.autograd.grad(value, inputs, allow_unused=True)
        self.is_half |= value.dtype.itemsize < 4
        self._values.append(value.detach().double())
        self._gradients.append(
            [
                torch.zeros_like(leaf) if gradient is None else gradient
                for leaf, gradient in zip(inputs, gradients, strict=True)
            ]
        )

    def _compare(self) -> None:
        if not any(self._counts):
            return
        total = 1 if self._loss.is_sum else sum(self._counts)
        weights = [1 if self._loss.is_sum else count / total for count in self._counts]
        # the only synchronization with a GPU
        gradient_difference, scale = self._gradients_apart(weights)
        whole, *parts, gradient_difference, scale = (
            torch.stack([*self._values, gradient_difference, scale]).cpu().tolist()
        )
        expected = sum(part * weight for part, weight in zip(parts, weights, strict=True))
        largest = max(map(abs, [whole, *map(float.__mul__, parts, map(float, weights))]))
        relative = _RELATIVE_OF_HALF if self.is_half else _RELATIVE
        # The step itself deals with a loss that is not finite.
        if not math.isfinite(whole):
            return
        if not abs(whole - expected) <= _ABSOLUTE + relative * largest:  # a part's loss may be NaN
            self._report_mismatch(whole, expected, parts)
        elif (
            math.isfinite(scale)
            and gradient_difference > max(relative, _RELATIVE_OF_GRADIENT) * scale
        ):
            self._report_mismatch(whole, expected, parts, gradient_difference / scale)

    def _gradients_apart(self, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Returns the largest absolute difference of the gradients and the largest gradient."""
        zero = torch.zeros_like(self._values[0])
        differences, sizes = [zero], [zero]
        whole, *parts = self._gradients
        for number, gradient in enumerate(whole):
            pieces = [part[number] * w for part, w in zip(parts, weights, strict=True)]
            if gradient.numel():
                sizes.append(gradient.abs().max().double())
                differences.append((torch.cat(pieces) - gradient).abs().max().double())
        return torch.stack(differences).max(), torch.stack(sizes).max()

    def _report_mismatch(
        self, whole: float, expected: float, parts: Sequence[float], apart: float | None = None
    ) -> None:
        name, samples = self._loss.name, sum(self._sizes)
        of_parts = _listed(self._sizes)
        result = f"it is {whole:.7g} for {samples} samples, and {expected:.7g} as the"
        if apart is not None:
            result = (
                f"its gradient for {samples} samples differs, by {apart:.2g} of the largest, from "
                f"the"
            )
        if self._loss.is_sum:
            raise ConfigError(
                f"{setting('loss_fn', name)} was passed as a sum: {result} sum of parts of "
                f"{of_parts}. For a mean, pass MeanLoss(loss_fn, count), with a count of the "
                "elements it averages over"
            )
        if not self._loss.counts_samples:
            raise ConfigError(
                f"{setting('loss_fn', name)}: {result} mean of parts of {of_parts}, weighted by "
                f"their counts {_listed(self._counts)}: it is not a mean over the counted "
                "elements, so micro-batches would give a different gradient than the batch. "
                "Disable additional terms of the model's loss (of a router, a z-loss), or "
                f"{WAY_OUT}"
            )
        if apart is None and abs(whole - sum(parts)) <= _ABSOLUTE + _RELATIVE * abs(whole):
            remedy = "It is a sum: pass SumLoss(loss_fn, lambda inputs, targets: len(targets))"
        else:
            remedy = (
                "If it averages over something else, pass MeanLoss(loss_fn, lambda inputs, "
                "targets: ...) with the count of its elements, such as (targets != -100).sum() or "
                "weight[targets].sum(); a loss that compares samples sees only the samples of its "
                "micro-batch (see docs/losses.md)"
            )
        text = "%s is treated as a mean over samples, but it is not one: %s mean of parts of %s. %s"
        self._warn(text, setting("loss_fn", name), result, of_parts, remedy)


def _listed(numbers: Sequence[float]) -> str:
    """Returns numbers as text: the first few and the last."""
    texts = [f"{number:.7g}" for number in numbers]
    if len(texts) > 6:
        texts = [*texts[:4], "...", texts[-1]]
    return ", ".join(texts[:-1]) + f" and {texts[-1]}"


class _Copy:
    """A copy of a loss that has no side effects and draws the same numbers in each call.

    Attributes:
        has_drawn: whether the last call drew from a default generator of PyTorch.
    """

    def __init__(self, loss: CountedLoss) -> None:
        held: dict[int, Any] = {}
        self.loss = loss.of(copied(loss.function, held))
        self._draws = HostDraws(held.values())
        self.has_drawn = False

    def __call__(self, output: Any, targets: Any, device: torch.device) -> Tensor:
        gpus = [device] if device.type == "cuda" else []

        def generators() -> list[Tensor]:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]

        # stages in other threads may use the same generators
        # The step's own draws must not depend on whether a check was due.
        with default_generator_lock, torch.random.fork_rng(gpus), self._draws.call():
            states_before = generators()
            value = self.loss(output, targets)
            self.has_drawn = not all(map(torch.equal, states_before, generators()))
            return value


def _single(tensor: Tensor) -> Tensor:
    """Returns a copy, in fp32 if the tensor is in half precision: rounding hides differences."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        return tensor.float()
    return tensor.clone()


def _tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(output) if isinstance(leaf, Tensor)]


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")
