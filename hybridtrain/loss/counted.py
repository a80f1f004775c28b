"""A loss and what it counts: a sum and a number.

`resolve` makes a `CountedLoss` of every loss, once. From then on all are one: the loss of a step is
the sum over its micro-batches of factor x value, divided by the sum of their counts, where the
factor is 1 for a loss whose values are sums, and the micro-batch's count for one whose values are
means. A plain function is a mean that counts samples.
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

from hybridtrain._base.microbatch import batch_size, split
from hybridtrain._base.values import leaves_of
from hybridtrain.errors import BatchError, ConfigError, UserError
from hybridtrain.loss.by_name import CountFn, LossFn, cross_entropy, model_output, mse, nll
from hybridtrain.loss.metrics import IGNORED
from hybridtrain.loss.transformers_counts import count_of_output


def count_samples(inputs: Any, targets: Any) -> int:
    """Returns the number of samples of a batch, which a plain function is a mean over."""
    return batch_size(inputs, targets)


@dataclass(frozen=True)
class CountedLoss:
    """A loss and what it counts, as `resolve` makes it of any loss.

    Attributes:
        function: `function(output, targets)` of one micro-batch.
        count: `count(inputs, targets)` of a batch or of one micro-batch: what its loss counts.
        is_sum: whether the values of `function` are sums over what counts, and not means.
        trusted: whether it is known to be the mean or the sum that it is taken for, so that a first
            step proves nothing, and that a target of -100 is to it a number like others.
    """

    function: LossFn
    count: CountFn = count_samples
    is_sum: bool = False
    trusted: bool = False

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Returns the value for one micro-batch, a 0-dim tensor.

        Raises:
            BatchError: it is not a 0-dim tensor.
            UserError: it was computed from parameters that this process does not have.
        """
        value: Any = self.function(output, targets)
        if isinstance(value, Tensor) and value.is_meta:
            raise UserError(
                "loss_fn reads parameters or buffers of the model that another process has: with "
                "engine=distributed it can use the output and the targets alone (for an L2 "
                "penalty, weight_decay= of the optimizer), or set engine=local"
            )
        if isinstance(value, Tensor) and value.dim() == 0:
            return value
        if isinstance(value, tuple) and len(value) == 2:
            raise BatchError(
                "loss_fn must return a 0-dim tensor, not a tuple: the count has to be known before "
                "the backward, so pass SumLoss(loss_sum, count) with loss_sum(output, targets) and "
                "count(inputs, targets)"
            )
        is_tensor = isinstance(value, Tensor)
        shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise BatchError(f"loss_fn must return a 0-dim tensor, the mean, not {shown}")

    def of(self, function: LossFn, trusted: bool = False) -> CountedLoss:
        """Returns the loss of another function, whose values are those of this one's."""
        return CountedLoss(function, self.count, self.is_sum, trusted)

    @property
    def name(self) -> str:
        """The name of the function, for an error message."""
        function: Any = self.function
        function = function.func if isinstance(function, functools.partial) else function
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def counts_samples(self) -> bool:
        """True for a loss that was given without a count."""
        return self.count is count_samples

    @property
    def has_class_targets(self) -> bool:
        """True for a cross-entropy or nll, whose targets are classes."""
        return isinstance(self.count, TargetCount)

    @property
    def takes_log_probabilities(self) -> bool:
        """True for an nll of PyTorch or of `hybridtrain.loss`."""
        function = _unwrapped(self.function)[0]
        return function is F.nll_loss or function is nll

    def counts(
        self, inputs: Any, targets: Any, sizes: Sequence[int]
    ) -> Sequence[int | float | Tensor]:
        """Returns the count of each micro-batch of a batch, or of all together for a sum.

        Args:
            inputs: of the batch.
            targets: of the batch.
            sizes: of its micro-batches.
        """
        if self.is_sum:
            return [self.count(inputs, targets)]
        if self.counts_samples:
            return sizes
        if isinstance(self.count, TargetCount):
            return self.count.of_parts(targets, sizes)
        return list(map(self.count, split(inputs, sizes), split(targets, sizes)))

    def refuse_ignored(self, inputs: Any, targets: Any) -> None:
        """Refuses labels of -100 for a loss that does not say what it averages over.

        Looks at the integer tensors of the targets, or without targets at `inputs["labels"]`; on
        the CPU alone, so that no step waits for a GPU.

        Raises:
            BatchError: there are such labels, and samples would be counted.
        """
        if self.trusted or not self.counts_samples:
            return
        if targets is None and isinstance(inputs, Mapping):
            targets = inputs.get("labels")
        if IGNORED in map(_smallest, leaves_of(targets)):
            raise BatchError(
                f"the labels contain {IGNORED}, and loss_fn={self.name} does not say what it "
                f"averages over: its micro-batches, batches and replicas would be weighted by "
                f"their samples. Pass PyTorch's cross_entropy or nll_loss, losses.model_output for "
                f"output.loss of transformers, or MeanLoss(loss_fn, count) with count(inputs, "
                f"targets)=(targets != {IGNORED}).sum(), or len(targets) for a mean over samples"
            )


def _smallest(labels: Any) -> int | None:
    """Returns the smallest number of an integer tensor on the CPU, None for anything else."""
    if not isinstance(labels, Tensor) or not labels.is_cpu or not labels.numel():
        return None
    return None if labels.is_floating_point() or labels.is_complex() else int(labels.min())


class SumLoss(CountedLoss):
    """A loss that is a sum, and how many elements it sums.

    A step is the sum over all micro-batches, batches and replicas divided by the sum of their
    counts. Any callable with a method `count` is such a loss too.

    >>> SumLoss(
    ...     lambda output, targets: F.cross_entropy(output, targets, reduction="sum"),
    ...     lambda inputs, targets: (targets != -100).sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_sum: `loss_sum(output, targets)` of one micro-batch, a 0-dim tensor.
        count: `count(inputs, targets)` of one batch, before its forward: an int, a float (such as
            a sum of weights) or a 0-dim tensor. The count of a batch must be the sum of the counts
            of its samples.
    """

    def __init__(self, loss_sum: LossFn, count: CountFn) -> None:
        super().__init__(loss_sum, count, is_sum=True)


class MeanLoss(CountedLoss):
    """A loss that is a mean over what `count` counts, such as the labels that are not ignored.

    Each micro-batch is weighted by its count. A micro-batch that counts nothing contributes
    nothing, and `loss_mean` is not called for it.

    >>> MeanLoss(
    ...     lambda output, _: output.loss,  # of a causal language model, which has no first label
    ...     lambda inputs, _: (inputs["labels"] != -100)[:, 1:].sum(),
    ... )  # doctest: +SKIP

    Args:
        loss_mean: `loss_mean(output, targets)` of one micro-batch, a 0-dim tensor.
        count: as in `SumLoss`, of one batch or one micro-batch.
    """

    def __init__(self, loss_mean: LossFn, count: CountFn) -> None:
        super().__init__(loss_mean, count)


@dataclass(frozen=True)
class TargetCount:
    """The denominator of PyTorch's cross-entropy and nll with `reduction="mean"`.

    That is the number of targets other than `ignore_index`, or the sum of their class weights. For
    targets that are probabilities, which cannot be ignored, it is the number of samples.

    Args:
        ignore_index: the target that does not count.
        weight: a weight for each class, of shape (C); None: 1 each.
    """

    ignore_index: int = IGNORED
    weight: Tensor | None = None
    _weights: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, inputs: Any, targets: Any) -> Tensor | int:
        """Returns the count of a batch, a 0-dim tensor unless all targets count."""
        if not isinstance(targets, Tensor):
            kind = type(targets).__name__
            raise BatchError(f"cross_entropy and nll need targets= that are a tensor, not {kind}")
        if targets.is_floating_point():
            if targets.dim() < 2:
                raise BatchError(
                    f"cross_entropy and nll need targets= that are classes, of dtype int64 "
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
            # all count: one pass in place of one for each part
            each = targets.numel() // len(targets)
            return [size * each for size in sizes]
        return [self(None, part) for part in split(targets, sizes)]

    def _weight_on(self, targets: Tensor) -> Tensor:
        """Returns the class weights beside the targets, copied again only when they change."""
        weight = self.weight
        assert weight is not None
        if weight.device == targets.device:
            return weight.detach().double()
        if weight._version not in self._weights:
            self._weights.clear()
            self._weights[weight._version] = weight.detach().double().to(targets.device)
        return self._weights[weight._version]


_BY_TARGETS = F.cross_entropy, F.nll_loss, cross_entropy, nll


def resolve(loss_fn: Any, net: nn.Module | None = None) -> CountedLoss:
    """Returns `loss_fn` with what it counts; with the samples for a plain function.

    Counts are known of `SumLoss`, `MeanLoss` and losses with a method `count`; of `cross_entropy`
    and `nll` of PyTorch and of `hybridtrain.loss`; and of `nn.CrossEntropyLoss`, `nn.NLLLoss` and
    what is derived from them with the same forward; also in a `functools.partial` and under
    `torch.compile`. `loss.model_output` is counted as `net`, a model of transformers, computes
    it.

    Raises:
        ConfigError: a loss of PyTorch with `reduction="sum"` or `"none"`, or `model_output` of a
            model whose rule is unknown.
    """
    if isinstance(loss_fn, CountedLoss):
        return loss_fn
    if callable(getattr(loss_fn, "count", None)):
        return CountedLoss(loss_fn, loss_fn.count, is_sum=True)
    if loss_fn is model_output and net is not None:
        return CountedLoss(loss_fn, count_of_output(net))
    function, settings = _unwrapped(loss_fn)
    if settings.get("reduction") in ("sum", "none"):
        raise ConfigError(
            f'loss_fn={CountedLoss(function).name} with reduction="{settings["reduction"]}": leave '
            f'it at "mean", or say what the sum is divided by: '
            f"SumLoss(loss_fn, lambda inputs, targets: targets.numel())"
        )
    if any(function is known for known in _BY_TARGETS):
        count = TargetCount(settings.get("ignore_index", IGNORED), settings.get("weight"))
        return CountedLoss(loss_fn, count, trusted=True)
    in_torch = getattr(F, getattr(function, "__name__", ""), None) is function
    in_torch |= isinstance(function, type) and function.__module__ == _TORCH_LOSSES
    return CountedLoss(loss_fn, trusted=in_torch or function is mse)


_TORCH_LOSSES = nn.modules.loss.__name__
_CALLS = "forward", "__call__"


def _unwrapped(loss_fn: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the function or the class of PyTorch that `loss_fn` is a form of, and its settings.

    It is looked for in `functools.partial`, under `torch.compile`, and among the bases of a class
    that keeps their forward. A loss of the user is returned unchanged, with the settings of its
    `partial`.
    """
    settings: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, functools.partial):
            args, named = loss_fn.args, loss_fn.keywords
            try:
                given = inspect.signature(loss_fn.func).bind_partial(*args, **named).arguments
            except (TypeError, ValueError):
                given = named
            settings, loss_fn = {**given, **settings}, loss_fn.func
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
    """Returns whether `function` is the result of `torch.compile`, and not a decorator's of it."""
    own = getattr(function, "_torchdynamo_orig_callable", None)
    return own is not None and getattr(function, "__wrapped__", None) is own


def zero_of(output: Any) -> Tensor:
    """Returns 0, from which a backward gives zeros to all that `output` was computed from."""
    leaves = leaves_of(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    # without an output's own loss, whose backward may divide by 0
    tensors = [tensor for tensor in tensors if tensor.dim()] or tensors
    return sum((t.reshape(-1)[:0].sum().float() for t in tensors), torch.zeros(()))
