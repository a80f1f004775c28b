"""A loss and what it counts: a sum and a number.

`resolve` converts every loss to a `CountedLoss`. The loss of a step is then the sum over its
micro-batches of weight x value, divided by the sum of their counts. The weight is 1 if the loss
returns sums, and the micro-batch's count if it returns means. A plain function is a mean over
samples.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtrain._base.microbatch import Unread, batch_size, split
from hybridtrain._base.torch_private import without_torch_function
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import BatchError, ConfigError, UserError, argument, setting
from hybridtrain.head import made_from
from hybridtrain.loss.by_name import CountFn, LossFn, bce, cross_entropy, model_output, mse, nll
from hybridtrain.loss.metrics import IGNORED
from hybridtrain.loss.transformers_counts import count_of_output
from hybridtrain.pipeline import unwatched


def count_samples(inputs: Any, targets: Any) -> int:
    """Returns the number of samples of a batch, which a plain loss function counts."""
    return batch_size(inputs, targets)


@dataclass(frozen=True)
class CountedLoss:
    """A loss and the elements it counts; `resolve` creates one from any loss.

    Attributes:
        function: `function(output, targets)` returns the loss of one micro-batch, 0-dim.
        count: `count(inputs, targets)` returns the number of counted elements of a batch or
            micro-batch.
        is_sum: whether `function` returns sums over the counted elements rather than means.
        is_known_reduction: whether `function` is known to be that mean or sum and to handle a
            target of -100, so that the first step need not check it.
    """

    function: LossFn
    count: CountFn = count_samples
    is_sum: bool = False
    is_known_reduction: bool = False

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Returns the value for one micro-batch, a 0-dim tensor.

        Raises:
            BatchError: it is not a 0-dim tensor.
            UserError: it was computed from parameters that another process holds.
        """
        value: Any = self.function(output, targets)
        with without_torch_function():  # the engine's mode need not see this
            if isinstance(value, Tensor) and value.dim() == 0 and not value.is_meta:
                return value
        if isinstance(value, Tensor) and value.is_meta:
            raise UserError(
                "loss_fn reads parameters or buffers of the model that another process holds: with "
                f"{setting('engine', 'distributed')} it can use only the output and the targets "
                f"(for an L2 penalty, set {argument('weight_decay')} of the optimizer), or set "
                f"{setting('engine', 'local')}"
            )
        if isinstance(value, tuple) and len(value) == 2:
            raise BatchError(
                "loss_fn must return a 0-dim tensor, not a tuple: the count is needed before the "
                "backward, so pass SumLoss(loss_sum, count) with loss_sum(output, targets) and "
                "count(inputs, targets)"
            )
        is_tensor = isinstance(value, Tensor)
        shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise BatchError(f"loss_fn must return a 0-dim tensor, the mean, not {shown}")

    def of(self, function: LossFn, is_known_reduction: bool = False) -> CountedLoss:
        """Returns a loss with the same count for another function that returns the same values."""
        return CountedLoss(function, self.count, self.is_sum, is_known_reduction)

    @property
    def name(self) -> str:
        """The name of the function, for error messages."""
        function: Any = self.function
        function = function.func if isinstance(function, functools.partial) else function
        return str(getattr(function, "__name__", type(function).__name__))

    @functools.cached_property
    def counts_samples(self) -> bool:
        """True for a loss without a count, which is a mean over samples."""
        return self.count is count_samples

    @property
    def has_class_targets(self) -> bool:
        """True for a cross-entropy or nll, which take classes as targets."""
        return isinstance(self.count, TargetCount)

    @functools.cached_property
    def takes_log_probabilities(self) -> bool:
        """True for an nll of PyTorch or of `hybridtrain.loss`."""
        function = unwrapped(self.function)[0]
        return function is F.nll_loss or function is nll

    def counts(
        self, inputs: Any, targets: Any, sizes: Sequence[int]
    ) -> Sequence[int | float | Tensor]:
        """Returns the count of each micro-batch, or for a sum the count of the whole batch.

        Args:
            inputs: the inputs of the batch.
            targets: the targets of the batch.
            sizes: the number of samples of each micro-batch.

        Without the batch, in a process that does not read it, it can count only samples.
        """
        if isinstance(inputs, Unread) and not self.counts_samples:
            return [0] if self.is_sum else [0] * len(sizes)
        if self.is_sum:
            return [self.count(inputs, targets)]
        if self.counts_samples:
            return sizes
        if isinstance(self.count, TargetCount):
            return self.count.of_parts(targets, sizes)
        return list(map(self.count, split(inputs, sizes), split(targets, sizes)))

    def refuse_ignored(self, inputs: Any, targets: Any) -> None:
        """Refuses labels of -100 for a loss without a count.

        Checks the integer tensors of the targets, or `inputs["labels"]` if there are no targets;
        only tensors on the CPU, so that no step waits for a GPU.

        Raises:
            BatchError: a label is -100 and the loss would be weighted by samples.
        """
        if self.is_known_reduction or not self.counts_samples or isinstance(inputs, Unread):
            return
        if targets is None and isinstance(inputs, Mapping):
            targets = inputs.get("labels")
        if IGNORED in map(_smallest, leaves_of(targets)):
            raise BatchError(
                f"the labels contain {IGNORED}, but {setting('loss_fn', self.name)} does not "
                "declare what it averages over, so its micro-batches, batches and replicas would "
                "be weighted by their samples. Pass PyTorch's cross_entropy or nll_loss, "
                "losses.model_output for output.loss of transformers, or MeanLoss(loss_fn, "
                f"count) with count(inputs, targets)=(targets != {IGNORED}).sum(), or "
                "len(targets) for a mean over samples"
            )


def _smallest(labels: Any) -> int | None:
    """Returns the smallest value of an integer tensor on the CPU, None for anything else."""
    if not isinstance(labels, Tensor) or not labels.is_cpu or not labels.numel():
        return None
    return None if labels.is_floating_point() or labels.is_complex() else int(labels.min())


class SumLoss(CountedLoss):
    """A loss that is a sum, with the number of elements it sums.

    The loss of a step is the sum over all micro-batches, batches and replicas, divided by the sum
    of their counts. Any callable with a method `count` is treated the same way.

    >>> SumLoss(
    ...     lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
    ...     lambda inputs, targets: (targets != -100).sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_sum: `loss_sum(output, targets)` returns the sum for one micro-batch, 0-dim.
        count: `count(inputs, targets)` returns the count of one batch, before its forward: an int,
            a float (such as a sum of weights) or a 0-dim tensor. The count of a batch must be the
            sum of the counts of its samples.
    """

    def __init__(self, loss_sum: LossFn, count: CountFn) -> None:
        super().__init__(loss_sum, count, is_sum=True)


class MeanLoss(CountedLoss):
    """A loss that is a mean over the elements that `count` counts, such as labels other than -100.

    Each micro-batch is weighted by its count. A micro-batch that counts nothing contributes
    nothing, and `loss_mean` is not called for it.

    >>> MeanLoss(
    ...     lambda output, _: output.loss,  # a causal language model, which has no first label
    ...     lambda inputs, _: (inputs["labels"] != -100)[:, 1:].sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_mean: `loss_mean(output, targets)` returns the mean for one micro-batch, 0-dim.
        count: `count(inputs, targets)` returns the count of one batch or micro-batch, before its
            forward: an int, a float or a 0-dim tensor.
    """

    def __init__(self, loss_mean: LossFn, count: CountFn) -> None:
        super().__init__(loss_mean, count)


@dataclass(frozen=True)
class TargetCount:
    """The denominator of PyTorch's cross-entropy and nll with `reduction="mean"`.

    It is the number of targets other than `ignore_index`, or the sum of their class weights. For
    targets that are probabilities, which cannot be ignored, it is the number of samples.

    Args:
        ignore_index: the class that does not count.
        weight: class weights of shape (C); None: every class has weight 1.
    """

    ignore_index: int = IGNORED
    weight: Tensor | None = None
    _weights: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, inputs: Any, targets: Any) -> Tensor | int:
        """Returns the count of a batch, a 0-dim tensor unless all targets count."""
        if not isinstance(targets, Tensor):
            kind = type(targets).__name__
            raise BatchError(f"cross_entropy and nll need a tensor as targets=, not {kind}")
        if targets.is_floating_point():
            if targets.dim() < 2:
                raise BatchError(
                    f"cross_entropy and nll need targets= with classes, of dtype int64 "
                    f"(targets.long()), not {str(targets.dtype).removeprefix('torch.')} of shape "
                    f"{tuple(targets.shape)}; probabilities have the classes in dim 1"
                )
            return targets.numel() // targets.shape[1]
        valid = targets != self.ignore_index
        if self.weight is None:
            return valid.sum()
        counted = targets.masked_fill(~valid, 0)
        weights = self._weight_on(targets).index_select(0, counted.flatten())
        return (weights * valid.flatten()).sum()

    def of_parts(self, targets: Any, sizes: Sequence[int]) -> list[Any]:
        """Returns the count of each micro-batch of `targets`."""
        smallest = _smallest(targets) if self.weight is None and self.ignore_index < 0 else None
        if smallest is not None and smallest >= 0:
            # all targets count: one pass over the batch instead of one per micro-batch
            targets_per_sample = targets.numel() // targets.shape[0]
            if targets_per_sample == 1:
                return list(sizes)
            return [size * targets_per_sample for size in sizes]
        return [self(None, part) for part in split(targets, sizes)]

    def _weight_on(self, targets: Tensor) -> Tensor:
        """Returns the class weights on the targets' device, copied again only if they change."""
        weight = self.weight
        assert weight is not None
        if weight.device == targets.device:
            return weight.detach().double()
        if weight._version not in self._weights:
            self._weights.clear()
            self._weights[weight._version] = weight.detach().double().to(targets.device)
        return self._weights[weight._version]


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """Returns a weight for each class, inverse to its frequency, float32 of shape (classes,).

    For class indices, weight = labels / (classes x labels of the class), so the mean weight of a
    label is 1; labels of -100 do not count. For labels 0 or 1 of shape (samples, classes), it is
    the weight of a 1: the number of zeros / ones. A class without labels has weight 1.

    Source: G. King and L. Zeng, Logistic Regression in Rare Events Data, 2001; as
    `class_weight="balanced"` of scikit-learn.
    """
    if labels.is_floating_point():
        ones = labels.sum(0)
        return torch.where(ones > 0, (len(labels) - ones) / ones.clamp(min=1), 1.0).float()
    counted = labels[labels != IGNORED]
    counts = counted.bincount(minlength=classes)
    present = counts > 0
    balanced = counted.numel() / (present.sum() * counts.clamp(min=1))
    return torch.where(present, balanced, 1.0).float()


_BY_TARGETS = F.cross_entropy, F.nll_loss, cross_entropy, nll


def resolve(loss_fn: Any, net: nn.Module | None = None) -> CountedLoss:
    """Returns `loss_fn` with its count; a plain function counts samples.

    `SumLoss`, `MeanLoss` and losses with a method `count` define their count. It is known for
    `cross_entropy` and `nll` of PyTorch and of `hybridtrain.loss`, and for `nn.CrossEntropyLoss`,
    `nn.NLLLoss` and subclasses with the same forward, also in a `functools.partial` and under
    `torch.compile`. The count of `loss.model_output` depends on the class of `net`, a transformers
    model.

    Raises:
        ConfigError: a loss of PyTorch has `reduction="sum"` or `"none"`, or the count of
            `model_output` is unknown for this model.
    """
    if isinstance(loss_fn, CountedLoss):
        return loss_fn
    if callable(getattr(loss_fn, "count", None)):
        return CountedLoss(loss_fn, loss_fn.count, is_sum=True)
    if loss_fn is model_output and net is not None:
        return CountedLoss(loss_fn, count_of_output(net))
    function, settings = unwrapped(loss_fn)
    if settings.get("reduction") in ("sum", "none"):
        raise ConfigError(
            f"{setting('loss_fn', CountedLoss(function).name)} has "
            f'reduction="{settings["reduction"]}": use "mean", or declare what to divide the sum '
            "by: "
            f"SumLoss(loss_fn, lambda inputs, targets: targets.numel())"
        )
    if any(function is reduction for reduction in _BY_TARGETS):
        count = TargetCount(settings.get("ignore_index", IGNORED), settings.get("weight"))
        return CountedLoss(loss_fn, count, is_known_reduction=True)
    in_torch = getattr(F, getattr(function, "__name__", ""), None) is function
    in_torch |= isinstance(function, type) and function.__module__ == _TORCH_LOSSES
    return CountedLoss(loss_fn, is_known_reduction=in_torch or function in (mse, bce))


_TORCH_LOSSES = nn.modules.loss.__name__
_CALLS = "forward", "__call__"


def unwrapped(loss_fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the PyTorch function or class behind `loss_fn`, and its settings by name.

    Unwraps `functools.partial` and `torch.compile`, and finds the PyTorch base of a class that
    inherits its forward. A user's loss is returned unchanged, with the settings of its `partial`.
    """
    settings: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, functools.partial):
            args, named = loss_fn.args, loss_fn.keywords
            try:
                settings_of_call = (
                    inspect.signature(loss_fn.func).bind_partial(*args, **named).arguments
                )
            except (TypeError, ValueError):
                settings_of_call = named
            settings, loss_fn = {**settings_of_call, **settings}, loss_fn.func
        elif isinstance(loss_fn, nn.Module) and "_orig_mod" in loss_fn._modules:
            loss_fn = loss_fn._modules["_orig_mod"]
        elif _is_compiled(loss_fn):
            loss_fn = inspect.unwrap(loss_fn)
        else:
            break
    kinds: tuple[Any, ...] = type(loss_fn).__mro__
    base = next((kind for kind in kinds if kind.__module__ == _TORCH_LOSSES), None)
    if base is None or any(getattr(kinds[0], n) is not getattr(base, n) for n in _CALLS):
        return loss_fn, settings
    if issubclass(base, nn.CrossEntropyLoss | nn.NLLLoss):
        base = F.nll_loss if issubclass(base, nn.NLLLoss) else F.cross_entropy
    return base, {**vars(loss_fn), **dict(loss_fn.named_buffers()), **settings}


def _is_compiled(function: Any) -> bool:
    """Returns whether `function` is the direct result of `torch.compile`, without a decorator."""
    original = getattr(function, "_torchdynamo_orig_callable", None)
    return original is not None and getattr(function, "__wrapped__", None) is original


@unwatched
class _Nothing(torch.autograd.Function):
    """0, whose backward passes no gradient on: a gradient of 0 times infinity would be NaN."""

    @staticmethod
    def forward(ctx: Any, *numbers: Tensor) -> Tensor:
        return torch.zeros_like(numbers[-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None,) * len(ctx.needs_input_grad)


def zero_of(output: Any) -> Tensor:
    """Returns 0 as a tensor whose backward changes no gradient of what `output` was made from."""
    leaves = leaves_of(output)
    numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    # without the loss in an output, because its backward may divide by 0
    tensors = [source for leaf in numbers if leaf.dim() for source in made_from(leaf)]
    if numbers and not tensors:
        zero: Tensor = _Nothing.apply(*numbers)
        return zero
    return sum((t.reshape(-1)[:0].sum().float() for t in tensors), torch.zeros(()))
